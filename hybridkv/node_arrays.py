"""The nodes of the prefix index as arrays."""

import numpy as np
from numpy.typing import NDArray

_MIN_CAPACITY = 1024
_FIRST_WINDOW = 64  # nodes tried at first where a path's numbers follow each other
_GROWTH = 8
NO_POINT = -1


class NodeArrays:
    """One entry a node: a unit of tokens below its parent, or the root of the sequences of one salt.

    Node 0 is nothing. A node that lost its place while rows were pinned to it stays taken, not live, until they go.

    Shapes:
        live          [capacity] bool
        parent        [capacity] int32, 0 for a root
        depth         [capacity] int32, units from the root; 0 for a root
        hash          [capacity] uint64
        tokens        [capacity, unit] int32
        keys          [capacity] int32, what stands at the unit's placeholder tokens
        blocks        [capacity, columns] int64 flat blocks, 0 for none; full groups' columns first
        keeps         [capacity, columns] int32, resume points that need a windowed group's block
        num_children  [capacity] int32
        pins          [capacity] int32, rows whose last whole unit it is
        locks         [capacity] int32, rows with it on their path: the pins of it and everything below
        last_used     [capacity] int64, never before that of a node below
        point         [capacity] int32, the slot of the resume point right behind the unit
        num_tails     [capacity] int32, resume points further behind it, before the next unit ends
    """

    def __init__(self, unit: int, num_columns: int) -> None:
        self.live = np.zeros(_MIN_CAPACITY, dtype=np.bool_)
        self.parent = np.zeros(_MIN_CAPACITY, dtype=np.int32)
        self.depth = np.zeros(_MIN_CAPACITY, dtype=np.int32)
        self.hash = np.zeros(_MIN_CAPACITY, dtype=np.uint64)
        self.tokens = np.zeros((_MIN_CAPACITY, unit), dtype=np.int32)
        self.keys = np.zeros(_MIN_CAPACITY, dtype=np.int32)
        self.blocks = np.zeros((_MIN_CAPACITY, num_columns), dtype=np.int64)
        self.keeps = np.zeros((_MIN_CAPACITY, num_columns), dtype=np.int32)
        self.num_children = np.zeros(_MIN_CAPACITY, dtype=np.int32)
        self.pins = np.zeros(_MIN_CAPACITY, dtype=np.int32)
        self.locks = np.zeros(_MIN_CAPACITY, dtype=np.int32)
        self.last_used = np.zeros(_MIN_CAPACITY, dtype=np.int64)
        self.point = np.full(_MIN_CAPACITY, NO_POINT, dtype=np.int32)
        self.num_tails = np.zeros(_MIN_CAPACITY, dtype=np.int32)
        # A stack whose top is at the end: numbers go out rising, so that a sequence's nodes mostly follow each other.
        self._free = np.arange(_MIN_CAPACITY, 0, -1, dtype=np.int32) - 1
        self._num_free = _MIN_CAPACITY - 1

    @property
    def capacity(self) -> int:
        """Nodes there is room for, node 0 counted."""
        return len(self.live)

    @property
    def num_taken(self) -> int:
        """Nodes in use, roots and those that lost their place counted."""
        return self.capacity - 1 - self._num_free

    def take(self, count: int) -> NDArray[np.int32]:
        """Return unused nodes, their entries as good as zero, rising where possible.

        Shapes: returns [count]
        """
        while count > self._num_free:
            self._double()
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count][::-1].copy()

    def give_back(self, nodes: NDArray[np.int32]) -> None:
        """Take back nodes that were cleared."""
        self._free[self._num_free : self._num_free + len(nodes)] = np.sort(nodes)[::-1]
        self._num_free += len(nodes)

    def clear(self, nodes: NDArray[np.int32]) -> None:
        """Take nodes out of the tree: nothing matches them any more."""
        self.live[nodes] = False
        self.parent[nodes] = 0
        self.depth[nodes] = 0
        self.hash[nodes] = 0
        self.blocks[nodes] = 0
        self.locks[nodes] = 0
        self.num_children[nodes] = 0

    def lineage(self, node: int) -> NDArray[np.int32]:
        """Return the nodes from the root to a live node, both counted.

        Shapes: returns [depth + 1]
        """
        at, window = self.depth.item(node), _FIRST_WINDOW
        line = np.empty(at + 1, dtype=np.int32)
        parent = self.parent
        line[at] = node
        while at:
            if parent.item(node) == node - 1:
                # A run of numbers, as a prefill's nodes have.
                num_up = min(at, window, node - 1)
                breaks = parent[node - num_up + 1 : node + 1] != np.arange(node - num_up, node)
                run = int(breaks[::-1].argmax()) if breaks.any() else num_up
                line[at - run : at] = np.arange(node - run, node)
                node, at, window = node - run, at - run, _GROWTH * window if run == num_up else _FIRST_WINDOW
            else:
                node, at = parent.item(node), at - 1
                line[at] = node
        return line

    def in_subtrees(self, nodes: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return nodes and everything below them, rising: a pass over all nodes for each doubling of the depth."""
        marked = np.zeros(self.capacity, dtype=np.bool_)
        marked[nodes] = True
        if self.num_children[nodes].any():
            jump = self.parent.copy()
            while jump.any():
                marked |= marked[jump]
                jump = jump[jump]
        return np.flatnonzero(marked).astype(np.int32)

    def _double(self) -> None:
        have = self.capacity
        for name, array in vars(self).items():
            if name not in ("_free", "_num_free"):
                more = np.full_like(array, NO_POINT) if name == "point" else np.zeros_like(array)
                setattr(self, name, np.concatenate([array, more]))
        new = np.arange(2 * have - 1, have - 1, -1, dtype=np.int32)
        self._free = np.concatenate([new, self._free[: self._num_free], np.zeros(have - self._num_free, np.int32)])
        self._num_free += have
