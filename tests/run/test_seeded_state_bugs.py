"""The classic bugs of recurrent states, put in on purpose: each makes a claim of the other files fail."""

from dataclasses import replace

import numpy as np
import pytest

from hybridkv import HybridKVError
from hybridkv.runner import caches, recurrence
from hybridkv.runner.tiny import tiny_model
from hybridkv.table_arrays import TableArrays
from hybridkv_kernels import _chunked_rows, _state_rows
from hybridkv_kernels.constants import PAD_SLOT_ID
from tests.run.live_engines import generate, make_engine, make_prompts
from tests.run.test_hybrid_states import (
    test_a_row_and_blocks_that_another_left_are_like_new as rows_are_like_new,
)
from tests.run.test_hybrid_states import test_a_sequence_may_move_to_another_row as sequences_may_move
from tests.run.test_hybrid_states import test_padded_rows_touch_nothing as padding_touches_nothing

FAMILY = "bamba"


def chunks_change_nothing(family: str) -> None:
    """Prompts computed in chunks of 5 tokens give what prompts in one piece give."""
    model, prompts = tiny_model(family), make_prompts((3, 30, 17, 45))
    whole, chunked = (make_engine(family, model, max_num_batched_tokens=budget) for budget in (128, 5))
    assert generate(chunked, prompts) == generate(whole, prompts)


def keep_the_source_row(patch: pytest.MonkeyPatch) -> None:
    """The source row is not cleared on a move."""

    def move(self, sources, targets, right=TableArrays.move_rows):
        pairs = np.concatenate([self.pairs(group, sources) for group in range(self.num_groups)])
        first, count = self._first[pairs].copy(), self._count[pairs].copy()
        ids = self.live_ids(pairs)
        right(self, sources, targets)
        self.set_rows(pairs, first.astype("int64"), (count - first).astype("int64"), ids)

    patch.setattr(TableArrays, "move_rows", move)


def clamp_to_slot_0(patch: pytest.MonkeyPatch) -> None:
    """-1 becomes slot 0, and slot 0 is a slot like any other."""
    right = caches._state_batch

    def rows_by_length(batch):
        is_step = batch.query_start_loc.diff() == 1
        return is_step.nonzero().squeeze(1), (~is_step).nonzero().squeeze(1)

    for module in (_state_rows, _chunked_rows):
        patch.setattr(module, "rows_by_length", rows_by_length)
    patch.setattr(caches, "_state_batch", lambda *args: _with_slots(right(*args), lambda slots: slots.clamp(min=0)))


def put_padding_on_a_live_state(patch: pytest.MonkeyPatch) -> None:
    """A dummy row has the state of the first row."""
    right = caches._state_batch

    def first_for_padding(slots):
        return slots.where(slots != PAD_SLOT_ID, slots[0])

    patch.setattr(caches, "_state_batch", lambda *args: _with_slots(right(*args), first_for_padding))


def keep_the_last_owners_state(patch: pytest.MonkeyPatch) -> None:
    """A state is not zeroed for a new request."""
    right = caches._state_batch

    def without_zero_start(*args):
        batch = right(*args)
        return replace(batch, zero_start=batch.zero_start & False)

    patch.setattr(caches, "_state_batch", without_zero_start)


def take_the_state_for_k_columns(patch: pytest.MonkeyPatch) -> None:
    """A convolution's state of K-1 columns is written as the last of K: one token too old."""

    def convolve(*args, state, batch, right=recurrence.causal_conv1d_torch, **kwargs):
        result = right(*args, state=state, batch=batch, **kwargs)
        written = batch.write_slots[batch.write_slots > 0]
        state[written] = state[written].roll(1, dims=-1)
        return result

    patch.setattr(recurrence, "causal_conv1d_torch", convolve)


def _with_slots(batch, change):
    slots = change(batch.write_slots)
    return replace(batch, read_slots=slots, write_slots=slots)


BUGS = [
    (keep_the_source_row, sequences_may_move),
    (clamp_to_slot_0, padding_touches_nothing),
    (put_padding_on_a_live_state, padding_touches_nothing),
    (keep_the_last_owners_state, rows_are_like_new),
    (take_the_state_for_k_columns, chunks_change_nothing),
]


@pytest.mark.parametrize(("bug", "claim"), BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_a_seeded_bug_fails_a_claim(bug, claim, monkeypatch):
    """A claim that holds fails with the bug."""
    claim(FAMILY)
    bug(monkeypatch)
    with pytest.raises((AssertionError, ValueError, HybridKVError)):
        claim(FAMILY)
