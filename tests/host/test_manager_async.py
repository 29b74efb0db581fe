"""Claims about steps in flight: what they may still touch goes to nobody, and only what has ended counts."""

from __future__ import annotations

import numpy as np
import pytest

from hybridkv.admission import Verdict
from hybridkv.limits import BatchLimits
from hybridkv.manager import CacheManager
from hybridkv.row_lengths import RowState
from hybridkv.specs import SlidingWindow
from tests.manager_steps import row_ids
from tests.models import FULL, kv_cache, model, plan_slabs, state_cache
from tests.snapshots import snapshot

WINDOWED = model(kv_cache(SlidingWindow(window=128)), kv_cache(FULL))


def manager_of(num_slabs: int = 200, spec=WINDOWED, block_size: int = 32, unsettled: int = 200) -> CacheManager:
    """Rows of up to 400 tokens with up to 200 in flight beside those of a step."""
    return CacheManager(plan_slabs(spec, num_slabs, BatchLimits(4, 400, 200, unsettled), block_size))


def launch(manager: CacheManager, row: int, count: int) -> int:
    """Reserve and launch tokens of one row."""
    assert manager.reserve([row], [count]).num_ok == 1
    return manager.launch([row], [count])


def test_blocks_are_freed_by_settled_tokens_not_by_optimistic_ones() -> None:
    """Law 6: W=128, block 32: 158 settled + 1 in flight frees 0 blocks, 159 settled frees 1."""
    manager = manager_of()
    row = manager.admit(list(range(300))).admitted_row
    manager.settle(launch(manager, row, 158))
    last = launch(manager, row, 1)
    assert (manager.num_settled_tokens[row], manager.num_computed_tokens[row]) == (158, 159)
    assert (manager.tables[0].first_block_per_row[row], manager.num_freed_out_of_window[0]) == (0, 0)
    manager.settle(last)
    assert (manager.num_settled_tokens[row], manager.num_freed_out_of_window[0]) == (159, 1)
    assert manager.tables[0].first_block_per_row[row] == 1
    assert len(row_ids(manager, row)[0]) == 4
    assert len(row_ids(manager, row)[1]) == 5
    manager.check()


def test_a_step_is_launched_before_the_one_before_it_settles() -> None:
    """Lengths move apart: committed, settled and computed tokens, and a later commit never passes what has settled."""
    manager = manager_of()
    row = manager.admit(list(range(300))).admitted_row
    first, second = launch(manager, row, 40), launch(manager, row, 7)
    assert _lengths(manager, row) == [0, 0, 47, 47]
    before = snapshot(manager)
    with pytest.raises(ValueError, match="would have 40 tokens committed, 0 are settled"):
        manager.commit([row], [40], range(40))
    assert snapshot(manager) == before
    manager.settle(first)
    assert _lengths(manager, row) == [0, 40, 47, 47]
    third = launch(manager, row, 1)
    before = snapshot(manager)
    with pytest.raises(ValueError, match="would have 41 tokens committed, 40 are settled"):
        manager.commit([row], [41], range(41))
    assert snapshot(manager) == before
    manager.commit([row], [40], range(40))
    assert _lengths(manager, row) == [40, 40, 48, 48]
    manager.settle(third)
    assert _lengths(manager, row) == [40, 48, 48, 48]
    for step in (first, second, third, third + 1):
        with pytest.raises(ValueError, match="no step is in flight"):
            manager.settle(step)
    manager.check()


def _lengths(manager: CacheManager, row: int) -> list[int]:
    lengths = manager.num_committed_tokens, manager.num_settled_tokens, manager.num_computed_tokens
    return [int(values[row]) for values in (*lengths, manager.capacity_tokens)]


@pytest.mark.parametrize("verb", ["finish", "preempt"])
def test_blocks_of_a_step_in_flight_are_lent_to_nobody(verb: str) -> None:
    """What a row gives up drains: neither held nor free, until the last step launched before that has settled."""
    manager = manager_of(8, model(kv_cache(FULL)), unsettled=8)
    assert manager.plan.groups[0].blocks_per_slab == 1
    row, other = manager.admit(256).admitted_row, manager.admit(32).admitted_row
    first = launch(manager, row, 128)
    second = launch(manager, other, 32)
    given_up = set(row_ids(manager, row)[0])
    getattr(manager, verb)(row)
    assert (manager.pool.num_held[0], manager.pool.num_draining[0], manager.pool.num_free_slabs) == (1, 4, 3)
    third = manager.admit(128)
    assert (third.verdict, third.shortfall) == (Verdict.LATER, (1,))
    manager.settle(first)
    assert manager.pool.num_draining[0] == 4
    manager.settle(second)
    assert manager.pool.num_draining[0] == 0
    third = manager.admit(224)
    assert manager.reserve([third.admitted_row], [200]).num_ok == 1
    assert given_up <= set(row_ids(manager, third.admitted_row)[0])
    manager.check()


def test_a_row_that_ends_in_flight_is_free_once_the_step_has_settled() -> None:
    """Its number goes to nobody before, so results of the step cannot be taken for another sequence's."""
    manager = manager_of()
    row = manager.admit(20).admitted_row
    step = launch(manager, row, 20)
    manager.finish(row)
    assert (manager.row_states[row], manager.num_free_rows) == (RowState.DRAINING, 3)
    assert manager.admit(20).row != row
    before = snapshot(manager)
    with pytest.raises(ValueError, match="which holds no sequence"):
        manager.finish(row)
    with pytest.raises(ValueError, match="source: got row 0, expected one with a sequence"):
        manager.move_row(row, 3)
    with pytest.raises(ValueError, match="target: got row 0, expected one without a sequence"):
        manager.move_row(1, row)
    assert snapshot(manager) == before
    manager.settle(step)
    assert manager.admit(20).row == row


