"""Claims about rows that give up their blocks and come back: computed again, or copied to the host and back."""

from __future__ import annotations

from itertools import chain

import pytest

from hybridkv.admission import Verdict
from hybridkv.errors import InvalidRequest
from hybridkv.limits import BatchLimits
from hybridkv.manager import CacheManager, ManagerOptions
from hybridkv.row_lengths import RowState
from hybridkv.specs import SlidingWindow
from tests.manager_steps import feed, row_ids
from tests.models import FULL, kv_cache, model, plan_slabs, state_cache
from tests.snapshots import snapshot

SPEC = model(kv_cache(SlidingWindow(window=10)), state_cache(), kv_cache(FULL))
TOKENS = list(range(30))


def manager_of(num_slabs: int = 100, host_slabs: int = 50, *, caching: bool = True) -> CacheManager:
    """Row 0 has computed 30 tokens in blocks of 4."""
    plan = plan_slabs(SPEC, num_slabs, BatchLimits(3, 60, 40), {0: 4, 2: 4})
    options = ManagerOptions(prefix_caching=caching, host_bytes=host_slabs * plan.slab_bytes)
    manager = CacheManager(plan, options=options)
    feed(manager, manager.admit(TOKENS).admitted_row, TOKENS)
    manager.take_copies()
    return manager


def test_a_row_to_be_computed_again_finds_what_is_still_cached() -> None:
    """Preempted without the host, a row's end is a resume point: resumed at once it has all of its tokens again."""
    manager = manager_of()
    assert manager.preempt(0) == RowState.PREEMPTED
    assert manager.pool.num_held.tolist() == [0, 0, 0]
    assert (manager.row_states[0], manager.num_computed_tokens[0], manager.num_free_rows) == (RowState.PREEMPTED, 0, 2)
    answer = manager.resume(0, [*TOKENS, 40])
    assert (answer.verdict, answer.row, answer.num_hit_tokens) == (Verdict.OK, 0, 30)
    feed(manager, 0, [*TOKENS, 40, 41])
    manager.check()


def test_a_row_whose_cache_was_evicted_is_computed_from_the_front() -> None:
    """With its cached blocks gone, a resumed row starts at 0 and is served like a new one."""
    manager = manager_of()
    manager.preempt(0)
    for group in range(3):
        manager.index.evict(group, 1000)
    answer = manager.resume(0, [*TOKENS, 40])
    assert (answer.verdict, answer.num_hit_tokens, manager.num_computed_tokens[0]) == (Verdict.OK, 0, 0)
    feed(manager, 0, [*TOKENS, 40])
    assert manager.num_computed_tokens[0] == 31


def test_a_failed_step_keeps_nothing_of_a_row() -> None:
    """With `keep=False` a preempted row's end is no resume point: its states may be anything."""
    manager = manager_of()
    manager.preempt(0, keep=False)
    assert 30 not in [point.position for point in manager.index.points.all()]
    assert manager.resume(0, [*TOKENS, 40]).num_hit_tokens < 30


@pytest.mark.parametrize("caching", [True, False])
def test_a_row_goes_to_the_host_and_comes_back_block_by_block(caching: bool) -> None:
    """Its live blocks with content are copied out, and in again to the same ordinals; then it goes on as before."""
    manager = manager_of(caching=caching)
    before = row_ids(manager, 0)
    firsts = [int(table.first_block_per_row[0]) for table in manager.tables]
    assert manager.preempt(0, to_host=True) == RowState.SWAPPED
    out = manager.take_copies().to_host
    assert [[s for g, s, _ in out.tolist() if g == group] for group in range(3)] == before
    manager.commit([], [])
    assert manager.pool.num_held.tolist() == [0, 0, 0]
    answer = manager.resume(0, [*TOKENS, 40])
    assert (answer.verdict, answer.row, answer.num_hit_tokens) == (Verdict.OK, 0, 30)
    assert manager.take_copies().from_host.tolist() == [
        [group, host, block] for (group, _, host), block in zip(out.tolist(), chain(*row_ids(manager, 0)), strict=True)
    ]
    assert [int(table.first_block_per_row[0]) for table in manager.tables] == firsts
    assert (manager.num_committed_tokens[0], manager.capacity_tokens[0]) == (30, 30)
    feed(manager, 0, [*TOKENS, 40, 41, 42])
    manager.check()
    manager.finish(0)
    manager._store.host_pool.check()
    assert manager._store.host_pool.num_held.tolist() == [0, 0, 0]


