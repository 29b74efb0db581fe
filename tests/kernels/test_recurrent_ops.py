"""Claims that hold for every recurrent op with an element-wise state: which rows, slots, tokens it touches."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch

from hybridkv_kernels._state_rows import live_rows, load_states
from hybridkv_kernels.causal_conv1d import causal_conv1d, causal_conv1d_reference, causal_conv1d_torch
from hybridkv_kernels.rg_lru import rg_lru, rg_lru_reference, rg_lru_torch
from hybridkv_kernels.selective_scan import (
    ScanInputs,
    SelectiveScanParams,
    selective_scan,
    selective_scan_reference,
    selective_scan_torch,
)
from tests.state_rows import (
    MIXED_ROWS,
    UNTOUCHED,
    Row,
    StateOp,
    Tokens,
    make_batch,
    make_state,
    num_tokens,
    poison_idle_tokens,
    whole_arena,
)

# float32 sums of a few terms of size 1, in another order than the float64 reference.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
C, K, H, P, N = 3, 4, 2, 3, 2


def randn(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def conv_op(columns: int) -> StateOp:
    def call(function, tokens, state, batch, out):
        weight, bias = (randn(C, K, seed=1, device=out.device), randn(C, seed=2, device=out.device))
        function(tokens["x"], weight, bias, activation="silu", state=state, batch=batch, out=out)

    def make_tokens(count: int, device: torch.device) -> Tokens:
        return {"x": randn(count, C + 2, seed=3, device=device)[:, 1 : C + 1]}

    paths = [partial(call, f) for f in (causal_conv1d_reference, causal_conv1d_torch, causal_conv1d)]
    return StateOp(f"conv {columns} columns", (C, columns), "x", make_tokens, *paths)


def lru_op() -> StateOp:
    def call(function, tokens, state, batch, out):
        function(tokens["a"], tokens["x"], state=state, batch=batch, out=out)

    def make_tokens(count: int, device: torch.device) -> Tokens:
        decay = randn(count, C + 1, seed=4, device=device).sigmoid()[:, 1:]
        return {"a": decay, "x": randn(count, C + 3, seed=5, device=device)[:, :C]}

    paths = [partial(call, f) for f in (rg_lru_reference, rg_lru_torch, rg_lru)]
    return StateOp("rg_lru", (C,), "x", make_tokens, *paths)


def scan_op() -> StateOp:
    def call(function, tokens, state, batch, out):
        weights = [randn(*shape, seed=6, device=out.device) for shape in ((H, P, N), (H, P), (H, P))]
        function(
            ScanInputs(**tokens),
            SelectiveScanParams(-weights[0].abs(), *weights[1:]),
            state=state,
            batch=batch,
            out=out,
        )

    def make_tokens(count: int, device: torch.device) -> Tokens:
        sizes = {"x": P, "dt": P, "B": N, "C": N, "z": P}
        # Each a slice of a wider projection, as in a model.
        return {
            name: randn(count, H, size + 1, seed=7 + idx, device=device)[:, :, 1:]
            for idx, (name, size) in enumerate(sizes.items())
        }

    paths = [partial(call, f) for f in (selective_scan_reference, selective_scan_torch, selective_scan)]
    return StateOp("selective_scan", (H, P, N), "x", make_tokens, *paths)


OPS = [conv_op(K - 1), conv_op(K), lru_op(), scan_op()]
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
every_path = pytest.mark.parametrize("path", ["reference", "torch", "triton"])
fast_path = pytest.mark.parametrize("path", ["torch", "triton"])


@every_op
@fast_path
def test_paths_equal_reference_on_a_mixed_batch(op: StateOp, path: str, device: torch.device) -> None:
    """Outputs, states, gaps between states equal the reference's for empty, short, long, skipped, forking rows."""
    tokens = op.make_tokens(num_tokens(MIXED_ROWS) + 2, device)
    poison_idle_tokens(tokens, MIXED_ROWS)
    expected_state, state = (make_state(op.state_shape, MIXED_ROWS, device) for _ in range(2))
    batch = make_batch(MIXED_ROWS, device)
    expected = op.run("reference", tokens, expected_state, batch)
    out = op.run(path, tokens, state, batch)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(whole_arena(state), whole_arena(expected_state), **CLOSE, equal_nan=True)


