"""Claims about sequences that come, grow, pause and go: exact blocks, verdicts, what a failure leaves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridkv.errors import InvalidRequest, InvariantError, NeverFits, OutOfRows
from hybridkv.manager import CacheManager, RowState, Verdict, make_block_tables
from tests.models import (
    chunked_and_full,
    encoder_decoder,
    gemma_like,
    limits,
    plan_slabs,
    snapshot,
    state_and_attention,
)

OK, LATER, NEVER = Verdict.OK, Verdict.LATER, Verdict.NEVER


def gemma_manager(num_slabs: int = 8, window: int = 6) -> CacheManager:
    """Blocks of 4 tokens, 8 tokens a step; group 0 (window) has 1 block a slab, group 1 (full) has 3."""
    plan = plan_slabs(gemma_like(3, 1, window=window), num_slabs, limits(max_num_seqs=3, max_model_len=40))
    assert [group.blocks_per_slab for group in plan.groups] == [1, 3]
    return CacheManager(plan)


def row_ids(manager: CacheManager, row: int) -> list[list[int]]:
    """A row's live block ids in each group."""
    return [table.row_block_ids(row).tolist() for table in manager.tables]


def step(manager: CacheManager, row: int, num_tokens: int) -> None:
    """Reserve and commit tokens of one row."""
    assert manager.reserve([row], [num_tokens]).verdicts.tolist() == [OK]
    manager.commit([row], [num_tokens])


def test_the_life_of_two_sequences() -> None:
    """Admit, prefill in two chunks, lose a block to the window, make room, preempt, resume, finish: block by block."""
    manager = gemma_manager()
    first = manager.admit(10, 12)
    assert (first, row_ids(manager, first)) == (0, [[], []])

    assert manager.reserve([first], [8]).verdicts.tolist() == [OK]
    assert row_ids(manager, first) == [[1, 2], [9, 10]]
    assert (manager.num_computed_tokens[first], manager.capacity_tokens[first]) == (0, 8)
    manager.commit([first], [8])
    assert row_ids(manager, first) == [[1, 2], [9, 10]]

    step(manager, first, 2)
    assert row_ids(manager, first) == [[2, 4], [9, 10, 11]]
    assert manager.num_freed_out_of_window.tolist() == [1, 0]
    assert manager.tables[0].entries[first, :4].tolist() == [0, 2, 4, 0]

    second = manager.admit(4)
    step(manager, second, 4)
    assert (second, row_ids(manager, second)) == (1, [[1], [15]])

    manager.preempt(second)
    assert row_ids(manager, second) == [[], []]
    assert (manager.row_states[second], manager.num_free_rows) == (RowState.PREEMPTED, 1)
    assert (manager.num_computed_tokens[second], manager.capacity_tokens[second]) == (0, 0)

    assert manager.resume(second, 4) is OK
    assert row_ids(manager, second) == [[5], [3]]
    assert manager.row_states[second] == RowState.RUNNING

    manager.check()
    manager.finish(first)
    manager.finish(second)
    manager.check()
    assert manager.pool.num_free_slabs == 8
    assert not any(table.arrays.words.any() for table in manager.tables)
    assert (manager.num_free_rows, manager.num_preemptions) == (3, 1)
    assert manager.peak_blocks_per_row.tolist() == [3, 3]


def test_every_commit_frees_what_left_the_window() -> None:
    """Decoding token by token under a window of 6, the block below first token n - 5 goes as soon as n is committed."""
    manager = gemma_manager(num_slabs=20)
    row = manager.admit(1, 40)
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
    row = manager.admit(16)
    step(manager, row, 7)
    assert len(row_ids(manager, row)[0]) == 2
    step(manager, row, 1)
    assert len(row_ids(manager, row)[0]) == 0
    step(manager, row, 1)
    assert manager.tables[0].first_block_per_row[row] == 2


def test_blocks_in_the_reserved_step_are_not_freed_early() -> None:
    """Reserved but uncommitted tokens free nothing: law 6 counts settled tokens only."""
    manager = gemma_manager()
    row = manager.admit(8, 16)
    step(manager, row, 8)
    manager.reserve([row], [8])
    assert row_ids(manager, row)[0] == [1, 2, 4, 5]
    manager.commit([row], [1])
    assert row_ids(manager, row)[0] == [2, 4, 5]


