"""Claims about tokens that are taken back: who may, and that it is asked before anything is touched."""

from __future__ import annotations

import numpy as np
import pytest

from hybridkv.errors import OutOfBlocks
from hybridkv.limits import BatchLimits
from hybridkv.manager import CacheManager
from hybridkv.specs import ModelSpec
from tests.manager_steps import feed, row_ids
from tests.models import gemma_like, plan_slabs, state_and_attention
from tests.snapshots import snapshot

ATTENTION, STATES = gemma_like(1, 1, window=6), state_and_attention()
PROMPT = list(range(11))


def prefilled(spec: ModelSpec, num_rows: int = 1, num_slabs: int = 200) -> CacheManager:
    """Rows that have computed 11 tokens."""
    plan = plan_slabs(spec, num_slabs, BatchLimits(4, 60, 16, 16), {g: 4 for g in (0, 1) if spec is ATTENTION or g})
    manager = CacheManager(plan)
    for _ in range(num_rows):
        feed(manager, manager.admit([*PROMPT[:10], 10 + num_rows]).admitted_row, [*PROMPT[:10], 10 + num_rows])
    manager.take_copies()
    return manager


def draft(manager: CacheManager, rows: list[int], counts: list[int]) -> int:
    """Launch drafts."""
    assert manager.reserve(rows, counts).num_ok == len(rows)
    return manager.launch(rows, counts)


def test_attention_takes_back_any_drafts_that_have_not_settled() -> None:
    """Rows take back up to what is in flight, each its own count, without a copy; blocks stay reserved."""
    manager = prefilled(ATTENTION, 2)
    step = draft(manager, [0, 1], [4, 6])
    before, held = snapshot(manager), [row_ids(manager, row) for row in (0, 1)]
    assert manager.can_roll_back([0, 1], [4, 6]).tolist() == [True, True]
    assert manager.can_roll_back([0, 1], [5, 0]).tolist() == [False, True]
    assert snapshot(manager) == before
    assert manager.roll_back([1, 0], [5, 0]).tolist() == [12, 15]
    assert [row_ids(manager, row) for row in (0, 1)] == held
    assert manager.capacity_tokens[:2].tolist() == [15, 17]
    assert len(manager.take_copies()) == 0
    manager.settle(step)
    assert manager.num_settled_tokens[:2].tolist() == [15, 12]
    manager.check()


@pytest.mark.parametrize("spec", [ATTENTION, STATES], ids=["attention", "states"])
def test_a_rollback_answers_before_it_touches(spec: ModelSpec) -> None:
    """If one of several rows cannot roll back, none does, and everything is as it was."""
    manager = prefilled(spec, 2)
    manager.checkpoint([0])
    manager.take_copies()
    draft(manager, [0, 1], [4, 4])
    before = snapshot(manager)
    bad = 5 if spec is ATTENTION else 2  # row 1 has no checkpoint
    with pytest.raises(ValueError, match=r"row 1: got .* tokens to roll back, 15 are computed and 11 settled"):
        manager.roll_back([0, 1], [2, bad])
    assert snapshot(manager) == before
    assert manager.roll_back([0], [2]).tolist() == [13 if spec is ATTENTION else 11]


def test_settled_tokens_stay() -> None:
    """Once a step has settled none of its tokens can be taken back: windows may have freed what they would need."""
    for spec in (ATTENTION, STATES):
        manager = prefilled(spec)
        manager.checkpoint([0])
        manager.settle(draft(manager, [0], [4]))
        assert manager.can_roll_back([0], [1]).tolist() == [False]
        assert manager.can_roll_back([0], [0]).tolist() == [True]
        assert manager.roll_back([0], [0]).tolist() == [15]