@every_op
@every_path
def test_poison_stays_where_it_is(op: StateOp, path: str, device: torch.device) -> None:
    """NaN in skipped rows, padding, other slots reaches no live output, no written state."""
    tokens = op.make_tokens(num_tokens(MIXED_ROWS) + 2, device)
    poison_idle_tokens(tokens, MIXED_ROWS)
    state = make_state(op.state_shape, MIXED_ROWS, device)
    out = op.run(path, tokens, state, make_batch(MIXED_ROWS, device))
    assert out.isfinite().all()
    assert all(state[row.write].isfinite().all() for row in MIXED_ROWS if row.write != -1)


@every_op
@every_path
def test_only_live_rows_are_written(op: StateOp, path: str, device: torch.device) -> None:
    """Outputs of skipped rows, of padding keep what they held; so does every slot no row writes, slot 0 included."""
    rows = (Row(2, 3, -1), Row(2, 4, 5), Row(1, 6, -1), Row(2, 7, 0), Row(1, 8, 0), Row(0, 9, 0))
    tokens = op.make_tokens(num_tokens(rows) + 3, device)
    state = make_state(op.state_shape, rows, device)
    before = whole_arena(state).clone()
    out = op.run(path, tokens, state, make_batch(rows, device))
    assert (out[:2] == UNTOUCHED).all()
    assert (out[2:4] != UNTOUCHED).all()
    assert (out[4:] == UNTOUCHED).all()
    assert state[5].isfinite().all()
    state[5] = torch.nan
    assert torch.equal(whole_arena(state).nan_to_num(), before.nan_to_num())


@every_op
@fast_path
@pytest.mark.parametrize("boundaries", [[1], [4], [8], [1, 2, 9], [2, 2]], ids=str)
def test_sequence_may_be_cut_anywhere(op: StateOp, path: str, boundaries: list[int], device: torch.device) -> None:
    """Chunks that hand on their state, each to another slot, give the outputs, the state of one long row."""
    length = 10
    tokens = op.make_tokens(length, device)
    start = [Row(length, 1, 2)]
    expected_state = make_state(op.state_shape, start, device)
    expected = op.run("reference", tokens, expected_state, make_batch(start, device))
    state, outputs = make_state(op.state_shape, start, device), []
    edges = [0, *boundaries, length]
    for slot, (begin, end) in enumerate(pairwise(edges), start=1):
        chunk = {name: tensor[begin:end] for name, tensor in tokens.items()}
        outputs.append(op.run(path, chunk, state, make_batch([Row(end - begin, slot, slot + 1)], device)))
    torch.testing.assert_close(torch.cat(outputs), expected, **CLOSE)
    torch.testing.assert_close(state[len(edges)], expected_state[2], **CLOSE)