def test_reserving_twice_reserves_once() -> None:
    """`reserve` counts from the computed tokens: the same or a smaller demand lends no further block."""
    manager = gemma_manager()
    row = manager.admit(8)
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
    before = snapshot(manager)
    outcome = manager.reserve([], [])
    assert (outcome.num_ok, outcome.verdicts.shape, outcome.shortfall.shape) == (0, (0,), (2, 0))
    manager.commit([], [])
    assert snapshot(manager) == before


def test_reserve_serves_a_prefix_and_says_what_is_missing() -> None:
    """From the first row that does not fit on none is served, and each is told what it and those before it lack."""
    manager = gemma_manager(num_slabs=4)
    rows = [manager.admit(8) for _ in range(3)]
    outcome = manager.reserve(rows, [4, 8, 1])
    assert outcome.verdicts.tolist() == [OK, OK, LATER]
    assert outcome.num_ok == 2
    assert outcome.shortfall.tolist() == [[0, 0, 1], [0, 0, 1]]
    assert [row_ids(manager, row) for row in rows] == [[[1], [12]], [[2, 3], [13, 14]], [[], []]]
    assert manager.capacity_tokens[rows].tolist() == [4, 8, 0]
    manager.check()

    manager.finish(rows[0])
    outcome = manager.reserve([rows[2], rows[1]], [8, 8])
    assert outcome.verdicts.tolist() == [LATER, LATER]
    assert outcome.shortfall.tolist() == [[1, 1], [1, 1]]
    outcome = manager.reserve([rows[2]], [4])
    assert outcome.verdicts.tolist() == [OK]
    assert row_ids(manager, rows[2]) == [[1], [12]]


def test_a_smaller_row_does_not_overtake() -> None:
    """A row that would fit waits behind one that does not: order is the caller's."""
    manager = gemma_manager(num_slabs=3)
    rows = [manager.admit(8), manager.admit(8)]
    manager.reserve(rows[:1], [4])
    assert manager.reserve([rows[0], rows[1]], [8, 8]).verdicts.tolist() == [OK, LATER]
    manager.preempt(rows[0])
    manager.resume(rows[0], 4)
    outcome = manager.reserve([rows[1], rows[0]], [8, 1])
    assert outcome.verdicts.tolist() == [LATER, LATER]
    assert outcome.shortfall[:, 0].tolist() == [1, 0]


def test_a_row_that_outgrows_the_whole_pool_is_told_never() -> None:
    """A row that would not fit even alone gets NEVER, the others LATER."""
    manager = gemma_manager(num_slabs=5, window=40)
    long, short = manager.admit(8), manager.admit(8)
    step(manager, long, 8)
    step(manager, long, 4)
    outcome = manager.reserve([long, short], [8, 4])
    assert outcome.verdicts.tolist() == [NEVER, LATER]
    assert outcome.shortfall.tolist() == [[1, 2], [2, 3]]
    assert row_ids(manager, long)[0] == [1, 2, 4]


def test_a_fragmented_row_left_alone_waits_until_it_is_preempted() -> None:
    """Blocks left scattered by others may cost a lone row a slab: it is told LATER, and starting over serves it."""
    plan = plan_slabs(
        gemma_like(1, 5, window=13), 9, limits(max_num_seqs=3, max_model_len=40, max_num_batched_tokens=4)
    )
    assert [group.blocks_per_slab for group in plan.groups] == [5, 1]
    assert plan.longest_sequence() == 32
    manager = CacheManager(plan)
    long = manager.admit(16, 32)
    for _ in range(4):
        step(manager, long, 4)
    shorts = [manager.admit(4) for _ in range(2)]
    for row in shorts:
        step(manager, row, 4)
    step(manager, long, 4)
    for row in shorts:
        manager.finish(row)
    for _ in range(2):
        step(manager, long, 4)
    assert manager.reserve([long], [4]).verdicts.tolist() == [LATER]
    manager.preempt(long)
    assert manager.resume(long, 4) is OK
    manager.commit([long], [4])
    for _ in range(7):
        step(manager, long, 4)
    assert manager.num_computed_tokens[long] == 32


