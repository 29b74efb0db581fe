"""Claims about verbs that fail: what they say, and that everything is as it was."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from hybridkv.block_table import make_block_tables
from hybridkv.errors import InvalidRequest, InvariantError, OutOfBlocks, OutOfRows
from hybridkv.limits import BatchLimits
from hybridkv.manager import CacheManager, ManagerOptions
from hybridkv.resume_policy import ResumePolicy
from hybridkv.row_lengths import RowState
from hybridkv.specs import SlidingWindow
from tests.manager_steps import feed, gemma_manager, serve, step
from tests.models import FULL, gemma_like, kv_cache, model, plan_slabs, state_cache
from tests.snapshots import TIMES, snapshot


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
    ("expected 1 <= prompt <= total", InvalidRequest, lambda manager: manager.admit(5, external_tokens=-1)),
    ("expected 1 <= prompt <= total", InvalidRequest, lambda manager: manager.admit([])),
    ("token_ids: got float64", InvalidRequest, lambda manager: manager.admit([1.5])),
    (r"token_ids: got -1\.\.4", InvalidRequest, lambda manager: manager.admit([4, -1])),
    (r"token_ids: got 1\.\.2147483648", InvalidRequest, lambda manager: manager.admit([2**31, 1])),
    ("expected a flat list of integers", InvalidRequest, lambda manager: manager.admit([[1, 2]])),
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
    ("row 2 is FREE, expected PREEMPTED", ValueError, lambda manager: manager.resume(2, 1)),
    ("expected 1 <= prompt <= total", InvalidRequest, lambda manager: manager.resume(1, 0)),
    ("at most max_model_len=40", InvalidRequest, lambda manager: manager.resume(1, 41)),
    ("row: got 2, which holds no sequence", ValueError, lambda manager: manager.finish(2)),
    ("row: got -1", ValueError, lambda manager: manager.finish(-1)),
    ("expected 2 integers, one for each token", InvalidRequest, lambda manager: manager.commit([0], [2], [7])),
    ("row 1 is PREEMPTED", ValueError, lambda manager: manager.launch([1], [1])),
    ("its capacity of 8; reserve first", ValueError, lambda manager: manager.launch([0], [3])),
    ("no step is in flight; launch first", ValueError, lambda manager: manager.settle(9)),
    ("row 1 is PREEMPTED", ValueError, lambda manager: manager.chunk_limits([1])),
    ("row 1 is PREEMPTED", ValueError, lambda manager: manager.fork(1, 1)),
    ("num_children: got 0", InvalidRequest, lambda manager: manager.fork(0, 0)),
    ("all 3 rows are taken", OutOfRows, lambda manager: manager.fork(0, 2)),
    ("sources: got", ValueError, lambda manager: manager.reorder([0], [1])),
    ("sources: got", ValueError, lambda manager: manager.reorder([0], [])),
    ("row 1 is PREEMPTED", ValueError, lambda manager: manager.reorder([0, 1], [0, 0])),
    ("row 1 is PREEMPTED", ValueError, lambda manager: manager.checkpoint([1])),
    ("num_tokens: got", ValueError, lambda manager: manager.can_roll_back([0], [-1])),
    ("num_tokens: got", ValueError, lambda manager: manager.roll_back([0], [1, 1])),
    ("6 are computed and 6 settled", ValueError, lambda manager: manager.roll_back([0], [1])),
    ("source: got row 2", ValueError, lambda manager: manager.move_row(2, 0)),
    ("target: got row 1", ValueError, lambda manager: manager.move_row(0, 1)),
    ("target: got row 3", ValueError, lambda manager: manager.move_row(0, 3)),
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
    row = manager.admit(8, 40).admitted_row
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
        row = manager.admit(1, 40).admitted_row
        for _ in range(length):
            step(manager, row, 1)
        with pytest.raises(ValueError, match="expected at most 8"):
            manager.reserve([row], [9])
        assert manager.reserve([row], [8]).num_ok == 1
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
    ("rows and pending copies hold it", lambda manager: manager.tables[1].entries.__setitem__((0, 0), 10)),
    ("do not match its capacity", lambda manager: manager.tables[0].clear_row(0)),
    ("a row that does not run holds blocks", lambda manager: manager.row_states.__setitem__(0, RowState.FREE)),
    ("do not match its capacity", lambda manager: manager.capacity_tokens.__setitem__(0, 9)),
    ("held blocks: 7 are counted", lambda manager: manager.pool.num_held.__setitem__(0, 7)),
]


@pytest.mark.parametrize(("message", "corrupt"), CORRUPTIONS, ids=[str(idx) for idx in range(len(CORRUPTIONS))])
def test_check_finds_what_disagrees(message: str, corrupt: Callable[[CacheManager], object]) -> None:
    """Pool, tables and rows that contradict each other raise an `InvariantError` that says where."""
    manager = prepared()
    manager.check()
    corrupt(manager)
    with pytest.raises(InvariantError, match=message):
        manager.check()


# Allocations that fail


SPEC = model(kv_cache(SlidingWindow(window=7)), state_cache(), kv_cache(FULL))
LAST_TURN = list(range(22))


def busy() -> CacheManager:
    """Rows 0 and 1 run with 9 and 14 tokens, row 2 is preempted, row 3 on the host; a last turn of 22 is cached."""
    plan = plan_slabs(SPEC, 200, BatchLimits(8, 60, 30), {0: 4, 2: 4})
    options = ManagerOptions(host_bytes=plan.memory_bytes, resume_points=ResumePolicy(every=12))
    manager = CacheManager(plan, options=options)
    serve(manager, LAST_TURN)
    for base, count in ((100, 9), (200, 14), (300, 10), (400, 11)):
        feed(manager, manager.admit([base] * count).admitted_row, [base] * count)
    manager.preempt(2)
    manager.preempt(3, to_host=True)
    manager.take_copies()
    manager.commit([], [])
    manager.reserve([0], [3])
    return manager


ALLOCATING: dict[str, Callable[[CacheManager], object]] = {
    "reserve": lambda manager: manager.reserve([0, 1], [3, 10]),
    "admit": lambda manager: manager.admit([*LAST_TURN, 1]),
    "admit with tokens from elsewhere": lambda manager: manager.admit([*LAST_TURN, *LAST_TURN], external_tokens=30),
    "resume": lambda manager: manager.resume(2, [300] * 11),
    "resume from the host": lambda manager: manager.resume(3, [400] * 11),
    "fork": lambda manager: manager.fork(1, 3),
    "reorder": lambda manager: manager.reorder([0, 1], [1, 1]),
    "checkpoint": lambda manager: manager.checkpoint([0, 1]),
    "preempt": lambda manager: manager.preempt(1, to_host=True),
}


@pytest.mark.parametrize("verb", ALLOCATING)
@pytest.mark.parametrize("error", [MemoryError, OutOfBlocks])
def test_a_failing_allocation_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch, verb: str, error: type[Exception]
) -> None:
    """Whichever allocation of blocks fails, on the device or the host, the manager is that of before, and goes on."""
    for kth in range(10):
        manager = busy()
        before = snapshot(manager, ignore=TIMES)
        with monkeypatch.context() as patched:
            calls = _failing(patched, kth, error, (manager.pool, "take"), (manager._store.host_pool, "take"))
            with suppress(MemoryError, OutOfBlocks):
                ALLOCATING[verb](manager)
        if len(calls) <= kth:
            break
        assert snapshot(manager, ignore=TIMES) == before
        manager.check()
        ALLOCATING[verb](manager)
        manager.check()
    assert kth > 0, "the verb allocates nothing"


def _failing(patched: pytest.MonkeyPatch, kth: int, error: type[Exception], *methods: tuple[object, str]) -> list[str]:
    """Let the k-th call of all these methods together fail; return the calls made, in a list that grows."""
    calls: list[str] = []

    def watched(owner: object, name: str) -> Callable[..., object]:
        original = getattr(owner, name)

        def call(*args: object, **kwargs: object) -> object:
            calls.append(name)
            if len(calls) == kth + 1:
                raise error({}, {}) if error is OutOfBlocks else error
            return original(*args, **kwargs)

        return call

    for owner, name in methods:
        patched.setattr(owner, name, watched(owner, name))
    return calls


@pytest.mark.parametrize(
    "verb", ["reserve", "admit", "admit with tokens from elsewhere", "resume", "resume from the host"]
)
def test_a_failing_table_gives_the_blocks_back(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """If a row cannot be written after its blocks were lent, they go back, shared ones to the cache."""
    manager = busy()
    aside = (*TIMES, "peak_held", "free_stacks", "slabs")  # which slabs a group's free blocks lie in may change
    before, room = snapshot(manager, ignore=aside), _room(manager)
    with monkeypatch.context() as patched:
        store = manager._store
        calls = _failing(patched, 0, MemoryError, (store.arrays, "set_rows"), (store.operations, "append_rows"))
        with pytest.raises(MemoryError):
            ALLOCATING[verb](manager)
    assert len(calls) == 1
    assert snapshot(manager, ignore=aside) == before
    assert _room(manager) == room
    manager.check()
    ALLOCATING[verb](manager)
    manager.check()


def _room(manager: CacheManager) -> int:
    """Slabs that can be had as things are."""
    return manager.pool.room_now()[1]


@pytest.mark.parametrize("error", [MemoryError, OutOfBlocks])
def test_a_commit_goes_on_where_a_point_finds_no_memory(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """What is only kept for later never fails a commit: the point is skipped and counted, the tokens are final."""
    manager = busy()
    with monkeypatch.context() as patched:
        calls = _failing(patched, 0, error, (manager.pool, "take"))
        manager.commit([0], [3], [100] * 3)
    assert len(calls) == 1
    assert manager.num_committed_tokens[0] == 12
    assert manager._store.recorder.num_skipped_points == 1
    manager.check()
    feed(manager, 0, [100] * 30)
    manager.check()


@pytest.mark.parametrize("verb", [*ALLOCATING, "commit", "launch", "take_copies", "evict", "finish", "move_row", "use"])
def test_a_snapshot_sees_what_every_verb_changes(verb: str) -> None:
    """The comparison behind these claims is no empty one: each verb that works leaves another picture."""
    others: dict[str, Callable[[CacheManager], object]] = {
        "commit": lambda manager: manager.commit([0], [3], [100] * 3),
        "launch": lambda manager: manager.launch([0], [3]),
        "take_copies": lambda manager: manager.take_copies(),
        "evict": lambda manager: manager.index.evict(2, 1),
        "finish": lambda manager: manager.finish(2),
        "move_row": lambda manager: manager.move_row(3, 5),
        "use": lambda manager: manager.index.touch(manager.index.find(np.arange(22, dtype=np.int32))),
    }
    manager = busy()
    manager.checkpoint([1])
    before = snapshot(manager)
    assert snapshot(manager) == before
    (ALLOCATING | others)[verb if verb != "checkpoint" else "reserve"](manager)
    assert snapshot(manager) != before
