"""Claims about sequences that come, grow, pause and go, with nothing cached: exact blocks, verdicts, what is freed."""

from __future__ import annotations

import pytest

from hybridkv.admission import Verdict
from hybridkv.errors import InvalidRequest, NeverFits
from hybridkv.manager import CacheManager
from hybridkv.row_lengths import RowState
from tests.manager_steps import gemma_manager, row_ids, step
from tests.models import (
    chunked_and_full,
    encoder_decoder,
    gemma_like,
    limits,
    plan_slabs,
    state_and_attention,
)
from tests.snapshots import snapshot

STEP_NUMBERS = ("launched", "settled")
OK, LATER, NEVER = Verdict.OK, Verdict.LATER, Verdict.NEVER


def spans(manager: CacheManager, row: int) -> list[range]:
    """The ordinals a row holds in each group; that they are held by it alone, and that the count agrees."""
    for ids in row_ids(manager, row):
        assert 0 not in ids
        assert len(set(ids)) == len(ids)
    return [range(int(t.first_block_per_row[row]), int(t.num_blocks_per_row[row])) for t in manager.tables]


def test_the_life_of_two_sequences() -> None:
    """Admit, prefill in two chunks, lose a block to the window, make room, preempt, resume, finish: block by block."""
    manager = gemma_manager()
    first = manager.admit(10, 12).admitted_row
    assert (first, row_ids(manager, first)) == (0, [[], []])

    assert manager.reserve([first], [8]).verdicts.tolist() == [OK]
    assert spans(manager, first) == [range(2), range(2)]
    assert (manager.num_computed_tokens[first], manager.capacity_tokens[first]) == (0, 8)
    before = row_ids(manager, first)
    manager.commit([first], [8])
    assert row_ids(manager, first) == before

    step(manager, first, 2)
    assert spans(manager, first) == [range(1, 3), range(3)]
    assert [ids[:-1] for ids in row_ids(manager, first)] == [before[0][1:], before[1]]
    assert manager.num_freed_out_of_window.tolist() == [1, 0]
    assert manager.tables[0].entries[first, :4].tolist() == [0, *row_ids(manager, first)[0], 0]

    second = manager.admit(4).admitted_row
    step(manager, second, 4)
    assert (second, spans(manager, second)) == (1, [range(1), range(1)])

    assert manager.preempt(second) == RowState.PREEMPTED
    assert row_ids(manager, second) == [[], []]
    assert (manager.row_states[second], manager.num_free_rows) == (RowState.PREEMPTED, 1)
    assert (manager.num_computed_tokens[second], manager.capacity_tokens[second]) == (0, 0)

    assert manager.resume(second, 4).admitted_row == second
    assert (manager.row_states[second], row_ids(manager, second)) == (RowState.RUNNING, [[], []])
    step(manager, second, 4)
    assert spans(manager, second) == [range(1), range(1)]

    manager.check()
    manager.finish(first)
    manager.finish(second)
    manager.check()
    assert manager.pool.num_held.tolist() == [0, 0]
    assert manager.pool.num_free_slabs + manager.pool.num_empty_slabs.sum() == 8
    assert not any(table.arrays.words.any() for table in manager.tables)
    assert (manager.num_free_rows, manager.num_preemptions) == (3, 1)
    assert manager.peak_blocks_per_row.tolist() == [3, 3]