def test_resume_replaces_the_row() -> None:
    """A resumed row starts at ordinal 0 with nothing computed, in every group, whatever it held before."""
    manager = gemma_manager(num_slabs=20)
    row = manager.admit(16)
    step(manager, row, 8)
    step(manager, row, 8)
    assert manager.tables[0].first_block_per_row[row] == 2
    manager.preempt(row)
    assert manager.resume(row, 5) is OK
    assert [table.first_block_per_row[row] for table in manager.tables] == [0, 0]
    assert [table.num_blocks_per_row[row] for table in manager.tables] == [2, 2]
    assert (manager.num_computed_tokens[row], manager.capacity_tokens[row]) == (0, 5)
    manager.check()


def test_a_row_that_cannot_resume_stays_preempted() -> None:
    """LATER leaves a preempted row preempted and lends it nothing."""
    manager = gemma_manager(num_slabs=3)
    waiting, running = manager.admit(8), manager.admit(8)
    manager.preempt(waiting)
    step(manager, running, 8)
    before = snapshot(manager)
    assert manager.resume(waiting, 4) is LATER
    assert snapshot(manager) == before
    manager.finish(waiting)
    assert manager.row_states[waiting] == RowState.FREE


def test_rows_run_out_and_come_back() -> None:
    """The lowest free row is given; with none left admission raises with the number of rows."""
    manager = gemma_manager()
    assert [manager.admit(1) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OutOfRows, match="all 3 rows are taken") as raised:
        manager.admit(1)
    assert raised.value.max_num_seqs == 3
    manager.preempt(0)
    with pytest.raises(OutOfRows):
        manager.admit(1)
    manager.finish(1)
    assert manager.admit(1) == 1


def test_what_never_fits_is_refused_with_numbers() -> None:
    """The message has the bytes needed and there, the blocks missing by group and the longest length that fits."""
    manager = gemma_manager(num_slabs=5, window=16)
    assert manager.plan.longest_sequence() == 12
    assert manager.admit(1, 12) == 0
    with pytest.raises(NeverFits) as raised:
        manager.admit(1, 20)
    assert raised.value.shortfall == {1: 5}
    assert str(raised.value) == (
        "memory: a sequence of 20 tokens needs 6.00 KiB, the arena has 4.50 KiB (short of {1: 5} blocks by group); "
        "at most 12 tokens fit"
    )
    assert isinstance(raised.value, InvalidRequest)


def test_a_state_is_one_block_a_row() -> None:
    """A state group lends a row one block with its first tokens and no other, whatever its length."""
    manager = CacheManager(plan_slabs(state_and_attention(), 30))
    row = manager.admit(1, 40)
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
    row = manager.admit(1, 40)
    step(manager, row, 1)
    source = row_ids(manager, row)[0]
    assert len(source) == 3
    for _ in range(4):
        step(manager, row, 8)
        assert row_ids(manager, row)[0] == source
    manager.check()


def prepared() -> CacheManager:
    """Row 0 runs with 6 of 8 tokens computed, row 1 is preempted, row 2 is free."""
    manager = gemma_manager()
    manager.admit(8)
    manager.admit(8)
    manager.reserve([0], [8])
    manager.commit([0], [6])
    manager.preempt(1)
    return manager


FAILURES: list[tuple[str, type[Exception], Callable[[CacheManager], object]]] = [
    ("expected 1 <= prompt <= total", InvalidRequest, lambda manager: manager.admit(0)),
    ("expected 1 <= prompt <= total", InvalidRequest, lambda manager: manager.admit(5, 4)),
    ("at most max_model_len=40", InvalidRequest, lambda manager: manager.admit(41)),
    ("at most max_model_len=40", InvalidRequest, lambda manager: manager.admit(1, 41)),
    ("row 1 is PREEMPTED, expected RUNNING", ValueError, lambda manager: manager.reserve([0, 1], [1, 1])),
    ("row 2 is FREE, expected RUNNING", ValueError, lambda manager: manager.reserve([2], [1])),
    ("expected distinct rows", ValueError, lambda manager: manager.reserve([0, 0], [1, 1])),
    (r"rows: got -1\.\.0, expected 0\.\.2", ValueError, lambda manager: manager.reserve([0, -1], [1, 1])),
    (r"rows: got 3\.\.3", ValueError, lambda manager: manager.reserve([3], [1])),
    ("got shapes", ValueError, lambda manager: manager.reserve([0], [1, 1])),
    ("expected a flat list", ValueError, lambda manager: manager.reserve(0, 1)),
    ("float64", ValueError, lambda manager: manager.reserve([0], [5.7])),
    ("num_new_tokens: got 0", ValueError, lambda manager: manager.reserve([0], [0])),
    ("num_new_tokens: got 9, expected at most 8", ValueError, lambda manager: manager.reserve([0], [9])),
    ("would have more tokens computed than its capacity of 8", ValueError, lambda manager: manager.commit([0], [3])),
    ("row 1 is PREEMPTED", ValueError, lambda manager: manager.commit([1], [1])),
    ("num_new_tokens: got -1", ValueError, lambda manager: manager.commit([0], [-1])),
    ("row 1 is PREEMPTED, expected RUNNING", ValueError, lambda manager: manager.preempt(1)),
    ("row 2 is FREE, expected RUNNING", ValueError, lambda manager: manager.preempt(2)),
    ("row: got 3", ValueError, lambda manager: manager.preempt(3)),
    ("row 0 is RUNNING, expected PREEMPTED", ValueError, lambda manager: manager.resume(0, 1)),
    ("num_new_tokens: got 0", ValueError, lambda manager: manager.resume(1, 0)),
    ("num_new_tokens: got 41", ValueError, lambda manager: manager.resume(1, 41)),
    ("row: got 2, which holds no sequence", ValueError, lambda manager: manager.finish(2)),
    ("row: got -1", ValueError, lambda manager: manager.finish(-1)),
]


