"""Claims that hold for every recurrent op with a matrix state: which rows, slots, tokens it touches."""

from __future__ import annotations

import pytest
import torch

from tests.matrix_state_ops import MATRIX_STATE_OPS, compare
from tests.state_rows import MIXED_ROWS, UNTOUCHED, Row, StateOp, make_batch, make_state

# float32 sums of a few terms of size 1, in another order than the float64 reference.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
every_op = pytest.mark.parametrize("op", MATRIX_STATE_OPS, ids=lambda op: op.name)
every_path = pytest.mark.parametrize("path", ["reference", "torch", "triton"])
fast_path = pytest.mark.parametrize("path", ["torch", "triton"])


@every_op
@fast_path
def test_mixed_batch_writes_what_the_reference_writes(op: StateOp, path: str, device: torch.device) -> None:
    """Empty, short, long, skipped, forking rows with NaN in all they must not read: equal outputs, states, gaps."""
    compare(op, path, MIXED_ROWS, device)


@every_op
@every_path
def test_only_live_rows_are_written(op: StateOp, path: str, device: torch.device) -> None:
    """Outputs of skipped rows, of padding keep what they held; so does every slot no row writes, slot 0 included."""
    rows = (Row(2, 3, -1), Row(1, 4, 5), Row(1, 6, -1), Row(2, 7, 0), Row(0, 9, 0))
    state = make_state(op.state_shape, rows, device)
    before = state.clone()
    out = op.run(path, op.make_tokens(9, device), state, make_batch(rows, device))
    assert (out[2] != UNTOUCHED).all()
    assert (out[[0, 1, 3, 4, 5, 6, 7, 8]] == UNTOUCHED).all()
    assert state[5].isfinite().all()
    state[5] = before[5]
    assert torch.equal(state.nan_to_num(), before.nan_to_num())


@every_op
@fast_path
@pytest.mark.parametrize("boundary", [1, 4, 9])
def test_sequence_may_be_cut_anywhere(op: StateOp, path: str, boundary: int, device: torch.device) -> None:
    """Two parts, of which the first hands its state on in another slot, give the outputs, the state of one row."""
    length = 10
    tokens, rows = op.make_tokens(length, device), [Row(length, 1, 4)]
    state = make_state(op.state_shape, rows, device)
    expected = op.run("reference", tokens, state, make_batch(rows, device))
    outputs = []
    for part, row in ((slice(boundary), Row(boundary, 1, 2)), (slice(boundary, None), Row(length - boundary, 2, 3))):
        given = {name: tensor[part] for name, tensor in tokens.items()}
        outputs.append(op.run(path, given, state, make_batch([row], device)))
    torch.testing.assert_close(torch.cat(outputs), expected, **CLOSE)
    torch.testing.assert_close(state[3], state[4], **CLOSE)


@every_op
@every_path
@pytest.mark.parametrize("length", [1, 4])
def test_read_slot_inputs_stay_as_they_are(op: StateOp, path: str, length: int, device: torch.device) -> None:
    """Reading one slot, writing another equals working in place; inputs with the slot that is read keep their bytes."""
    tokens = op.make_tokens(length, device)
    inputs = {name: tensor.clone() for name, tensor in tokens.items()}
    state = make_state(op.state_shape, [Row(length, 1, 1)], device)
    start = state[3] = state[1].clone()
    outputs = [op.run(path, tokens, state, make_batch([row], device)) for row in (Row(length, 1, 2), Row(length, 3, 3))]
    assert torch.equal(*outputs)
    assert torch.equal(state[2], state[3])
    assert torch.equal(state[1], start)
    assert all(torch.equal(tensor, inputs[name]) for name, tensor in tokens.items())


@every_op
@every_path
def test_row_without_tokens_copies_its_state(op: StateOp, path: str, device: torch.device) -> None:
    """As the only row it writes the state it starts from bit for bit; without any row nothing is written."""
    state = make_state(op.state_shape, [Row(0, 1, 2)], device)
    start = state[1].clone()
    op.run(path, op.make_tokens(0, device), state, make_batch([Row(0, 1, 2)], device))
    assert torch.equal(state[2], start)
    out = op.run(path, op.make_tokens(3, device), state.fill_(UNTOUCHED), make_batch([], device))
    assert (out == UNTOUCHED).all()
    assert (state == UNTOUCHED).all()


@every_op
def test_tokens_beyond_32_bit_offsets_are_read(op: StateOp, device: torch.device, checked_int32: None) -> None:
    """Tokens, states whose offset passes 2**31 elements are found where they are, not where 32 bits would wrap."""
    stride, rows = 2**28 + 8, [Row(9, 9, 10)]
    # Only the pages that are touched become resident.
    arena = torch.empty(11 * stride, dtype=torch.float16, device=device)
    state_arena = torch.empty(11 * stride, dtype=torch.bfloat16, device=device)
    packed = {name: tensor.half() for name, tensor in op.make_tokens(9, device).items()}
    spread, used = {}, 0
    for name, tensor in (*packed.items(), ("out", packed[op.out_of])):
        view = arena.as_strided((9, tensor[0].numel()), (stride, 1), used).unflatten(1, tensor.shape[1:])
        spread[name], used = view.copy_(tensor), used + tensor[0].numel()
    out = spread.pop("out")
    expected_state = make_state(op.state_shape, rows, device, torch.bfloat16)
    size = expected_state[0].numel()
    state = state_arena.as_strided((11, size), (stride, 1)).unflatten(1, op.state_shape)
    state[9] = expected_state[9]
    expected = op.run("reference", packed, expected_state, make_batch(rows, device))
    op.launcher(spread, state, make_batch(rows, device), out)
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=1e-3)
    # The interpreter truncates float32 to bfloat16 where the reference rounds.
    torch.testing.assert_close(state[10], expected_state[10], rtol=2**-7, atol=1e-4)