def test_states_go_back_to_their_checkpoint() -> None:
    """The two sets of state blocks change places: no copy at the rollback, accepted tokens are computed again."""
    manager = prefilled(STATES)
    (state,), held = row_ids(manager, 0)[0], manager.pool.num_held.copy()
    manager.checkpoint([0])
    copies = manager.take_copies().within.tolist()
    assert [(group, source) for group, source, _ in copies] == [(0, state)]
    kept = copies[0][2]
    assert (manager.pool.num_held - held).tolist() == [1, 0]
    step = draft(manager, [0], [5])
    assert manager.roll_back([0], [2]).tolist() == [11]
    assert row_ids(manager, 0)[0] == [kept]
    assert len(manager.take_copies()) == 0
    manager.settle(step)
    assert _lengths(manager) == (11, 11, 11)
    assert manager.can_roll_back([0], [1]).tolist() == [False]
    manager.checkpoint([0])
    assert manager.take_copies().within.tolist() == [[0, kept, state]]
    assert (manager.pool.num_held - held).tolist() == [1, 1]
    manager.check()
    manager.finish(0)
    manager.commit([], [])
    assert manager.pool.num_held.tolist() == [0, 0]


def _lengths(manager: CacheManager) -> tuple[int, ...]:
    return tuple(
        int(v[0]) for v in (manager.num_committed_tokens, manager.num_settled_tokens, manager.num_computed_tokens)
    )


def test_a_checkpoint_is_good_for_tokens_behind_it() -> None:
    """A rollback to before the checkpoint is refused; one without a checkpoint, too, unless it takes back nothing."""
    manager = prefilled(STATES)
    draft(manager, [0], [2])
    assert manager.can_roll_back([0], [1]).tolist() == [False]
    manager.checkpoint([0])
    manager.take_copies()
    draft(manager, [0], [3])
    assert [bool(manager.can_roll_back([0], [n])[0]) for n in range(6)] == [True] * 4 + [False] * 2


def test_a_checkpoint_at_the_same_tokens_is_the_one_there_is() -> None:
    """Asking again copies nothing, and one of a row that has computed nothing does nothing."""
    manager = prefilled(STATES)
    manager.checkpoint([0])
    assert len(manager.take_copies()) == 1
    before = snapshot(manager)
    manager.checkpoint([0])
    assert snapshot(manager) == before
    row = manager.admit(5).admitted_row
    before = snapshot(manager)
    manager.checkpoint([row])
    assert snapshot(manager) == before


def test_a_checkpoint_without_room_is_refused() -> None:
    """No block for a second set of states raises, for all rows asked, and nothing changes."""
    manager = prefilled(STATES, 2)
    free = next(n for n in range(1000) if not manager.pool.fits(np.array([n + 1, 0])))
    hog = manager._store.lender.take(np.array([free - 1, 0]))
    before = snapshot(manager)
    with pytest.raises(OutOfBlocks):
        manager.checkpoint([0, 1])
    assert snapshot(manager) == before
    manager.checkpoint([1])
    manager.pool.release(hog)
    manager.check()


@pytest.mark.parametrize("verb", ["finish", "preempt", "move_row", "reorder", "fork"])
def test_checkpoints_follow_their_row_or_go(verb: str) -> None:
    """A checkpoint moves with its row, and goes when the row gives up what it had; a child has none."""
    manager = prefilled(STATES, 2)
    manager.checkpoint([0])
    manager.take_copies()
    held = int(manager.pool.num_held[0])
    if verb == "move_row":
        manager.move_row(0, 3)
        draft(manager, [3], [2])
        assert manager.roll_back([3], [1]).tolist() == [11]
    elif verb == "fork":
        (child,) = manager.fork(0, 1)
        draft(manager, [0, child], [2, 2])
        assert manager.can_roll_back([0, child], [1, 1]).tolist() == [True, False]
    elif verb == "reorder":
        manager.reorder([0, 1], [1, 0])
        draft(manager, [0, 1], [2, 2])
        assert manager.can_roll_back([0, 1], [1, 1]).tolist() == [False, False]
        assert manager.pool.num_held[0] == held - 1
    else:
        getattr(manager, verb)(0)
        assert manager.pool.num_held[0] == held - 2
    manager.check()
