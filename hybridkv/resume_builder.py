"""What a resume point keeps of a row's blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.block_owners import BlockOwners
from hybridkv.index_layout import IndexLayout
from hybridkv.node_arrays import NodeArrays
from hybridkv.resume_points import PointContents
from hybridkv.token_hash import NO_MATCH

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
_NO_TOKENS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Tail:
    """What lies behind the last whole unit.

    Shapes:
        tokens  [less than a unit, at least 1] int32
        blocks  per group of `layout.token_groups` [ordinals from the unit's end on] int64 flat blocks; 0 or the null
                block for one out of the window
    Attributes:
        key: key of the features at these tokens, the entry of `Match.keys` for the unit they begin; 0 without any.
    """

    tokens: Int32
    blocks: Sequence[Int64]
    key: int


class ResumeBuilder:
    """Checks and gathers the contents of new resume points."""

    def __init__(self, layout: IndexLayout, nodes: NodeArrays, owners: BlockOwners) -> None:
        self._layout, self._nodes, self._owners = layout, nodes, owners

    def contents(
        self,
        node: int,
        position: int,
        window_blocks: Sequence[Int64],
        states: Int64 | None,
        tail: Tail | None,
    ) -> PointContents | None:
        """Return what `PrefixIndex.add_resume` is to keep; None if a block is missing or the node is none.

        Raises: ValueError if the arguments do not fit together.
        """
        if not self._nodes.live[node] or (tail is not None and tail.key == NO_MATCH):
            return None
        tokens = _NO_TOKENS if tail is None else np.array(tail.tokens, dtype=np.int32)
        state_blocks = self._owners.real(np.array([] if states is None else states, dtype=np.int64))
        unit, wanted = self._layout.unit, self._layout.num_state_blocks
        end = int(self._nodes.depth[node]) * unit + len(tokens)
        fits = 0 < position == end and (tail is None or 0 < len(tokens) < unit)
        if not fits or state_blocks.size not in (0, wanted) or (state_blocks == 0).any():
            raise ValueError(
                f"resume point: got position {position} with {np.count_nonzero(state_blocks)} state blocks, node and "
                f"tail end at {end}, a set of states has {wanted} blocks, a tail 1 to {unit - 1} tokens"
            )
        tail_blocks = () if tail is None else tuple(self._owners.real(blocks) for blocks in tail.blocks)
        kept = self._kept(node, position, window_blocks)
        if kept is None or (tail is not None and not self._is_whole(position, tail_blocks)):
            return None
        return PointContents(node, position, *kept, state_blocks, tokens, tail.key if tail else 0, tail_blocks)

    def _kept(self, node: int, position: int, window_blocks: Sequence[Int64]) -> tuple[Int32, Int32, Int64] | None:
        """Return nodes, columns, blocks of what is needed of whole units; None if one is neither given nor kept."""
        of, path = self._nodes, self._nodes.lineage(node)[1:]
        nodes, columns, flat = [path[:0]], [path[:0]], [np.empty(0, dtype=np.int64)]
        if len(window_blocks) != len(self._layout.windows):
            raise ValueError(
                f"window_blocks: got {len(window_blocks)}, expected one for each of {self._layout.windowed}"
            )
        for place, given in zip(self._layout.windows, window_blocks, strict=True):
            first, end = place.first_ordinal(position), len(path) * place.per_unit
            first_given = min(first // place.per_unit * place.per_unit, end)
            blocks = self._owners.real(given)
            if len(blocks) != end - first_given:
                raise ValueError(
                    f"window_blocks: got {len(blocks)} of group {place.group_id}, expected {end - first_given}: "
                    f"those of ordinals {first_given}..{end - 1}"
                )
            ordinals = np.arange(min(first, end), end)
            at = path[ordinals // place.per_unit]
            column = (ordinals % place.per_unit + place.first_column).astype(np.int32)
            blocks = blocks[len(blocks) - len(ordinals) :]
            if ((blocks == 0) & (of.keeps[at, column] == 0)).any():
                return None
            nodes.append(at)
            columns.append(column)
            flat.append(blocks)
        return np.concatenate(nodes), np.concatenate(columns), np.concatenate(flat)

    def _is_whole(self, position: int, tail_blocks: tuple[Int64, ...]) -> bool:
        """Return whether the blocks behind the last whole unit are all there, but for those out of a window."""
        if len(tail_blocks) != len(self._layout.places):
            raise ValueError(
                f"tail.blocks: got {len(tail_blocks)}, expected one for each of {self._layout.token_groups}"
            )
        for place, blocks in zip(self._layout.places, tail_blocks, strict=True):
            begin, end = position // self._layout.unit * place.per_unit, -(-position // place.block_size)
            if len(blocks) != end - begin:
                raise ValueError(f"tail.blocks: got {len(blocks)} of group {place.group_id}, expected {end - begin}")
            if (blocks[max(place.first_ordinal(position) - begin, 0) :] == 0).any():
                return False
        return True
