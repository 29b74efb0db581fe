"""Which slabs change hands so that a group can lend more blocks than it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import OutOfBlocks
from hybridkv.pool_state import PoolState
from hybridkv.slabs import NO_GROUP, slab_shortfall, slabs_needed
from hybridkv.units import cdiv

# A group that asks for slabs gets a few more, so that it asks less often, unless few are left.
_SPARE_BLOCKS = 64
_SPARE_SHARE = 16


@dataclass(frozen=True)
class Exchange:
    """What changes before blocks are lent.

    Attributes:
        stacks: new free stacks of some groups, sorted.
        returned: slabs that groups give up because they are empty, with `num_returned` `[num_groups]` of each group.
        gained: per group the slabs it gets.
        free_slabs: what is left without owner, the slab lent next last.
    """

    stacks: Mapping[int, NDArray[np.int64]]
    returned: NDArray[np.int64]
    num_returned: NDArray[np.int64]
    gained: Mapping[int, NDArray[np.int64]]
    free_slabs: NDArray[np.int64]

    def tops(self, state: PoolState, counts: list[int]) -> list[NDArray[np.int64]]:
        """Return the topmost blocks of each group's stack as it will be, the top first."""
        tops = []
        for group, count in enumerate(counts):
            if count:
                stack = self.stacks[group] if group in self.stacks else state.free_stacks.content(group)
                tops.append(stack[len(stack) - count :][::-1])
        return tops

    def carry_out(self, state: PoolState) -> None:
        """Change hands and stacks."""
        state.slabs.give_back(self.returned, self.num_returned)
        state.slabs.set_free_stack(self.free_slabs)
        for group, slabs in self.gained.items():
            state.slabs.give(group, slabs)
        for group, stack in self.stacks.items():
            state.free_stacks.replace(group, stack, is_sorted=True)


def plan_exchange(state: PoolState, wanted: NDArray[np.int64]) -> Exchange | None:
    """Return what has to change so that blocks can be lent from the top of the stacks; None if nothing has to.

    Own free blocks come first, then slabs without owner, then empty slabs of other groups: all of them at once, so that
    looking for them pays.

    Shapes: wanted [num_groups]
    Raises: OutOfBlocks if the blocks cannot be lent as things are.
    """
    due = state.free_stacks.due()
    is_short = wanted > state.num_free
    if not due and not np.count_nonzero(is_short):
        return None
    gaps = slabs_needed(wanted, state.num_free, state.blocks_per_slab)
    num_missing = int(gaps.sum()) - state.num_free_slabs
    no_slabs = np.empty(0, dtype=np.int64)
    if num_missing > 0:
        _check_fits(state, wanted)
        due = np.flatnonzero(~is_short).tolist()
    stacks = {group: _sorted_stack(state, group) for group in due if not is_short[group]}
    returned = _take_empty(state, wanted, stacks) if num_missing > 0 else no_slabs
    free_slabs = state.slabs.free_stack()
    if len(returned):
        free_slabs = np.concatenate([free_slabs, returned[::-1]])
    spare = max(0, -num_missing) // (_SPARE_SHARE * state.num_groups)
    gained = {}
    for group in np.flatnonzero(is_short).tolist():
        per_slab = int(state.blocks_per_slab[group])
        end = len(free_slabs)
        begin = end - int(gaps[group]) - min(spare, cdiv(_SPARE_BLOCKS, per_slab))
        gained[group] = free_slabs[begin:end][::-1].copy()
        free_slabs = free_slabs[:begin]
        new_blocks = state.blocks_in(group, gained[group]).reshape(-1)[::-1]
        stacks[group] = np.concatenate([new_blocks, state.free_stacks.content(group)])
    num_returned = np.bincount(state.slabs.owner[returned], minlength=state.num_groups)
    return Exchange(stacks, returned, num_returned, gained, free_slabs)


def _check_fits(state: PoolState, wanted: NDArray[np.int64]) -> None:
    idle, num_slabs = state.room_now()
    short = slab_shortfall(wanted, idle, state.blocks_per_slab, num_slabs)
    if short.any():
        raise OutOfBlocks(_by_group(wanted), _by_group(short))


def _sorted_stack(state: PoolState, group: int) -> NDArray[np.int64]:
    slabs = state.counted_slabs()
    return state.free_stacks.ordered(group, slabs.used[slabs.slab_of[state.free_stacks.content(group)]])


def _take_empty(state: PoolState, wanted: NDArray[np.int64], stacks: dict[int, NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the slabs that are empty and stay so when blocks are lent, and drop them from the sorted stacks."""
    slabs = state.counted_slabs()
    empty = (slabs.used == 0) & (slabs.owner != NO_GROUP)
    for group, count in enumerate(wanted.tolist()):
        stack = stacks[group] if group in stacks else state.free_stacks.content(group)
        empty[slabs.slab_of[stack[max(0, len(stack) - count) :]]] = False
    for group, stack in stacks.items():
        stacks[group] = stack[~empty[slabs.slab_of[stack]]]
    return np.flatnonzero(empty)


def _by_group(counts: NDArray[np.int64]) -> Mapping[int, int]:
    return {group: int(count) for group, count in enumerate(counts) if count}
