"""A hash table from prefix hashes to nodes, for many look-ups at once."""

import numpy as np
from numpy.typing import NDArray

_EMPTY = 0
_DELETED = -1
_MIN_CAPACITY = 1024
_STEP_SHIFT = 40
_FEW = 32  # up to so many a loop is faster than array operations


class NodeTable:
    """Open addressing with double hashing: at most one node a hash, at most half the places used."""

    def __init__(self) -> None:
        self._clear(_MIN_CAPACITY)
        self._place_of = np.zeros(_MIN_CAPACITY, dtype=np.int64)  # by node

    def __len__(self) -> int:
        return self._num_nodes

    def get(self, value: int) -> int:
        """Return the node of one hash, 0 if there is none."""
        at, step = value & self._last, _step(value)
        while node := self._nodes.item(at):
            if node > 0 and self._hashes.item(at) == value:
                return node
            at = (at + step) & self._last
        return 0

    def look_up(self, hashes: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Return the nodes of hashes, 0 where there is none.

        Shapes: hashes [n]; returns [n] int32
        """
        if len(hashes) <= _FEW:
            return np.array([self.get(value) for value in hashes.tolist()], dtype=np.int32)
        at, steps = self._begin(hashes)
        nodes = self._nodes.take(at)
        found = (nodes > 0) & (self._hashes.take(at) == hashes)
        result = np.where(found, nodes, 0)
        left = np.flatnonzero(~found & (nodes != _EMPTY))
        at = at[left]
        while left.size:
            at = (at + steps[left]) & self._last
            nodes = self._nodes.take(at)
            found = (nodes > 0) & (self._hashes.take(at) == hashes[left])
            result[left[found]] = nodes[found]
            go_on = ~found & (nodes != _EMPTY)
            left, at = left[go_on], at[go_on]
        return result

    def insert(self, hashes: NDArray[np.uint64], nodes: NDArray[np.int32]) -> None:
        """Add nodes under hashes that are distinct and not in the table.

        Shapes: hashes, nodes [n]
        """
        if not len(nodes):
            return
        while nodes.max() >= len(self._place_of):
            self._place_of = np.concatenate([self._place_of, np.zeros_like(self._place_of)])
        if 2 * (self._num_used + len(nodes)) > len(self._nodes):
            self._rebuild(self._num_nodes + len(nodes))
        self._place(hashes, nodes)

    def remove(self, nodes: NDArray[np.int32]) -> None:
        """Remove distinct nodes, all of them in the table.

        Shapes: nodes [n]
        """
        self._nodes[self._place_of[nodes]] = _DELETED
        self._num_nodes -= len(nodes)

    def _place(self, hashes: NDArray[np.uint64], nodes: NDArray[np.int32]) -> None:
        if len(hashes) <= _FEW:
            for value, node in zip(hashes.tolist(), nodes.tolist(), strict=True):
                self._place_one(value, node)
            return
        at, steps = self._begin(hashes)
        self._num_nodes += len(nodes)
        while nodes.size:
            was = self._nodes.take(at)
            free = was <= 0
            # Of several that want one place the last one written has it; the others go on.
            self._nodes[at[free]] = nodes[free]
            placed = free & (self._nodes.take(at) == nodes)
            taken, left = at[placed], ~placed
            self._hashes[taken] = hashes[placed]
            self._place_of[nodes[placed]] = taken
            self._num_used += int(np.count_nonzero(was[placed] == _EMPTY))
            hashes, nodes, steps = hashes[left], nodes[left], steps[left]
            at = (at[left] + steps) & self._last

    def _place_one(self, value: int, node: int) -> None:
        at, step = value & self._last, _step(value)
        while (was := self._nodes.item(at)) > 0:
            at = (at + step) & self._last
        self._nodes[at], self._hashes[at], self._place_of[node] = node, value, at
        self._num_nodes += 1
        self._num_used += was == _EMPTY

    def _begin(self, hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where each hash's search begins and how far it goes on each time."""
        at = (hashes & np.uint64(self._last)).view(np.int64)
        return at, ((hashes >> np.uint64(_STEP_SHIFT)) | np.uint64(1)).view(np.int64)

    def _rebuild(self, num_nodes: int) -> None:
        live = self._nodes > 0
        hashes, nodes = self._hashes[live], self._nodes[live]
        self._clear(max(_MIN_CAPACITY, 1 << (4 * num_nodes - 1).bit_length()))
        self._place(hashes, nodes)

    def _clear(self, capacity: int) -> None:
        self._nodes = np.zeros(capacity, dtype=np.int32)
        self._hashes = np.zeros(capacity, dtype=np.uint64)
        self._last = capacity - 1
        self._num_nodes = 0
        self._num_used = 0


def _step(value: int) -> int:
    return value >> _STEP_SHIFT | 1