def test_every_commit_frees_what_left_the_window() -> None:
    """Decoding token by token under a window of 6, the block below first token n - 5 goes as soon as n is committed."""
    manager = gemma_manager(num_slabs=20)
    row = manager.admit(1, 40).admitted_row
    for num_tokens in range(1, 41):
        step(manager, row, 1)
        first = max(0, num_tokens - 5) // 4
        assert manager.tables[0].first_block_per_row[row] == first
        assert len(row_ids(manager, row)[0]) == -(-num_tokens // 4) - first
        assert manager.num_freed_out_of_window.tolist() == [first, 0]
        assert len(row_ids(manager, row)[1]) == -(-num_tokens // 4)
    manager.check()


def test_chunks_free_whole_chunks() -> None:
    """A chunk of 8 frees its two blocks of 4 with its last token, not before."""
    manager = CacheManager(plan_slabs(chunked_and_full(8), 30))
    row = manager.admit(16).admitted_row
    step(manager, row, 7)
    assert len(row_ids(manager, row)[0]) == 2
    step(manager, row, 1)
    assert len(row_ids(manager, row)[0]) == 0
    step(manager, row, 1)
    assert manager.tables[0].first_block_per_row[row] == 2


def test_blocks_in_the_reserved_step_are_not_freed_early() -> None:
    """Reserved but uncommitted tokens free nothing: law 6 counts settled tokens only."""
    manager = gemma_manager()
    row = manager.admit(8, 16).admitted_row
    step(manager, row, 8)
    manager.reserve([row], [8])
    before = row_ids(manager, row)[0]
    assert len(before) == 4
    manager.commit([row], [1])
    assert row_ids(manager, row)[0] == before[1:]


def test_reserving_twice_reserves_once() -> None:
    """`reserve` counts from the computed tokens: the same or a smaller demand lends no further block."""
    manager = gemma_manager()
    row = manager.admit(8).admitted_row
    manager.reserve([row], [5])
    before = snapshot(manager)
    for num_tokens in (5, 8, 1):
        assert manager.reserve([row], [num_tokens]).verdicts.tolist() == [OK]
    assert manager.capacity_tokens[row] == 8
    manager.capacity_tokens[row] = 5
    assert snapshot(manager) == before


def test_an_empty_step_is_a_step() -> None:
    """No rows are reserved and committed without a complaint or a change."""
    manager = gemma_manager()
    before = snapshot(manager, ignore=STEP_NUMBERS)
    outcome = manager.reserve([], [])
    assert (outcome.num_ok, outcome.verdicts.shape, outcome.shortfall.shape) == (0, (0,), (2, 0))
    manager.commit([], [])
    assert snapshot(manager, ignore=STEP_NUMBERS) == before


def test_reserve_serves_a_prefix_and_says_what_is_missing() -> None:
    """From the first row that does not fit on none is served, and each is told what it and those before it lack."""
    manager = gemma_manager(num_slabs=4)
    rows = [manager.admit(8).admitted_row for _ in range(3)]
    outcome = manager.reserve(rows, [4, 8, 1])
    assert outcome.verdicts.tolist() == [OK, OK, LATER]
    assert outcome.num_ok == 2
    assert outcome.shortfall.tolist() == [[0, 0, 1], [0, 0, 1]]
    assert [spans(manager, row) for row in rows] == [[range(1)] * 2, [range(2)] * 2, [range(0)] * 2]
    assert manager.capacity_tokens[rows].tolist() == [4, 8, 0]
    manager.check()

    manager.finish(rows[0])
    outcome = manager.reserve([rows[2], rows[1]], [8, 8])
    assert outcome.verdicts.tolist() == [LATER, LATER]
    assert outcome.shortfall.tolist() == [[1, 1], [1, 1]]
    outcome = manager.reserve([rows[2]], [4])
    assert outcome.verdicts.tolist() == [OK]
    assert spans(manager, rows[2]) == [range(1), range(1)]


def test_a_smaller_row_does_not_overtake() -> None:
    """A row that would fit waits behind one that does not: order is the caller's."""
    manager = gemma_manager(num_slabs=3)
    rows = [manager.admit(8).admitted_row for _ in range(2)]
    manager.reserve(rows[:1], [4])
    assert manager.reserve([rows[0], rows[1]], [8, 8]).verdicts.tolist() == [OK, LATER]
    manager.preempt(rows[0])
    assert manager.resume(rows[0], 4).verdict == OK
    step(manager, rows[0], 4)
    outcome = manager.reserve([rows[1], rows[0]], [8, 1])
    assert outcome.verdicts.tolist() == [LATER, LATER]
    assert outcome.shortfall[:, 0].tolist() == [1, 0]


def test_a_row_that_outgrows_the_whole_pool_is_told_never() -> None:
    """A row that would not fit even alone gets NEVER, the others LATER."""
    manager = gemma_manager(num_slabs=5, window=40)
    long, short = manager.admit(8).admitted_row, manager.admit(8).admitted_row
    step(manager, long, 8)
    step(manager, long, 4)
    outcome = manager.reserve([long, short], [8, 4])
    assert outcome.verdicts.tolist() == [NEVER, LATER]
    assert outcome.shortfall.tolist() == [[1, 2], [2, 3]]
    assert spans(manager, long) == [range(3), range(3)]


def test_a_fragmented_row_left_alone_gets_its_blocks_moved_together() -> None:
    """Blocks left scattered by others do not cost a lone row a slab: it grows to the longest length that fits."""
    plan = plan_slabs(
        gemma_like(1, 5, window=13), 9, limits(max_num_seqs=3, max_model_len=40, max_num_batched_tokens=4)
    )
    assert [group.blocks_per_slab for group in plan.groups] == [5, 1]
    assert plan.longest_sequence() == 32
    manager = CacheManager(plan)
    long = manager.admit(16, 32).admitted_row
    for _ in range(4):
        step(manager, long, 4)
    shorts = [manager.admit(4).admitted_row for _ in range(2)]
    for row in shorts:
        step(manager, row, 4)
    step(manager, long, 4)
    for row in shorts:
        manager.finish(row)
    for _ in range(2):
        step(manager, long, 4)
    assert manager.pool.num_slabs_of.tolist() == [2, 7]
    step(manager, long, 4)
    assert manager.pool.num_slabs_of.tolist() == [1, 8]
    assert len(manager.take_copies().moves)
    assert manager.num_computed_tokens[long] == 32
    manager.check()


def test_resume_replaces_the_row() -> None:
    """A resumed row starts at ordinal 0 with nothing computed, in every group, whatever it held before."""
    manager = gemma_manager(num_slabs=20)
    row = manager.admit(16).admitted_row
    step(manager, row, 8)
    step(manager, row, 8)
    assert manager.tables[0].first_block_per_row[row] == 2
    manager.preempt(row)
    assert manager.resume(row, 5).verdict == OK
    assert (manager.num_computed_tokens[row], manager.capacity_tokens[row]) == (0, 0)
    assert manager.reserve([row], [5]).num_ok
    assert [table.first_block_per_row[row] for table in manager.tables] == [0, 0]
    assert [table.num_blocks_per_row[row] for table in manager.tables] == [2, 2]
    assert (manager.num_computed_tokens[row], manager.capacity_tokens[row]) == (0, 5)
    manager.check()


def test_a_row_that_cannot_resume_stays_preempted() -> None:
    """LATER leaves a preempted row preempted and lends it nothing."""
    manager = gemma_manager(num_slabs=3)
    waiting, running = manager.admit(8).admitted_row, manager.admit(8).admitted_row
    manager.preempt(waiting)
    step(manager, running, 8)
    before = snapshot(manager)
    assert manager.resume(waiting, 4).verdict == LATER
    assert snapshot(manager) == before
    manager.finish(waiting)
    assert manager.row_states[waiting] == RowState.FREE


def test_rows_run_out_and_come_back() -> None:
    """The lowest free row is given; with none left the answer is LATER with the number of rows and no block missing."""
    manager = gemma_manager()
    assert [manager.admit(1).row for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        before = snapshot(manager)
        answer = manager.admit(1)
        assert (answer.verdict, answer.row, answer.shortfall) == (LATER, None, (0, 0))
        assert "all 3 rows are taken" in answer.reason
        with pytest.raises(ValueError, match="the verdict is LATER: all 3 rows are taken"):
            _ = answer.admitted_row
        assert snapshot(manager) == before
        if manager.row_states[0] == RowState.RUNNING:
            manager.preempt(0)
    manager.finish(1)
    assert manager.admit(1).row == 1


def test_what_never_fits_is_refused_with_numbers() -> None:
    """The reason has the bytes needed and there, the blocks missing by group and the longest length that fits."""
    manager = gemma_manager(num_slabs=5, window=16)
    assert manager.plan.longest_sequence() == 12
    assert manager.admit(1, 12).row == 0
    before = snapshot(manager)
    answer = manager.admit(1, 20)
    assert (answer.verdict, answer.row, answer.shortfall) == (NEVER, None, (0, 5))
    assert answer.reason == (
        "memory: a sequence of 20 tokens needs 6.00 KiB, the arena has 4.50 KiB (short of {1: 5} blocks by group); "
        "at most 12 tokens fit"
    )
    with pytest.raises(NeverFits) as raised:
        manager.check_fits(20)
    assert (raised.value.shortfall, str(raised.value)) == ({1: 5}, answer.reason)
    assert isinstance(raised.value, InvalidRequest)
    assert snapshot(manager) == before


def test_a_prompt_that_does_not_fit_now_waits() -> None:
    """An admission asks for the whole prompt's blocks: LATER with what is missing, OK once the other is gone."""
    manager = gemma_manager(num_slabs=5)
    running = manager.admit(8).admitted_row
    step(manager, running, 8)
    before = snapshot(manager)
    answer = manager.admit(12)
    assert (answer.verdict, answer.row, answer.shortfall) == (LATER, None, (1, 2))
    assert "short of 1 blocks of group 0, 2 blocks of group 1" in answer.reason
    assert snapshot(manager) == before
    manager.finish(running)
    assert manager.admit(12).verdict == OK


def test_a_state_is_one_block_a_row() -> None:
    """A state group lends a row one block with its first tokens and no other, whatever its length."""
    manager = CacheManager(plan_slabs(state_and_attention(), 30))
    row = manager.admit(1, 40).admitted_row
    (state_block,), _ = (manager.reserve([row], [8]), row_ids(manager, row))[1]
    manager.commit([row], [8])
    for _ in range(4):
        step(manager, row, 8)
        assert row_ids(manager, row)[0] == [state_block]
    assert len(row_ids(manager, row)[1]) == 10
    manager.check()
    manager.finish(row)
    assert manager.pool.num_held.tolist() == [0, 0]


def test_cross_attention_takes_its_source_once() -> None:
    """A cross-attention group lends the source's 3 blocks with the first token and none after."""
    manager = CacheManager(plan_slabs(encoder_decoder(10), 30))
    row = manager.admit(1, 40).admitted_row
    step(manager, row, 1)
    source = row_ids(manager, row)[0]
    assert len(source) == 3
    for _ in range(4):
        step(manager, row, 8)
        assert row_ids(manager, row)[0] == source
    manager.check()