def test_a_step_of_a_row_that_was_preempted_counts_for_nobody() -> None:
    """A row preempted and resumed in flight starts anew: the old step's end settles none of its new tokens."""
    manager = manager_of()
    row = manager.admit(list(range(100))).admitted_row
    old = launch(manager, row, 50)
    manager.preempt(row)
    assert manager.resume(row, list(range(100))).num_hit_tokens == 0
    new = launch(manager, row, 30)
    manager.settle(old)
    assert _lengths(manager, row) == [0, 0, 30, 30]
    manager.settle(new)
    assert _lengths(manager, row) == [0, 30, 30, 30]


def test_a_step_of_a_row_that_moved_counts_for_the_row_it_moved_to() -> None:
    """Moved in flight, a sequence settles and goes on in its new row; the old one's next sequence is not touched."""
    manager = manager_of()
    row = manager.admit(list(range(100))).admitted_row
    step = launch(manager, row, 50)
    manager.move_row(row, 2)
    manager.settle(step)
    assert _lengths(manager, 2) == [0, 50, 50, 50]
    manager.commit([2], [50], range(50))
    assert manager.admit(10).row == row
    assert _lengths(manager, row) == [0, 0, 0, 0]
    manager.check()


def test_tokens_rolled_back_in_flight_do_not_settle() -> None:
    """Of 4 drafts in flight 3 are taken back and 5 tokens launched anew: the first step's end settles 1, not 4."""
    manager = manager_of()
    row = manager.admit(list(range(20))).admitted_row
    manager.settle(launch(manager, row, 20))
    drafts = launch(manager, row, 4)
    assert manager.roll_back([row], [3]).tolist() == [21]
    again = launch(manager, row, 5)
    manager.settle(drafts)
    assert _lengths(manager, row)[1:3] == [21, 26]
    manager.settle(again)
    assert _lengths(manager, row)[1:3] == [26, 26]


def test_more_in_flight_than_the_tables_are_made_for_is_refused() -> None:
    """A ring is wide enough for `max_in_flight` unsettled tokens; one more is refused before anything changes."""
    manager = manager_of(unsettled=8)
    row = manager.admit(list(range(300))).admitted_row
    step = launch(manager, row, 200)
    launch(manager, row, 8)
    before = snapshot(manager)
    with pytest.raises(ValueError, match="row 0 would have 209 tokens in flight, expected at most 208"):
        manager.reserve([row], [1])
    assert snapshot(manager) == before
    manager.settle(step)
    manager.commit([row], [200], range(200))
    assert manager.reserve([row], [192]).num_ok == 1
    manager.check()


def test_steps_settle_in_any_number_at_once() -> None:
    """Settling a step settles all before it; their rows' tokens count once each."""
    manager = manager_of()
    rows = [manager.admit(list(range(100))).admitted_row for _ in range(3)]
    steps = [launch(manager, row, 10 + row) for row in (*rows, *rows)]
    manager.settle(steps[3])
    assert [_lengths(manager, row)[1] for row in rows] == [20, 11, 12]
    manager.settle(steps[5])
    assert [_lengths(manager, row)[1] for row in rows] == [20, 22, 24]


def test_a_state_is_kept_only_where_it_stands() -> None:
    """A row launched up to a point computes nothing more before the commit, so the state kept is that of the point."""
    manager = manager_of(spec=model(state_cache(), kv_cache(FULL)))
    row = manager.admit(list(range(100))).admitted_row
    step = launch(manager, row, 96)
    assert manager.chunk_limits([row]).tolist() == [0]
    with pytest.raises(ValueError, match="would pass the end of its chunk"):
        manager.reserve([row], [1])
    manager.settle(step)
    manager.commit([row], [96], range(96))
    assert [point.position for point in manager.index.points.all()] == [96]
    assert manager.chunk_limits([row])[0] > 200


def test_a_waiting_prompt_does_not_hold_its_hit() -> None:
    """In flight too, a prompt that is told LATER leaves what it would hit evictable: running rows get it."""
    manager = manager_of(8, model(kv_cache(FULL)), unsettled=8)
    tokens = list(range(128))
    row = manager.admit(tokens).admitted_row
    manager.settle(launch(manager, row, 128))
    manager.commit([row], [128], tokens)
    manager.finish(row)
    row = manager.admit(128).admitted_row
    launch(manager, row, 128)
    answer = manager.admit([*tokens, *range(500, 530)])
    assert (answer.verdict, answer.num_hit_tokens, answer.shortfall) == (Verdict.LATER, 128, (1,))
    assert (manager.pool.num_draining[0], manager.pool.num_cached[0]) == (0, 4)
    assert manager.reserve([row], [8]).num_ok == 1
    manager.check()


def test_what_is_evicted_in_flight_drains_too() -> None:
    """A prefix that a running step reads and that its row gives up is not lent before the step settles."""
    manager = manager_of(8, model(kv_cache(FULL)), unsettled=8)
    tokens = np.arange(160)
    row = manager.admit(tokens).admitted_row
    manager.settle(launch(manager, row, 160))
    manager.commit([row], [160], tokens)
    step = launch(manager, row, 1)
    manager.finish(row)
    assert manager.index.evict(0, 100) == 0
    assert manager.pool.num_draining[0] == 6
    assert manager.admit(160).verdict == Verdict.LATER
    manager.settle(step)
    assert manager.admit(160).verdict == Verdict.OK
    manager.check()
