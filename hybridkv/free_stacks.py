"""The free blocks of every group, as stacks that the next blocks are taken from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LOW_BITS = 40  # of a sort key: the block; above it: how many blocks of its slab are used
_MIN_SORT_BLOCKS = 256


class FreeStacks:
    """One stack of flat block ids a group, all in one array.

    Blocks that are given back go on top, so the order by fullness decays; `due` says when sorting a stack again costs
    no more, spread over the blocks pushed since, than pushing them did.

    Attributes:
        num: `[num_groups]` int64, blocks in each stack.
    """

    def __init__(self, edges: NDArray[np.int64], blocks_per_slab: NDArray[np.int64]) -> None:
        self.num = np.zeros(len(edges) - 1, dtype=np.int64)
        # The stacks leave out slab 0, so there is room for one place below each, which `tops` counts down to.
        self._starts = edges[:-1] + 1
        self._flat = np.zeros(int(edges[-1]), dtype=np.int64)
        # Where a slab is one block, every order is as good as any other.
        self._least_due = np.where(blocks_per_slab > 1, _MIN_SORT_BLOCKS, np.iinfo(np.int64).max)
        self._num_pushed = np.zeros(len(self.num), dtype=np.int64)
        self._num_unchecked = 0

    def content(self, group: int) -> NDArray[np.int64]:
        """Return a view of a group's free blocks, the top last."""
        start = int(self._starts[group])
        return self._flat[start : start + int(self.num[group])]

    def tops(self, counts: list[int]) -> list[NDArray[np.int64]]:
        """Return views of the topmost blocks, the top first, for each group that is asked for some."""
        ends = (self._starts + self.num).tolist()
        return [self._flat[end - 1 : end - count - 1 : -1] for end, count in zip(ends, counts, strict=True) if count]

    def places(self, bounds: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where `push` puts rising blocks, of which `counts[g]` from `bounds[g]` on are group g's.

        Shapes: bounds [num_groups + 1], counts [num_groups]; returns [bounds[-1]] int64
        """
        # The lowest block of a group goes on top.
        tops: NDArray[np.int64] = (self._starts + self.num + bounds[1:]).repeat(counts)
        return tops - np.arange(1, len(tops) + 1)

    def push(self, flat: NDArray[np.int64], places: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Put blocks on top of their groups' stacks, at the `places` worked out before."""
        self._flat[places] = flat
        self.num += counts
        self._num_pushed += counts
        self._num_unchecked += len(flat)

    def pop(self, counts: NDArray[np.int64]) -> None:
        """Drop blocks from the top of every stack."""
        self.num -= counts
        if self._num_unchecked >= _MIN_SORT_BLOCKS:
            self._num_unchecked = 0

    def replace(self, group: int, content: NDArray[np.int64], *, is_sorted: bool) -> None:
        """Make `content` a group's stack."""
        start = int(self._starts[group])
        self._flat[start : start + len(content)] = content
        self.num[group] = len(content)
        if is_sorted:
            self._num_pushed[group] = 0

    def due(self) -> list[int]:
        """Return the groups into whose stack half as many blocks were pushed since it was sorted as it holds."""
        if self._num_unchecked < _MIN_SORT_BLOCKS:
            return []
        due: list[int] = np.flatnonzero(self._num_pushed >= np.maximum(self.num // 2, self._least_due)).tolist()
        return due

    def ordered(self, group: int, num_used: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return a group's free blocks with those of the fullest slabs on top, slab by slab, lower ids above higher.

        Shapes: num_used [num_blocks of the group, in the stack's order], the used blocks of each one's slab
        """
        highest = (1 << _LOW_BITS) - 1
        keys = (num_used.astype(np.int64) << _LOW_BITS) + (highest - self.content(group))
        keys.sort()
        ordered: NDArray[np.int64] = highest - (keys & highest)
        return ordered
