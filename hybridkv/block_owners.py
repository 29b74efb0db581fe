"""Who in the prefix index refers to a block."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import InvariantError

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]


class CachingPool(Protocol):
    """What the index needs of the block pool."""

    @property
    def offsets(self) -> Int64:
        """`[num_groups]` flat id of each group's null block."""

    @property
    def holders(self) -> Int32:
        """`[num_flat]` references of rows."""

    @property
    def cached(self) -> Int32:
        """`[num_flat]` references of the index."""

    @property
    def draining(self) -> NDArray[np.bool_]:
        """`[num_flat]` whether a step in flight may still touch a block that nobody holds."""

    def cache(self, flat: Int64) -> None:
        """Count a reference of the index."""

    def uncache(self, flat: Int64) -> None:
        """Count a reference of the index less."""


class BlockOwners:
    """The index's references to blocks: the pool's counts, and from each block back to node and resume points.

    Attributes:
        node_of: `[num_flat]` int32, the node that refers to a block, 0 for none.
        num_freed: `[num_groups]` int64, blocks that nobody had any more when the index gave them up.
    """

    def __init__(self, pool: CachingPool) -> None:
        self.pool = pool
        self.node_of = np.zeros(len(pool.cached), dtype=np.int32)
        self.num_freed = np.zeros(len(pool.offsets), dtype=np.int64)
        self._points_of: dict[int, set[int]] = {}

    def real(self, flat: Int64) -> Int64:
        """Return blocks with 0 in place of any group's null block."""
        blocks = np.asarray(flat, dtype=np.int64)
        return np.where(np.isin(blocks, self.pool.offsets), 0, blocks)

    def add_to_nodes(self, flat: Int64, nodes: Int32) -> None:
        """Refer to blocks from nodes, each from one.

        Shapes: flat, nodes [n]
        Raises: InvariantError for a block that a node refers to already; nothing changes then.
        """
        if self.node_of[flat].any():
            raise InvariantError(f"block {flat[self.node_of[flat] > 0][0]} belongs to another prefix already")
        self.pool.cache(flat)
        self.node_of[flat] = nodes

    def take_from_nodes(self, flat: Int64) -> None:
        """Give up nodes' references."""
        self.node_of[flat] = 0
        self._give_up(flat)

    def add_to_point(self, flat: Int64, slot: int) -> None:
        """Refer to distinct blocks from a resume point."""
        self.pool.cache(flat)
        for block in flat.tolist():
            self._points_of.setdefault(block, set()).add(slot)

    def take_from_point(self, flat: Int64, slot: int) -> None:
        """Give up a resume point's references."""
        for block in flat.tolist():
            slots = self._points_of[block]
            slots.remove(slot)
            if not slots:
                del self._points_of[block]
        self._give_up(flat)

    def points_of(self, flat: Iterable[int]) -> set[int]:
        """Return the slots of the resume points that refer to any of the blocks."""
        return set().union(*(self._points_of.get(block, ()) for block in flat))

    def move(self, source: int, target: int) -> None:
        """Carry the owners of a block over to the one that took its place."""
        self.node_of[target], self.node_of[source] = self.node_of[source], 0
        if source in self._points_of:
            self._points_of[target] = self._points_of.pop(source)

    def unheld(self, flat: Int64) -> NDArray[np.bool_]:
        """Return which blocks would be free if the index gave them up."""
        free: NDArray[np.bool_] = (self.pool.holders[flat] == 0) & ~self.pool.draining[flat]
        return free

    def check(self, in_nodes: Int64, in_points: Int64) -> None:
        """Check the pool's counts and the maps against the blocks `in_nodes` and `in_points` really refer to.

        Raises: InvariantError if they disagree.
        """
        size = len(self.node_of)
        counts = np.bincount(in_nodes, minlength=size) + np.bincount(in_points, minlength=size)
        wrong = np.flatnonzero(counts != self.pool.cached)
        if wrong.size:
            at = int(wrong[0])
            raise InvariantError(
                f"block {at}: the index refers to it {counts[at]} times, {self.pool.cached[at]} counted"
            )
        if not np.array_equal(np.flatnonzero(self.node_of), np.unique(in_nodes)) or len(np.unique(in_nodes)) != len(
            in_nodes
        ):
            raise InvariantError("the map from blocks to nodes is not that of the nodes")
        if sorted(block for block, slots in self._points_of.items() for _ in slots) != sorted(in_points.tolist()):
            raise InvariantError("the map from blocks to resume points is not that of the points")

    def _give_up(self, flat: Int64) -> None:
        self.pool.uncache(flat)
        gone = flat[(self.pool.cached[flat] == 0) & self.unheld(flat)]
        if gone.size:
            groups = self.pool.offsets.searchsorted(gone, side="right") - 1
            self.num_freed += np.bincount(groups, minlength=len(self.num_freed))
