"""Slabs: whose they are, how many of their blocks are used or pinned, which have no owner."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridkv.plan import CachePlan

NO_GROUP = -1
FREE, CACHED, PINNED = 0, 1, 2
_MAX_TOUCHED = 64


class Slabs:
    """The slabs of a plan, with counts that are brought up to date when they are read.

    Verbs only note which blocks they touched (`touch`). Counting compares what those blocks are now (free, cached or
    pinned) with what was counted last, so many verbs share one count, and noting a block twice does no harm.

    Attributes:
        owner: `[num_slabs]` int16, the group a slab is lent to or -1.
        num_of: `[num_groups]` int64, slabs of each group.
        num_free: slabs without owner.
        used, pinned: `[num_slabs]` int32, blocks that were not free, or pinned, when they were counted.
        num_empty, num_pinned: `[num_groups]` int64, slabs of each group without a used block, with a pinned block.
        slab_of: `[num_flat]` int32, the slab each flat block lies in.
    """

    def __init__(self, plan: CachePlan) -> None:
        per_slab = [group.blocks_per_slab for group in plan.groups]
        numbers = np.arange(plan.num_slabs, dtype=np.int32)
        self.slab_of = np.concatenate([numbers.repeat(count) for count in per_slab])
        self.owner = np.full(plan.num_slabs, NO_GROUP, dtype=np.int16)
        self.num_of = np.zeros(len(per_slab), dtype=np.int64)
        self.num_free = plan.num_usable_slabs
        # A stack: the slab on top is lent next; slab 0 is not in it.
        self._free = np.arange(plan.num_slabs - 1, 0, -1, dtype=np.int64)
        self._states = np.zeros(len(self.slab_of), dtype=np.int8)
        self._touched: list[NDArray[np.int64]] = []
        self.used = np.zeros(plan.num_slabs, dtype=np.int32)
        self.pinned = np.zeros(plan.num_slabs, dtype=np.int32)
        self.num_empty = np.zeros(len(per_slab), dtype=np.int64)
        self.num_pinned = np.zeros(len(per_slab), dtype=np.int64)

    @property
    def must_count(self) -> bool:
        """Whether so many touches are noted that they should be counted before more come."""
        return len(self._touched) >= _MAX_TOUCHED

    def touch(self, flat: NDArray[np.int64]) -> None:
        """Note that blocks may be free, cached or pinned where they were not before; the array is kept."""
        if len(flat):
            self._touched.append(flat)

    def touched(self) -> NDArray[np.int64]:
        """Return the distinct blocks noted since the last count, rising."""
        return distinct(np.concatenate(self._touched)) if self._touched else np.empty(0, dtype=np.int64)

    def count(self, flat: NDArray[np.int64], states: NDArray[np.int8]) -> None:
        """Count what the touched blocks are now.

        Shapes: flat [n] as `touched` gives them, states [n] their FREE, CACHED or PINNED
        """
        changed = np.flatnonzero(states != self._states[flat])
        if not len(changed):
            self._touched.clear()
            return
        blocks, now = flat[changed], states[changed]
        before = self._states[blocks]
        # Blocks rise group by group and a slab has blocks of one group in use, so each slab's blocks are one run.
        slabs = self.slab_of[blocks]
        starts = np.flatnonzero(is_new(slabs))
        slabs = slabs[starts]
        used_before, pinned_before = self.used[slabs], self.pinned[slabs]
        used = used_before + np.add.reduceat(np.minimum(now, 1) - np.minimum(before, 1), starts, dtype=np.int32)
        pinned = pinned_before + np.add.reduceat((now >> 1) - (before >> 1), starts, dtype=np.int32)
        owners = self.owner[slabs]
        num_empty = self._count_owners(owners, used, used_before)
        num_pinned = self._count_owners(owners, pinned_before, pinned)
        self.used[slabs] = used
        self.pinned[slabs] = pinned
        self.num_empty += num_empty
        self.num_pinned += num_pinned
        self._states[blocks] = now
        self._touched.clear()

    def _count_owners(
        self, owners: NDArray[np.int16], now: NDArray[np.int32], before: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """Return how many more slabs of each group have none of what is counted now than had none before."""
        change = (now == 0).view(np.int8) - (before == 0).view(np.int8)
        return np.bincount(owners, change, len(self.num_of)).astype(np.int64)

    def free_stack(self) -> NDArray[np.int64]:
        """Return a view of the slabs without owner, the one lent next last."""
        return self._free[: self.num_free]

    def set_free_stack(self, slabs: NDArray[np.int64]) -> None:
        """Make these the slabs without owner."""
        self._free[: len(slabs)] = slabs
        self.num_free = len(slabs)

    def give(self, group: int, slabs: NDArray[np.int64]) -> None:
        """Make a group the owner of slabs of which no block is used."""
        self.owner[slabs] = group
        self.num_of[group] += len(slabs)
        self.num_empty[group] += len(slabs)

    def give_back(self, slabs: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Take empty slabs from their groups, `counts[g]` of them from group g."""
        self.owner[slabs] = NO_GROUP
        self.num_of -= counts
        self.num_empty -= counts


def is_new(values: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return which values differ from the one before."""
    is_new = np.ones(len(values), dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_new[1:])
    return is_new


def distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the distinct values, rising; numpy's own way hashes, which takes ten times as long."""
    values = np.sort(values)
    return values[is_new(values)]


def slabs_needed(
    num_blocks: NDArray[np.int64], num_free: NDArray[np.int64], blocks_per_slab: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return how many slabs each group needs beyond its free blocks.

    Shapes: num_blocks and result [num_groups, ...]; num_free, blocks_per_slab [num_groups]
    """
    shape = (-1,) + (1,) * (num_blocks.ndim - 1)
    missing = np.maximum(num_blocks - num_free.reshape(shape), 0)
    slabs: NDArray[np.int64] = -(-missing // blocks_per_slab.reshape(shape))
    return slabs


def slab_shortfall(
    num_blocks: NDArray[np.int64], num_free: NDArray[np.int64], blocks_per_slab: NDArray[np.int64], num_slabs: int
) -> NDArray[np.int64]:
    """Return the blocks missing when groups take their free blocks, then slabs, in order.

    Shapes: num_blocks and result [num_groups, ...]; num_free, blocks_per_slab [num_groups]
    """
    short = np.zeros_like(num_blocks)
    slabs_left = np.full(num_blocks.shape[1:], num_slabs, dtype=np.int64)
    for group, per_slab in enumerate(blocks_per_slab):
        missing = np.maximum(num_blocks[group] - num_free[group], 0)
        taken = np.minimum(-(-missing // per_slab), slabs_left)
        short[group] = np.maximum(missing - taken * per_slab, 0)
        slabs_left = slabs_left - taken
    return short