@pytest.mark.parametrize(("message", "error", "call"), FAILURES, ids=[message for message, _, _ in FAILURES])
def test_a_failed_verb_leaves_everything_as_it_was(
    message: str, error: type[Exception], call: Callable[[CacheManager], object]
) -> None:
    """Wrong arguments raise and say why; rows, lengths, tables, dirty marks and pool are those of before."""
    manager = prepared()
    before = snapshot(manager)
    with pytest.raises(error, match=message):
        call(manager)
    assert snapshot(manager) == before


def test_growth_past_max_model_len_is_refused() -> None:
    """A row of 36 tokens cannot reserve 5 more where sequences end at 40; nothing changes."""
    manager = gemma_manager(num_slabs=20)
    row = manager.admit(8, 40)
    for num_tokens in (8, 8, 8, 8, 4):
        step(manager, row, num_tokens)
    before = snapshot(manager)
    with pytest.raises(InvalidRequest, match="row 0 would grow to 41, past max_model_len=40"):
        manager.reserve([row], [5])
    assert snapshot(manager) == before
    step(manager, row, 4)


def test_a_ring_takes_the_largest_step_at_every_length() -> None:
    """The widest step is served at each length without passing the row's width; a wider one is refused first."""
    for length in range(1, 32):
        manager = gemma_manager(num_slabs=30, window=6)
        row = manager.admit(1, 40)
        for _ in range(length):
            step(manager, row, 1)
        with pytest.raises(ValueError, match="expected at most 8"):
            manager.reserve([row], [9])
        assert manager.reserve([row], [8]).verdicts.tolist() == [OK]
        manager.check()


@pytest.mark.parametrize("kth", [0, 1])
@pytest.mark.parametrize("verb", ["reserve", "resume"])
def test_a_failing_allocation_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch, verb: str, kth: int) -> None:
    """Whichever group's allocation fails inside `reserve` or `resume`, the whole manager is that of before."""
    manager = prepared()
    before = snapshot(manager)
    allocate_in, groups = manager.pool._allocate_in, []

    def failing(group: int, count: int) -> np.ndarray:
        groups.append(group)
        if group == kth:
            raise MemoryError
        return allocate_in(group, count)

    with monkeypatch.context() as patched:
        patched.setattr(manager.pool, "_allocate_in", failing)
        with pytest.raises(MemoryError):
            manager.reserve([0], [8]) if verb == "reserve" else manager.resume(1, 4)
    assert groups == list(range(kth + 1))
    assert snapshot(manager) == before
    manager.check()


def test_tables_of_another_plan_are_refused() -> None:
    """A manager takes one table a group, of the plan's own rows, widths, block sizes and modes."""
    plan = plan_slabs(gemma_like(), 8)
    tables = make_block_tables(plan)
    assert CacheManager(plan, tables).tables == tables
    with pytest.raises(ValueError, match="expected one for each of 2 groups"):
        CacheManager(plan, tables[:1])
    with pytest.raises(ValueError, match="group 0 got one of another plan"):
        CacheManager(plan, tables[::-1])


