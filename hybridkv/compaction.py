"""Whole slabs out of scattered ones: blocks move together within their groups, so that another group gets the slabs.

group 0, 4 blocks a slab     | a . . . | b c . d | e f . . |   ->   | . . . . | b c a d | e f . . |
"""

import numpy as np
from numpy.typing import NDArray

from hybridkv.sequence_store import SequenceStore
from hybridkv.slabs import slabs_needed

Int64 = NDArray[np.int64]
DEFAULT_MAX_MOVES = 256
_NONE = np.empty(0, dtype=np.int64)


def compact_for(store: SequenceStore, need: Int64, staying: Int64 = _NONE, max_moves: int = DEFAULT_MAX_MOVES) -> None:
    """Move blocks until `need` [num_groups] fits, if at most `max_moves` moves can bring that; nothing otherwise.

    Shapes: staying [n], flat blocks that must not move
    """
    _empty(store, _slabs_to_empty(store, need, staying, max_moves))


def can_fit(store: SequenceStore, need: Int64, staying: Int64) -> bool:
    """Return whether `need` [num_groups] fits, or will after `compact_for`."""
    if store.lender.fits(need):
        return True
    return bool(_slabs_to_empty(store, need, staying, DEFAULT_MAX_MOVES)) or bool(store.lender.fits(need))


def _slabs_to_empty(store: SequenceStore, need: Int64, staying: Int64, max_moves: int) -> list[int]:
    """Return slabs that let `need` fit once they are empty; none where it fits as it is, or not even then."""
    pool = store.pool
    if pool.num_launched == pool.num_settled and pool.num_draining.any() and store.copies.is_empty:
        # All copies were handed out and run before whatever comes next, so nothing waits for their blocks any more.
        pool.settle(pool.launch())
    idle, num_slabs = pool.room_after_evicting()
    wanted = int(slabs_needed(need, idle, pool.blocks_per_slab).sum()) - num_slabs
    if wanted <= 0:
        return []
    slabs = _emptiest_slabs(store, np.maximum(idle - need, 0), wanted, max_moves, staying)
    return slabs if len(slabs) == wanted else []


def compact(store: SequenceStore, max_moves: int = DEFAULT_MAX_MOVES) -> int:
    """Empty as many slabs as `max_moves` moves can; return how many blocks move."""
    idle, _ = store.pool.room_after_evicting()
    return _empty(store, _emptiest_slabs(store, idle, store.plan.num_slabs, max_moves))


def _emptiest_slabs(
    store: SequenceStore, room: Int64, wanted: int, max_moves: int, staying: Int64 = _NONE
) -> list[int]:
    """Return at most `wanted` slabs that `max_moves` moves can empty, fewest bytes first.

    Shapes: room [num_groups], blocks that moves may fill in slabs with held blocks
    """
    pool = store.pool
    slabs, room = pool.counted_slabs(), room.copy()
    fixed = np.zeros(len(slabs.owner), dtype=np.bool_)
    fixed[slabs.slab_of[np.concatenate([staying, store.held_beside_rows(), np.flatnonzero(pool.draining)])]] = True
    candidates = np.flatnonzero((slabs.pinned > 0) & ~fixed)
    owners = slabs.owner[candidates].astype(np.int64)
    strides = np.array([group.block_stride_bytes for group in store.plan.groups], dtype=np.int64)
    chosen: list[int] = []
    if store.copies.has_moves:  # blocks do not move twice before they were copied once
        return chosen
    for which in (slabs.pinned[candidates] * strides[owners]).argsort(kind="stable").tolist():
        slab, group, num_held = int(candidates[which]), int(owners[which]), int(slabs.pinned[candidates[which]])
        # The slab's own idle blocks are no room for what leaves it.
        left = room[group] - (pool.blocks_per_slab[group] - num_held) - num_held
        if len(chosen) == wanted or num_held > max_moves:
            break
        if left >= 0:
            room[group] = left
            max_moves -= num_held
            chosen.append(slab)
    return chosen


def _empty(store: SequenceStore, slabs: list[int]) -> int:
    """Move what is held in some slabs to others of their groups and evict the rest of them; return the moves."""
    pool, index = store.pool, store.index
    num_moves = 0
    for group in range(store.num_groups):
        mine = np.array([slab for slab in slabs if pool.slab_owner[slab] == group], dtype=np.int64)
        if not len(mine):
            continue
        blocks = pool.blocks_in(group, mine).reshape(-1)
        if index is not None:
            index.drop_blocks(blocks[(pool.holders[blocks] == 0) & (pool.cached[blocks] > 0)])
        sources = blocks[pool.holders[blocks] > 0]
        targets = _targets(store, group, mine, len(sources))
        _move(store, group, sources, targets)
        num_moves += len(sources)
    if num_moves and pool.num_launched == pool.num_settled:
        # Nothing is in flight and the moves run first of all that follows, so their sources are free at once.
        pool.settle(pool.launch())
    return num_moves


def _targets(store: SequenceStore, group: int, leaving: Int64, count: int) -> Int64:
    """Return `count` free blocks in the fullest slabs that stay, evicting what is only cached there."""
    pool = store.pool
    slabs = pool.counted_slabs()
    staying = np.flatnonzero((slabs.owner == group) & (slabs.pinned > 0))
    staying = staying[~np.isin(staying, leaving)]
    blocks = pool.blocks_in(group, staying[(-slabs.pinned[staying]).argsort(kind="stable")]).reshape(-1)
    room = blocks[(pool.holders[blocks] == 0) & ~pool.draining[blocks]]
    free_first: Int64 = room[(pool.cached[room] > 0).argsort(kind="stable")][:count]
    cached = free_first[pool.cached[free_first] > 0]
    if len(cached):
        assert store.index is not None
        store.index.drop_blocks(cached)
    return free_first


def _move(store: SequenceStore, group: int, sources: Int64, targets: Int64) -> None:
    """Move blocks with everything that refers to them: holders, cached prefixes, rows."""
    store.pool.move(sources, targets)
    if store.index is not None:
        store.index.replace_blocks(sources, targets)
    store.copies.add_moves(sources, targets)
    offset = int(store.pool.offsets[group])
    arrays, table = store.arrays, store.tables[group]
    becomes = np.arange(store.plan.groups[group].num_blocks, dtype=np.int32)
    becomes[sources - offset] = targets - offset
    moved = (becomes[table.entries] != table.entries).any(axis=1)
    pairs = arrays.pairs(group, np.flatnonzero(moved))
    firsts = table.first_block_per_row[moved].astype(np.int64)
    counts = table.num_blocks_per_row[moved] - firsts
    arrays.set_rows(pairs, firsts, counts, becomes[arrays.clear(pairs)])
