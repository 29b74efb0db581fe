"""Claims about blocks that move together so that whole slabs become free."""

from __future__ import annotations

import pytest

from hybridkv.admission import Verdict
from hybridkv.limits import BatchLimits
from hybridkv.manager import CacheManager, ManagerOptions
from hybridkv.specs import SlidingWindow
from tests.manager_content import Story
from tests.manager_steps import feed, row_ids
from tests.manager_world import World, recut
from tests.models import FULL, kv_cache, model, plan_slabs, state_and_attention, state_cache
from tests.snapshots import snapshot

SPEC = model(kv_cache(SlidingWindow(window=7)), state_cache(), kv_cache(FULL))


def scattered(*, caching: bool = False, num_slabs: int = 60, per_slab: tuple[int, ...] = (6, 6, 6)) -> World:
    """Twelve rows of 4 to 20 tokens, every second one of which has ended: slabs are full of holes."""
    plan = plan_slabs(SPEC, 200, BatchLimits(12, 60, 20), {0: 4, 2: 4})
    world = World(recut(plan, num_slabs, per_slab), ManagerOptions(prefix_caching=caching), 1)
    for number in range(12):
        tokens = [number, *range(3 + 4 * (number % 5))]
        row = world.manager.admit(tokens).admitted_row
        world.running[row] = Story(None, (), tokens, len(tokens))
        while (done := world.running[row].computed) < len(tokens):
            count = min(20, int(world.manager.chunk_limits([row])[0]), len(tokens) - done)
            assert world.manager.reserve([row], [count]).num_ok
            world.copy()
            world.content.write(world.manager, row, world.running[row], done + count)
            world.manager.commit([row], [count], tokens[done : done + count])
    for row in range(0, 12, 2):
        world.manager.finish(row)
        del world.running[row]
    world.copy()
    world.manager.commit([], [])
    world.look()
    return world


def free_slabs(world: World) -> int:
    """Slabs that any group can have at once."""
    pool = world.manager.pool
    return pool.num_free_slabs + int(pool.num_empty_slabs.sum())


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("max_moves", [1, 3, 5, 100])
def test_no_more_blocks_move_than_allowed_and_whole_slabs_become_free(max_moves: int, caching: bool) -> None:
    """Tables, pool and prefixes agree afterwards, each row has its tokens, and each emptied slab is free at once."""
    world = scattered(caching=caching)
    manager, before = world.manager, free_slabs(world)
    held = manager.pool.num_held.copy()
    moved = manager.compact(max_moves)
    assert moved <= max_moves
    copies = manager.take_copies()
    assert (len(copies), len(copies.moves)) == (moved, moved)
    world.content.run(copies)
    world.look()
    assert manager.pool.num_held.tolist() == held.tolist()
    assert free_slabs(world) - before >= (0 if moved == 0 else 1)
    if max_moves == 100:
        least = int(sum(-(-manager.pool.num_held // manager.pool.blocks_per_slab)))
        assert free_slabs(world) == world.plan.num_usable_slabs - least
        assert manager.compact(100) == 0
    for _ in range(5):
        world.step()
        world.look()


def test_moved_blocks_are_free_only_after_steps_in_flight() -> None:
    """With a step in flight sources drain and their slabs are lent to nobody until the next one, too, has settled."""
    world = scattered()
    manager, before = world.manager, free_slabs(world)
    manager.reserve([1], [1])
    step = manager.launch([1], [1])
    world.running[1].tokens.append(5)
    world.content.write(manager, 1, world.running[1], world.running[1].computed + 1)
    moved = manager.compact(100)
    assert moved > 0
    assert manager.pool.num_draining.sum() == moved
    world.copy()
    manager.settle(step)
    assert manager.pool.num_draining.sum() == moved
    manager.commit([1], [1], [5])
    assert manager.pool.num_draining.sum() == 0
    assert free_slabs(world) > before
    world.look()


def test_blocks_with_a_copy_to_come_stay_where_they_are() -> None:
    """Sources and targets of copies, and checkpoints, do not move; nothing moves twice before it is copied."""
    world = scattered(per_slab=(3, 3, 6))
    manager = world.manager
    manager.checkpoint([11])
    for row in (1, 3, 5):
        (child,) = manager.fork(row, 1)
        world.running[child] = world.running[row].copy()
    manager.finish(7)
    del world.running[7]
    waiting = set(manager._store.held_beside_rows().tolist())
    assert manager.compact(100) > 0
    moved = {block for part in manager._store.copies._parts["moves"] for blocks in part for block in blocks.tolist()}
    assert moved
    assert moved.isdisjoint(waiting)
    world.look()
    assert manager.compact(100) == 0
    world.copy()
    world.look()


def test_a_group_gets_the_slab_that_others_leave_half_empty() -> None:
    """A prompt that fits only if other groups' blocks move together is let in, and the moves are asked for."""
    plan = plan_slabs(state_and_attention(), 100, BatchLimits(10, 64, 32), {1: 4})
    manager = CacheManager(recut(plan, 4, (4, 4)), options=ManagerOptions(prefix_caching=False))
    rows = [manager.admit(4).admitted_row for _ in range(8)]
    for row in rows:
        feed(manager, row, [0] * 4)
    for row in (0, 1, 2, 4, 5, 6):
        manager.finish(row)
    assert manager.pool.num_slabs_of.tolist() == [2, 2]
    before = {row: row_ids(manager, row) for row in (3, 7)}
    answer = manager.admit(32)
    assert answer.verdict == Verdict.OK, answer.reason
    moves = manager.take_copies().moves
    assert len(moves) > 0
    for row in (3, 7):
        for group, ids in enumerate(row_ids(manager, row)):
            moved = {source: target for g, source, target in moves.tolist() if g == group}
            assert ids == [moved.get(block, block) for block in before[row][group]]
    assert manager.reserve([answer.admitted_row], [32]).num_ok == 1
    manager.check()


def test_what_compaction_cannot_bring_moves_nothing() -> None:
    """A demand that does not fit even then leaves every block where it was."""
    plan = plan_slabs(state_and_attention(), 100, BatchLimits(10, 64, 32), {1: 4})
    manager = CacheManager(recut(plan, 5, (4, 4)), options=ManagerOptions(prefix_caching=False))
    for row in [manager.admit(8).admitted_row for _ in range(6)]:
        feed(manager, row, [0] * 8)
    before = snapshot(manager)
    assert manager.admit(32).verdict == Verdict.LATER
    assert snapshot(manager) == before