CORRUPTIONS: list[tuple[str, Callable[[CacheManager], object]]] = [
    ("does not read null", lambda manager: manager.tables[0].entries.__setitem__((2, 0), 5)),
    ("reference counts disagree", lambda manager: manager.tables[1].entries.__setitem__((0, 0), 10)),
    ("reference counts disagree", lambda manager: manager.tables[0].clear_row(0)),
    ("a row that does not run holds blocks", lambda manager: manager.row_states.__setitem__(0, RowState.FREE)),
    ("do not match its capacity", lambda manager: manager.capacity_tokens.__setitem__(0, 9)),
    ("blocks are held", lambda manager: manager.pool.num_held.__setitem__(0, 7)),
]


@pytest.mark.parametrize(("message", "corrupt"), CORRUPTIONS, ids=[str(idx) for idx in range(len(CORRUPTIONS))])
def test_check_finds_what_disagrees(message: str, corrupt: Callable[[CacheManager], object]) -> None:
    """Pool, tables and rows that contradict each other raise an `InvariantError` that says where."""
    manager = prepared()
    manager.check()
    corrupt(manager)
    with pytest.raises(InvariantError, match=message):
        manager.check()


class ManagerMachine(RuleBasedStateMachine):
    """Random sequences over a small pool, beside a dict of their lengths."""

    @initialize(spec=st.sampled_from([gemma_like(2, 3, window=5), chunked_and_full(6), state_and_attention()]))
    def start(self, spec: object) -> None:
        self.plan = plan_slabs(spec, 8, limits(max_num_seqs=3, max_model_len=30, max_num_batched_tokens=7))
        self.manager = CacheManager(self.plan)
        self.computed: dict[int, int] = {}
        self.preempted: set[int] = set()

    @rule()
    def admit(self) -> None:
        if len(self.computed) + len(self.preempted) == 3:
            with pytest.raises(OutOfRows):
                self.manager.admit(1)
        else:
            self.computed[self.manager.admit(1)] = 0

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def run_a_step(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.computed)), unique=True, min_size=1))
        num_new = [data.draw(st.integers(1, min(7, max(1, 30 - self.computed[row])))) for row in rows]
        if any(self.computed[row] == 30 for row in rows):
            return
        held = [table.num_blocks_per_row.copy() for table in self.manager.tables]
        outcome = self.manager.reserve(rows, num_new)
        ok = outcome.verdicts == OK
        assert ok.tolist() == sorted(ok.tolist(), reverse=True)
        assert (outcome.shortfall[:, ok] == 0).all()
        assert (outcome.shortfall[:, ~ok].sum(axis=0) > 0).all()
        for row in rows[outcome.num_ok :]:
            now = [table.num_blocks_per_row[row] for table in self.manager.tables]
            assert now == [old[row] for old in held]
        served = rows[: outcome.num_ok]
        taken = [data.draw(st.integers(1, count)) for count in num_new[: outcome.num_ok]]
        self.manager.commit(served, taken)
        for row, count in zip(served, taken, strict=True):
            self.computed[row] += count

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.computed)))
        self.manager.preempt(row)
        del self.computed[row]
        self.preempted.add(row)

    @precondition(lambda self: self.preempted)
    @rule(data=st.data(), num_tokens=st.integers(1, 7))
    def resume(self, data: st.DataObject, num_tokens: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.preempted)))
        if self.manager.resume(row, num_tokens) is OK:
            self.preempted.remove(row)
            self.computed[row] = 0

    @precondition(lambda self: self.computed or self.preempted)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted({*self.computed, *self.preempted})))
        self.manager.finish(row)
        self.computed.pop(row, None)
        self.preempted.discard(row)

    @invariant()
    def everything_agrees(self) -> None:
        self.manager.check()
        in_flight = self.plan.limits.max_in_flight
        for group, table in zip(self.plan.groups, self.manager.tables, strict=True):
            held = [table.row_block_ids(row).tolist() for row in range(3)]
            everything = [block_id for ids in held for block_id in ids]
            assert len(set(everything)) == len(everything)
            assert all(not held[row] for row in range(3) if row not in self.computed)
            for row in self.computed:
                assert len(held[row]) <= group.max_blocks(int(self.manager.capacity_tokens[row]), in_flight)
            assert self.manager.peak_blocks_per_row[group.group.group_id] <= group.table_width
        for row, count in self.computed.items():
            assert self.manager.num_computed_tokens[row] == count


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
