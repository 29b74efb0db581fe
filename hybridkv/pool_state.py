"""What a block pool knows of its blocks, with the verdicts that follow from it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridkv.drain_queue import DrainQueue
from hybridkv.free_stacks import FreeStacks
from hybridkv.plan import CachePlan
from hybridkv.slabs import FREE, NO_GROUP, PINNED, Slabs, slab_shortfall, slabs_needed

_LEAST = np.iinfo(np.int64).min


class PoolState:
    """The blocks of every group over one set of slabs, as they are.

    `flat = offsets[group] + block_id` names a block of any group. A block whose slab its group owns is *held* (holders
    > 0), *draining* (nobody holds it, a step in flight may touch it), *cached* (only the prefix index refers to it) or
    *free*. Blocks of slab 0 are in none of these states and are never lent.

    A slab is *pinned* while a block of it is held or drains, *used* while one is not free. An empty slab stays with its
    group until another group needs one; verdicts count it like a slab without owner.

    Attributes:
        num_groups: groups that share the slabs.
        offsets: `[num_groups]` int64, flat id of each group's null block.
        blocks_per_slab: `[num_groups]` int64.
        holders: `[num_flat]` int32, references of rows, pending copies and swaps.
        cached: `[num_flat]` int32, references of the prefix index.
        num_held, num_draining: `[num_groups]` int64, blocks in these states.
        peak_held: `[num_groups]` int64, the largest `num_held` so far.
    """

    def __init__(self, plan: CachePlan) -> None:
        self.num_groups = len(plan.groups)
        self.blocks_per_slab = np.array([group.blocks_per_slab for group in plan.groups], dtype=np.int64)
        self.edges = np.cumsum([0, *(group.num_blocks for group in plan.groups)], dtype=np.int64)
        self.offsets = self.edges[:-1]
        num_flat = int(self.edges[-1])
        self.holders = np.zeros(num_flat, dtype=np.int32)
        self.cached = np.zeros(num_flat, dtype=np.int32)
        self.num_held = np.zeros(self.num_groups, dtype=np.int64)
        self.num_draining = np.zeros(self.num_groups, dtype=np.int64)
        self.peak_held = np.zeros(self.num_groups, dtype=np.int64)
        self._num_usable_slabs = plan.num_usable_slabs
        self._stride_bytes = np.array([group.block_stride_bytes for group in plan.groups], dtype=np.int64)
        self.slabs = Slabs(plan)
        self.free_stacks = FreeStacks(self.edges, self.blocks_per_slab)
        self.drain_queue = DrainQueue(num_flat)

    @property
    def num_free(self) -> NDArray[np.int64]:
        """`[num_groups]` int64: free blocks in the slabs each group owns."""
        return self.free_stacks.num

    @property
    def num_cached(self) -> NDArray[np.int64]:
        """`[num_groups]` int64: cached blocks."""
        owned = self.slabs.num_of * self.blocks_per_slab
        cached: NDArray[np.int64] = owned - self.num_held - self.num_draining - self.free_stacks.num
        return cached

    @property
    def draining(self) -> NDArray[np.bool_]:
        """`[num_flat]` bool: blocks that nobody holds and a step in flight may touch."""
        return self.drain_queue.draining

    @property
    def num_launched(self) -> int:
        """The number of the last step launched, 0 before the first."""
        return self.drain_queue.launched

    @property
    def num_settled(self) -> int:
        """The number of the last step known to have finished."""
        return self.drain_queue.settled

    @property
    def waits(self) -> bool:
        """Whether a block waits for a step, one in flight or the next."""
        return self.drain_queue.any_waits

    @property
    def num_slabs_of(self) -> NDArray[np.int64]:
        """`[num_groups]` int64: slabs each group owns."""
        return self.slabs.num_of

    @property
    def num_free_slabs(self) -> int:
        """Slabs without owner."""
        return self.slabs.num_free

    @property
    def num_empty_slabs(self) -> NDArray[np.int64]:
        """`[num_groups]` int64: slabs of each group in which every block is free."""
        return self.counted_slabs().num_empty

    @property
    def slab_owner(self) -> NDArray[np.int16]:
        """`[num_slabs]` int16: the group a slab is lent to, -1 for none."""
        return self.slabs.owner

    @property
    def slab_used(self) -> NDArray[np.int32]:
        """`[num_slabs]` int32: blocks that are not free."""
        return self.counted_slabs().used

    @property
    def slab_pinned(self) -> NDArray[np.int32]:
        """`[num_slabs]` int32: blocks that are held or drain."""
        return self.counted_slabs().pinned

    def counted_slabs(self) -> Slabs:
        """Return the slabs with their counts up to date."""
        touched = self.slabs.touched()
        if len(touched):
            self.slabs.count(touched, self.states(touched))
        return self.slabs

    def states(self, flat: NDArray[np.int64]) -> NDArray[np.int8]:
        """Return FREE, CACHED or PINNED for each block."""
        states = (self.cached[flat] > 0).astype(np.int8)
        states[(self.holders[flat] > 0) | self.draining[flat]] = PINNED
        return states

    def fits_now(self, need: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether blocks could be taken as things are.

        Shapes: need [num_groups, ...]; returns [...]
        """
        if self._own_blocks_suffice(need):
            return np.ones(need.shape[1:], dtype=np.bool_)
        idle, num_slabs = self.room_now()
        fits: NDArray[np.bool_] = slabs_needed(need, idle, self.blocks_per_slab).sum(axis=0) <= num_slabs
        return fits

    def fits(self, need: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether blocks could be taken if every cached block were evicted.

        Shapes: need [num_groups, ...]; returns [...]
        """
        if self._own_blocks_suffice(need):
            return np.ones(need.shape[1:], dtype=np.bool_)
        idle, num_slabs = self.room_after_evicting()
        fits: NDArray[np.bool_] = slabs_needed(need, idle, self.blocks_per_slab).sum(axis=0) <= num_slabs
        return fits

    def shortfall(self, need: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the blocks missing even if every cached block were evicted, groups served in order.

        Shapes: need and result [num_groups, ...]
        """
        idle, num_slabs = self.room_after_evicting()
        return slab_shortfall(need, idle, self.blocks_per_slab, num_slabs)

    def idle_foreign_bytes(self, group: int) -> int:
        """Return the bytes of free and cached blocks in slabs that other groups cannot give up."""
        idle, _ = self.room_after_evicting()
        idle_bytes = idle * self._stride_bytes
        return int(idle_bytes.sum() - idle_bytes[group])

    def room_now(self) -> tuple[NDArray[np.int64], int]:
        """Return each group's free blocks in slabs that are used, and how many slabs any group can have."""
        slabs = self.counted_slabs()
        partly_used = self.free_stacks.num - slabs.num_empty * self.blocks_per_slab
        return partly_used, slabs.num_free + int(slabs.num_empty.sum())

    def _own_blocks_suffice(self, need: NDArray[np.int64]) -> bool:
        """Whether every group has the blocks in its own slabs: the usual case, in which slabs need not be counted."""
        num_free = self.free_stacks.num.reshape(-1, *[1] * (need.ndim - 1))
        return not np.count_nonzero(need > num_free)

    def room_after_evicting(self) -> tuple[NDArray[np.int64], int]:
        """Return each group's blocks that are not held in slabs that are pinned, and how many slabs are not."""
        num_pinned = self.counted_slabs().num_pinned
        idle = num_pinned * self.blocks_per_slab - self.num_held - self.num_draining
        return idle, self._num_usable_slabs - int(num_pinned.sum())

    def slabs_of_least_value(self, group: int, last_used: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return slabs of other groups that hold cached and free blocks only, those longest unused first.

        A slab was last used when the youngest of its cached blocks was.

        Shapes: last_used [num_flat]; returns slab ids [at most count]
        """
        slabs = self.counted_slabs()
        found, ages = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for other in range(self.num_groups):
            if other != group:
                mine = np.flatnonzero((slabs.owner == other) & (slabs.pinned == 0) & (slabs.used > 0))
                blocks = self.blocks_in(other, mine)
                uses = np.where(self.cached[blocks] > 0, last_used[blocks], _LEAST)
                found.append(mine)
                ages.append(uses.max(axis=1))
        oldest_first = np.concatenate(ages).argsort(kind="stable")
        least: NDArray[np.int64] = np.concatenate(found)[oldest_first[:count]]
        return least

    def blocks_of_slab(self, slab: int) -> NDArray[np.int64]:
        """Return the flat ids of a slab's blocks that are not free."""
        owner = int(self.slabs.owner[slab])
        if owner == NO_GROUP:
            return np.empty(0, dtype=np.int64)
        blocks = self.blocks_in(owner, np.array([slab]))[0]
        used: NDArray[np.int64] = blocks[self.states(blocks) > FREE]
        return used

    def blocks_in(self, group: int, slabs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the flat ids of all blocks of slabs cut for one group, `[num_slabs, blocks_per_slab]`."""
        per_slab = int(self.blocks_per_slab[group])
        blocks: NDArray[np.int64] = int(self.offsets[group]) + slabs[:, None] * per_slab + np.arange(per_slab)
        return blocks
