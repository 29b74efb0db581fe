"""Slabs, blocks, reference counts.

A slab is lent whole to one group, which cuts it into its own blocks. A block is free or held by one or more rows; a
slab whose last block is freed goes back to all groups. Blocks are lent from the fullest slab first, so that slabs
empty together.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import InvariantError, OutOfBlocks
from hybridkv.plan import CachePlan

_NO_GROUP = -1


class BlockPool:
    """The blocks of every group over one set of slabs.

    Attributes:
        ref_counts: per group `[num_blocks]` int32; 0 is free. Blocks of the reserved slab stay 0 and are never lent.
        slab_owner: `[num_slabs]` int16, the group a slab is lent to or -1.
        num_held: `[num_groups]` int64, blocks with a reference.
        peak_held: `[num_groups]` int64, the largest `num_held` so far.
    """

    def __init__(self, plan: CachePlan) -> None:
        self.blocks_per_slab = np.array([group.blocks_per_slab for group in plan.groups], dtype=np.int64)
        self.ref_counts = [np.zeros(group.num_blocks, dtype=np.int32) for group in plan.groups]
        self.slab_owner = np.full(plan.num_slabs, _NO_GROUP, dtype=np.int16)
        self._held_in_slab = np.zeros(plan.num_slabs, dtype=np.int32)
        # A stack: the slab on top is lent next, slab 0 is not in it.
        self._free_slabs = np.arange(plan.num_slabs - 1, 0, -1, dtype=np.int64)
        self.num_free_slabs = plan.num_usable_slabs
        self.num_held = np.zeros(len(plan.groups), dtype=np.int64)
        self.peak_held = np.zeros(len(plan.groups), dtype=np.int64)
        self._num_slabs_of = np.zeros(len(plan.groups), dtype=np.int64)

    @property
    def num_groups(self) -> int:
        """Number of groups that share the slabs."""
        return len(self.ref_counts)

    def num_free_in_own_slabs(self) -> NDArray[np.int64]:
        """Return `[num_groups]`: free blocks in the slabs each group has already."""
        free: NDArray[np.int64] = self._num_slabs_of * self.blocks_per_slab - self.num_held
        return free

    def slabs_needed(self, num_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many free slabs each request for blocks takes, over all groups.

        Shapes: num_blocks [num_groups, ...]; returns [...]
        """
        total: NDArray[np.int64] = self.slabs_needed_by_group(num_blocks).sum(axis=0)
        return total

    def slabs_needed_by_group(self, num_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many free slabs each group takes for requests for blocks.

        Shapes: num_blocks and result [num_groups, ...]
        """
        shape = (-1,) + (1,) * (num_blocks.ndim - 1)
        missing = np.maximum(num_blocks - self.num_free_in_own_slabs().reshape(shape), 0)
        slabs: NDArray[np.int64] = -(-missing // self.blocks_per_slab.reshape(shape))
        return slabs

    def shortfall(self, num_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the blocks that cannot be lent now when groups are served in order.

        Shapes: num_blocks and result [num_groups, ...]
        """
        return slab_shortfall(num_blocks, self.num_free_in_own_slabs(), self.blocks_per_slab, self.num_free_slabs)

    def allocate(self, num_blocks: Sequence[int] | NDArray[np.int64]) -> list[NDArray[np.int32]]:
        """Lend blocks of every group at once, each with one reference.

        Shapes: num_blocks [num_groups]; returns per group the ids, `[num_blocks[g]]` int32
        Raises: OutOfBlocks if any group's share cannot be met; nothing is lent then.
        """
        wanted = np.asarray(num_blocks, dtype=np.int64)
        if wanted.shape != (self.num_groups,) or (wanted < 0).any():
            raise ValueError(f"num_blocks: got {wanted.tolist()}, expected {self.num_groups} counts of at least 0")
        if self.slabs_needed(wanted) > self.num_free_slabs:
            short = self.shortfall(wanted)
            raise OutOfBlocks(_by_group(wanted), _by_group(short))
        lent: list[NDArray[np.int32]] = []
        before = self.num_free_slabs, self.num_held.copy(), self.peak_held.copy(), self._num_slabs_of.copy()
        try:
            for group, count in enumerate(wanted.tolist()):
                lent.append(self._allocate_in(group, count))
        except BaseException:
            self._take_back(lent)
            # The slabs above the stack's old top are still in place: nothing was freed since.
            self.slab_owner[self._free_slabs[self.num_free_slabs : before[0]]] = _NO_GROUP
            self.num_free_slabs, self.num_held[:], self.peak_held[:], self._num_slabs_of[:] = before
            raise
        return lent

    def add_reference(self, group: int, block_ids: NDArray[np.int32]) -> None:
        """Count one more holder of each held block.

        Raises: InvariantError if a block is free; nothing is counted then.
        """
        self._check_held(group, block_ids)
        np.add.at(self.ref_counts[group], block_ids, 1)

    def free(self, group: int, block_ids: NDArray[np.int32]) -> int:
        """Give up one reference of each block; return how many blocks became free.

        Raises: InvariantError for a block given up more often than it is held; nothing is freed then.
        """
        if block_ids.size == 0:
            return 0
        counts = self.ref_counts[group]
        self._check_held(group, block_ids)
        np.subtract.at(counts, block_ids, 1)
        if (counts[block_ids] < 0).any():
            worst = int(block_ids[counts[block_ids].argmin()])
            np.add.at(counts, block_ids, 1)
            raise InvariantError(f"double free: group {group} block {worst} is given up more often than it is held")
        freed = np.unique(block_ids[counts[block_ids] == 0])
        if freed.size == 0:
            return 0
        self.num_held[group] -= freed.size
        slabs = freed.astype(np.int64) // self.blocks_per_slab[group]
        touched = np.unique(slabs)
        self._count_held(group, touched)
        empty = touched[self._held_in_slab[touched] == 0]
        self.slab_owner[empty] = _NO_GROUP
        self._free_slabs[self.num_free_slabs : self.num_free_slabs + empty.size] = empty
        self.num_free_slabs += empty.size
        self._num_slabs_of[group] -= empty.size
        return int(freed.size)

    def check(self) -> None:
        """Check the accounting identity of every group and slab.

        Raises: InvariantError if a count does not add up.
        """
        for group, counts in enumerate(self.ref_counts):
            per_slab = (counts.reshape(-1, self.blocks_per_slab[group]) > 0).sum(axis=1)
            mine = self.slab_owner == group
            if per_slab[~mine].any() or (counts < 0).any() or counts[: self.blocks_per_slab[group]].any():
                raise InvariantError(f"group {group} holds a block outside its slabs, a null block or a negative count")
            if per_slab.sum() != self.num_held[group] or (per_slab[mine] != self._held_in_slab[mine]).any():
                raise InvariantError(
                    f"group {group}: {per_slab.sum()} blocks are held, {self.num_held[group]} are counted"
                )
            if (per_slab[mine] == 0).any() or mine.sum() != self._num_slabs_of[group]:
                raise InvariantError(f"group {group} keeps an empty slab or miscounts its slabs")
        free = np.sort(self._free_slabs[: self.num_free_slabs])
        if not np.array_equal(free, np.flatnonzero(self.slab_owner == _NO_GROUP)[1:]):
            raise InvariantError("the free slabs are not the slabs without owner")

    def _take_back(self, lent: Sequence[NDArray[np.int32]]) -> None:
        for group, ids in enumerate(lent):
            self.ref_counts[group][ids] = 0
            self._count_held(group, np.unique(ids // self.blocks_per_slab[group]))

    def _allocate_in(self, group: int, count: int) -> NDArray[np.int32]:
        if count == 0:
            return np.empty(0, dtype=np.int32)
        per_slab = int(self.blocks_per_slab[group])
        own = self._fullest_slabs_with_room(group, per_slab, count)
        room = (own[:, None] * per_slab + np.arange(per_slab)).reshape(-1)
        room = room[self.ref_counts[group][room] == 0][:count]
        num_new = -(-(count - len(room)) // per_slab)
        self.num_free_slabs -= num_new
        new = self._free_slabs[self.num_free_slabs : self.num_free_slabs + num_new][::-1].copy()
        self.slab_owner[new] = group
        self._num_slabs_of[group] += num_new
        fresh = (new[:, None] * per_slab + np.arange(per_slab)).reshape(-1)[: count - len(room)]
        ids = np.concatenate([room, fresh]).astype(np.int32)
        self.ref_counts[group][ids] = 1
        self._count_held(group, own)
        self._count_held(group, new)
        self.num_held[group] += count
        self.peak_held[group] = max(self.peak_held[group], self.num_held[group])
        return ids

    def _count_held(self, group: int, slabs: NDArray[np.int64]) -> None:
        per_slab = self.ref_counts[group].reshape(-1, self.blocks_per_slab[group])
        self._held_in_slab[slabs] = np.count_nonzero(per_slab[slabs], axis=1)

    def _fullest_slabs_with_room(self, group: int, per_slab: int, count: int) -> NDArray[np.int64]:
        if self._num_slabs_of[group] * per_slab == self.num_held[group]:
            return np.empty(0, dtype=np.int64)
        room = np.flatnonzero((self.slab_owner == group) & (self._held_in_slab < per_slab))
        order = room[np.argsort(-self._held_in_slab[room], kind="stable")]
        enough = np.searchsorted(np.cumsum(per_slab - self._held_in_slab[order]), count) + 1
        fullest: NDArray[np.int64] = order[:enough]
        return fullest

    def _check_held(self, group: int, block_ids: NDArray[np.int32]) -> None:
        counts = self.ref_counts[group]
        if block_ids.size == 0:
            return
        if block_ids.min() < 0 or block_ids.max() >= len(counts) or (counts[block_ids] <= 0).any():
            inside = (block_ids >= 0) & (block_ids < len(counts))
            held = inside & (counts[np.where(inside, block_ids, 0)] > 0)
            raise InvariantError(f"group {group} block {block_ids[~held][0]} is not held by anyone")


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


def _by_group(counts: NDArray[np.int64]) -> Mapping[int, int]:
    return {group: int(count) for group, count in enumerate(counts) if count}