def test_a_row_on_its_way_to_the_host_waits_until_the_copies_are_taken() -> None:
    """Resumed before the engine has copied it out, it is told LATER and stays where it is."""
    manager = manager_of()
    manager.preempt(0, to_host=True)
    before = snapshot(manager)
    assert manager.resume(0, TOKENS).verdict == Verdict.LATER
    assert snapshot(manager) == before
    manager.take_copies()
    assert manager.resume(0, TOKENS).verdict == Verdict.OK
    manager.check()


def test_fewer_tokens_than_are_on_the_host_are_refused() -> None:
    """A row on the host does not come back for a sequence shorter than what it holds."""
    manager = manager_of()
    num_tokens = int(manager.num_computed_tokens[0])
    manager.preempt(0, to_host=True)
    manager.take_copies()
    before = snapshot(manager)
    with pytest.raises(InvalidRequest, match=f"of which {num_tokens} are on the host"):
        manager.resume(0, TOKENS[: num_tokens - 1])
    assert snapshot(manager) == before


def test_a_row_alone_comes_back_though_its_copies_filled_the_memory() -> None:
    """Law 11: blocks of copies that were handed out are free where nothing else is to come: nobody waits for ever."""
    plan = plan_slabs(SPEC, 100, BatchLimits(3, 60, 40), {0: 4, 2: 4})
    plan = plan_slabs(SPEC, plan.slabs_for(31), BatchLimits(3, 60, 40), {0: 4, 2: 4})
    options = ManagerOptions(prefix_caching=False, host_bytes=plan.memory_bytes)
    manager = CacheManager(plan, options=options)
    feed(manager, manager.admit(TOKENS).admitted_row, TOKENS)
    manager.preempt(0, to_host=True)
    manager.take_copies()
    assert manager.resume(0, [*TOKENS, 1]).verdict == Verdict.OK
    manager.check()


def test_a_host_without_room_has_the_row_computed_again() -> None:
    """Where the host's memory is too small for a row, it is PREEMPTED instead and nothing is copied."""
    manager = manager_of(host_slabs=3)
    assert manager.preempt(0, to_host=True) == RowState.PREEMPTED
    assert len(manager.take_copies()) == 0
    assert manager._store.host_pool.num_held.tolist() == [0, 0, 0]


def test_tokens_that_are_not_final_are_not_swapped() -> None:
    """A row with a step in flight is computed again: what it has computed may still turn out wrong."""
    manager = manager_of()
    manager.reserve([0], [3])
    step = manager.launch([0], [3])
    assert manager.preempt(0, to_host=True) == RowState.PREEMPTED
    manager.settle(step)
    assert manager.resume(0, [*TOKENS, 1]).num_hit_tokens < 30
    manager.check()


def test_a_sequence_that_ends_on_the_host_gives_its_blocks_back() -> None:
    """Finished while it is swapped out, before or after the copies were taken, a row leaves nothing anywhere."""
    for takes in (True, False):
        manager = manager_of(caching=False)
        manager.preempt(0, to_host=True)
        if takes:
            manager.take_copies()
        manager.finish(0)
        manager.take_copies()
        manager.commit([], [])
        assert manager.pool.num_held.tolist() == [0, 0, 0]
        assert manager._store.host_pool.num_held.tolist() == [0, 0, 0]
        manager.check()
        assert manager.num_free_rows == 3


def test_paused_rows_move_with_what_they_have() -> None:
    """A row on the host, or preempted, can move to another number and resumes there."""
    manager = manager_of()
    manager.preempt(0, to_host=True)
    manager.move_row(0, 2)
    manager.take_copies()
    assert manager.row_states[[0, 2]].tolist() == [RowState.FREE, RowState.SWAPPED]
    assert manager.resume(2, TOKENS).num_hit_tokens == 30
    manager.preempt(2)
    manager.move_row(2, 1)
    assert manager.resume(1, [*TOKENS, 1]).num_hit_tokens == 30
    manager.check()


def test_a_resumed_row_may_not_be_longer_than_fits() -> None:
    """Resuming checks lengths as admitting does; the row stays preempted."""
    manager = manager_of()
    manager.preempt(0)
    before = snapshot(manager)
    with pytest.raises(InvalidRequest, match="at most max_model_len=60"):
        manager.resume(0, list(range(61)))
    with pytest.raises(InvalidRequest, match="expected 1 <= prompt"):
        manager.resume(0, [])
    assert snapshot(manager) == before