@every_op
@every_path
@pytest.mark.parametrize("ignored_slot", [-1, 1, 10**6])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_zero_start_ignores_what_slots_hold(
    op: StateOp, path: str, length: int, ignored_slot: int, device: torch.device
) -> None:
    """A zero start equals a start from a slot of zeros, though its read slot holds NaN or is out of range."""
    tokens = op.make_tokens(length, device)
    results = []
    for row in (Row(length, None, 2), Row(length, 1, 2)):
        state = make_state(op.state_shape, [], device)
        if row.read is not None:
            state[row.read] = 0.0
        outputs = op.run(path, tokens, state, make_batch([row], device, ignored_slot))
        results.append((outputs, state[2]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][1].isfinite().all()


@every_op
@every_path
@pytest.mark.parametrize("length", [1, 4])
def test_write_slot_may_be_another_one(op: StateOp, path: str, length: int, device: torch.device) -> None:
    """Reading one slot, writing another gives the outcome of working in place, leaving the slot that is read alone."""
    tokens = op.make_tokens(length, device)
    state = make_state(op.state_shape, [Row(length, 1, 1)], device)
    state[3] = state[1]
    start = state[1].clone()
    outputs = [op.run(path, tokens, state, make_batch([row], device)) for row in (Row(length, 1, 2), Row(length, 3, 3))]
    assert torch.equal(state[1], start)
    assert torch.equal(state[2], state[3])
    assert not torch.equal(state[2], start)
    assert torch.equal(*outputs)


@every_op
@every_path
@pytest.mark.parametrize("length", [1, 4])
def test_inputs_stay_as_they_are(op: StateOp, path: str, length: int, device: torch.device) -> None:
    """No op works in the memory of its inputs."""
    tokens, rows = op.make_tokens(length, device), [Row(length, 1, 2)]
    before = {name: tensor.clone() for name, tensor in tokens.items()}
    op.run(path, tokens, make_state(op.state_shape, rows, device), make_batch(rows, device))
    assert all(torch.equal(tensor, before[name]) for name, tensor in tokens.items())


@every_op
@every_path
def test_empty_row_copies_its_state(op: StateOp, path: str, device: torch.device) -> None:
    """A row without tokens writes the state it starts from bit for bit, also as the only row."""
    state = make_state(op.state_shape, [Row(0, 1, 2)], device)
    op.run(path, op.make_tokens(0, device), state, make_batch([Row(0, 1, 2)], device))
    assert torch.equal(state[1], state[2])


@every_op
@every_path
def test_batch_without_rows_changes_nothing(op: StateOp, path: str, device: torch.device) -> None:
    """Tokens that belong to no row are padding, however many there are."""
    state = make_state(op.state_shape, [], device)
    state.fill_(UNTOUCHED)
    out = op.run(path, op.make_tokens(3, device), state, make_batch([], device))
    assert (out == UNTOUCHED).all()
    assert (state == UNTOUCHED).all()


@pytest.mark.parametrize("op", OPS[1:], ids=lambda op: op.name)
def test_tokens_beyond_32_bit_offsets_are_read(op: StateOp, device: torch.device, checked_int32: None) -> None:
    """Tokens whose offset passes 2**31 elements are read, written where they are, not where 32 bits would wrap."""
    stride, length = 2**28 + 8, 9
    # Only the pages that are touched become resident.
    arena = torch.empty(length * stride, dtype=torch.float16, device=device)
    packed = {name: tensor.half() for name, tensor in op.make_tokens(length, device).items()}
    spread, used = {}, 0
    for name, tensor in (*packed.items(), ("out", packed["x"])):
        inner = tensor[0].numel()
        view = arena.as_strided((length, inner), (stride, 1), used).unflatten(1, tensor.shape[1:])
        spread[name], used = view.copy_(tensor), used + inner
    out, rows = spread.pop("out"), [Row(length, 1, 2)]
    expected_state, state = (make_state(op.state_shape, rows, device) for _ in range(2))
    expected = op.run("reference", packed, expected_state, make_batch(rows, device))
    op.launcher(spread, state, make_batch(rows, device), out)
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(state[2], expected_state[2], **CLOSE)


def test_start_state_is_a_copy(device: torch.device) -> None:
    """An op may work in the state that it got for a row; the slot stays as it is, also in a batch of rows."""
    rows = [Row(1, 1, 2), Row(1, None, 3)]
    state, batch = make_state((C,), rows, device), make_batch(rows, device)
    start = state[1].clone()
    for row in live_rows(batch):
        row.start_state(state).fill_(UNTOUCHED)
    load_states(state, batch, torch.arange(2, device=device)).fill_(UNTOUCHED)
    assert torch.equal(state[1], start)
    assert [row.start_state(state).isfinite().all() for row in live_rows(batch)] == [True, True]
