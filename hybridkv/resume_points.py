"""The places of cached prefixes from which a sequence can go on in groups with windows or states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.block_owners import BlockOwners
from hybridkv.eviction import PointStats
from hybridkv.index_layout import IndexLayout
from hybridkv.node_arrays import NO_POINT, NodeArrays

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
_MIN_CAPACITY = 64


@dataclass(frozen=True, eq=False)
class PointContents:
    """What the groups keep at a position, and where it is.

    Shapes:
        kept_nodes, kept_columns  [n], the windowed groups' blocks that it keeps, in the nodes on its path
        kept_blocks  [n] int64 flat, for those that no other point keeps already
        states       [blocks of all states] int64 flat, empty if it has none
        tail_tokens  [position % unit] int32, tokens behind the last whole unit
        tail_blocks  [ordinals behind the last whole unit] int64 a token group, 0 for a block that is out of its window

    Attributes:
        node: the last whole unit, or the root.
        tail_key: key of the features at the tail's tokens.
    """

    node: int
    position: int
    kept_nodes: Int32
    kept_columns: Int32
    kept_blocks: Int64
    states: Int64
    tail_tokens: Int32
    tail_key: int
    tail_blocks: tuple[Int64, ...]


@dataclass(frozen=True, eq=False)
class ResumePoint:
    """A position at which a cached prefix can be continued.

    Attributes:
        slot: the point's number, another's when it is gone.
        identity: the prefix's hash: what a policy remembers it by.
    """

    slot: int
    contents: PointContents
    identity: int

    @property
    def node(self) -> int:
        """The last whole unit, or the root."""
        return self.contents.node

    @property
    def position(self) -> int:
        """Tokens before it."""
        return self.contents.position

    @property
    def states(self) -> Int64:
        """Flat blocks of all states, empty if it has none."""
        return self.contents.states

    @property
    def own_blocks(self) -> Int64:
        """The blocks only this point refers to: states and tail, without those out of a window."""
        blocks = np.concatenate([self.contents.states, *self.contents.tail_blocks])
        own: Int64 = blocks[blocks > 0]
        return own


class ResumePoints:
    """All resume points: by slot, by node, and the tails by their tokens.

    Attributes:
        has_states: `[capacity]` bool by slot.
        num_dropped: points that were given up so far; one that an equal point replaced is not counted.
        watch: told of a point right before it is there (True) or goes (False).
    """

    def __init__(self, layout: IndexLayout, nodes: NodeArrays, owners: BlockOwners) -> None:
        self._layout, self._nodes, self._owners = layout, nodes, owners
        self._points: list[ResumePoint | None] = [None] * _MIN_CAPACITY
        self._free = list(range(_MIN_CAPACITY - 1, -1, -1))
        self.has_states = np.zeros(_MIN_CAPACITY, dtype=np.bool_)
        self.stats = PointStats.empty(_MIN_CAPACITY)
        self.num_dropped = 0
        self.watch: Callable[[ResumePoint, bool], None] | None = None
        # By node, then by length, so that a look-up hashes each length once.
        self._tails: dict[int, dict[int, dict[tuple[bytes, int], ResumePoint]]] = {}

    def __len__(self) -> int:
        return len(self._points) - len(self._free)

    def at(self, slot: int) -> ResumePoint:
        """Return the point with a slot that is in use."""
        point = self._points[slot]
        assert point is not None
        return point

    def all(self) -> list[ResumePoint]:
        """Return all points, by slot."""
        return [point for point in self._points if point is not None]

    def all_tails(self) -> list[ResumePoint]:
        """Return all points with a tail, in no order."""
        return [point for node in self._tails for point in self.tails_of(node)]

    def is_live(self, point: ResumePoint) -> bool:
        """Return whether a point is still there."""
        return self._points[point.slot] is point

    def add(self, contents: PointContents) -> ResumePoint:
        """Keep a point, with the window blocks no other one keeps.

        Raises: InvariantError if a block is neither held nor cached; nothing changes then.
        """
        of = self._nodes
        if not self._free:
            self._double()
        identity = hash((of.hash.item(contents.node), contents.tail_tokens.tobytes(), contents.tail_key))
        point = ResumePoint(self._free[-1], contents, identity)
        nodes, columns, blocks = contents.kept_nodes, contents.kept_columns, contents.kept_blocks
        new = of.keeps[nodes, columns] == 0
        self._owners.add_to_nodes(blocks[new], nodes[new])
        try:
            self._owners.add_to_point(point.own_blocks, point.slot)
        except BaseException:
            self._owners.take_from_nodes(blocks[new])
            raise
        if self.watch is not None:
            self.watch(point, True)
        of.blocks[nodes[new], columns[new]] = blocks[new]
        of.keeps[nodes, columns] += 1
        self._free.pop()
        self._points[point.slot] = point
        self.has_states[point.slot] = contents.states.size > 0
        if len(contents.tail_tokens):
            of.num_tails[point.node] += 1
            by_length = self._tails.setdefault(point.node, {})
            by_length.setdefault(len(contents.tail_tokens), {})[_tail_id(contents)] = point
        else:
            of.point[point.node] = point.slot
        return point

    def drop(self, point: ResumePoint) -> None:
        """Forget a point, with the window blocks no other one keeps."""
        if self.watch is not None:
            self.watch(point, False)
        of, contents = self._nodes, point.contents
        nodes, columns, length = contents.kept_nodes, contents.kept_columns, len(contents.tail_tokens)
        of.keeps[nodes, columns] -= 1
        gone = of.keeps[nodes, columns] == 0
        nodes, columns = nodes[gone], columns[gone]
        self._owners.take_from_nodes(of.blocks[nodes, columns])
        of.blocks[nodes, columns] = 0
        self._owners.take_from_point(point.own_blocks, point.slot)
        self._points[point.slot] = None
        self._free.append(point.slot)
        # An equal point with states may have taken its place already.
        if not length:
            if of.point[point.node] == point.slot:
                of.point[point.node] = NO_POINT
                self.num_dropped += 1
            return
        of.num_tails[point.node] -= 1
        by_length = self._tails[point.node]
        if by_length[length][_tail_id(contents)] is point:
            del by_length[length][_tail_id(contents)]
            self.num_dropped += 1
        if not by_length[length]:
            del by_length[length]
        if not by_length:
            del self._tails[point.node]

    def tail(self, node: int, tokens: Int32, key: int) -> ResumePoint | None:
        """Return the point that ends with exactly these tokens behind a node."""
        return self._tails.get(node, {}).get(len(tokens), {}).get((tokens.tobytes(), key))

    def tail_lengths(self, node: int) -> Sequence[int]:
        """Return the lengths of the tails behind a node."""
        return list(self._tails.get(node, ()))

    def tails_of(self, node: int) -> list[ResumePoint]:
        """Return the points with a tail behind a node."""
        return [point for same_length in self._tails.get(node, {}).values() for point in same_length.values()]

    def slots(self) -> Int64:
        """Return the slots in use, rising."""
        return np.array([slot for slot, point in enumerate(self._points) if point is not None], dtype=np.int64)

    def blocks_in(self, point: ResumePoint, group: int) -> Int64:
        """Return a group's blocks that a point keeps, those it shares with other points counted."""
        place, contents = self._layout.place_of(group), point.contents
        if place is None:
            if not contents.states.size:
                return contents.states
            ends = np.cumsum([0, *self._layout.num_parts])
            at = self._layout.states.index(group)
            return contents.states[ends[at] : ends[at + 1]]
        columns = contents.kept_columns
        mine = (columns >= place.columns.start) & (columns < place.columns.stop)
        blocks: Int64 = self._nodes.blocks[contents.kept_nodes[mine], columns[mine]]
        if not contents.tail_blocks:
            return blocks
        tail = contents.tail_blocks[self._layout.places.index(place)]
        return np.concatenate([blocks, tail[tail > 0]])

    def _double(self) -> None:
        have = len(self._points)
        self._points += [None] * have
        self._free = list(range(2 * have - 1, have - 1, -1))
        self.has_states = np.concatenate([self.has_states, np.zeros(have, dtype=np.bool_)])
        self.stats = self.stats.doubled()


def _tail_id(contents: PointContents) -> tuple[bytes, int]:
    return contents.tail_tokens.tobytes(), contents.tail_key
