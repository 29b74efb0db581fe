"""The accounting identity of a block pool: every count against the blocks themselves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import InvariantError
from hybridkv.pool_state import PoolState
from hybridkv.slabs import CACHED, FREE, NO_GROUP, PINNED


def check_pool(state: PoolState) -> None:
    """Check that every block is in one state and that all counts of groups and slabs say so.

    Raises: InvariantError if a count does not add up.
    """
    slabs = state.counted_slabs()
    used, pinned = np.zeros_like(slabs.used), np.zeros_like(slabs.pinned)
    for group in range(state.num_groups):
        states = _check_blocks(state, group)
        used += (states != FREE).sum(axis=1, dtype=np.int32)
        pinned += (states == PINNED).sum(axis=1, dtype=np.int32)
        mine = slabs.owner == group
        empty, fixed = mine & (used == 0), mine & (pinned > 0)
        _check_equal(f"group {group}: slabs", slabs.num_of[group], mine.sum())
        _check_equal(f"group {group}: empty slabs", slabs.num_empty[group], empty.sum())
        _check_equal(f"group {group}: pinned slabs", slabs.num_pinned[group], fixed.sum())
    _check_same("used blocks by slab", slabs.used, used)
    _check_same("pinned blocks by slab", slabs.pinned, pinned)
    without_owner = np.flatnonzero(slabs.owner == NO_GROUP)
    _check_same("slabs without owner, the reserved one aside", np.sort(slabs.free_stack()), without_owner[1:])
    if len(slabs.owner) and slabs.owner[0] != NO_GROUP:
        raise InvariantError(f"slab 0: owner is {slabs.owner[0]}, expected none")
    state.drain_queue.check()


def _check_blocks(state: PoolState, group: int) -> NDArray[np.int8]:
    """Check one group's blocks; return their states, `[num_slabs, blocks_per_slab]`."""
    begin, end = int(state.edges[group]), int(state.edges[group + 1])
    holders, cached, draining = state.holders[begin:end], state.cached[begin:end], state.draining[begin:end]
    states = state.states(np.arange(begin, end)).reshape(-1, int(state.blocks_per_slab[group]))
    mine = state.slab_owner == group
    if states[~mine].any() or (holders < 0).any() or (cached < 0).any():
        raise InvariantError(f"group {group} uses a block outside its slabs, a null block, or counts below 0")
    if (draining & (holders > 0)).any():
        raise InvariantError(f"group {group}: a block is held and drains at once")
    _check_equal(f"group {group}: held blocks", state.num_held[group], (holders > 0).sum())
    _check_equal(f"group {group}: draining blocks", state.num_draining[group], draining.sum())
    _check_equal(f"group {group}: cached blocks", state.num_cached[group], (states == CACHED).sum())
    free = begin + np.flatnonzero((states == FREE) & mine[:, None])
    _check_same(f"group {group}: free blocks", np.sort(state.free_stacks.content(group)), free)
    if state.peak_held[group] < state.num_held[group]:
        raise InvariantError(f"group {group}: peak_held {state.peak_held[group]} is below {state.num_held[group]}")
    return states


def _check_equal(what: str, counted: np.int64, found: np.int64) -> None:
    if counted != found:
        raise InvariantError(f"{what}: {counted} are counted, {found} are there")


def _check_same(what: str, counted: NDArray[np.integer], found: NDArray[np.integer]) -> None:
    if not np.array_equal(counted, found):
        raise InvariantError(f"{what}: what is counted is not what is there")
