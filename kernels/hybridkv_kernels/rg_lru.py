"""Gated linear recurrence of RG-LRU layers over the rows of a batch, each from a state of its own.

Contract
    h[t] = a[t] * h[t-1] + x[t]    element by element; out[t] = h[t], the state holds the last one
    Gates, norm and resets are the caller's: `x` comes gated as well as scaled, `a` is 0 where the state is reset.

Shapes
    a      [T, W]               any float dtype, last dimension contiguous
    x      [T, W]               float32, bfloat16 or float16, last dimension contiguous; `out` likewise
    state  [num_slots, W]       float32, last dimension contiguous, any first stride

Invariants
    I1  S1..S5 of `state_batch`
    I2  0 <= a <= 1, so that products of decays do not overflow

All arithmetic is float32. Grid: (cdiv(W, BLOCK_W), R); a program scans its row in tiles of BLOCK_T tokens.
"""

from __future__ import annotations

import torch

from hybridkv_kernels._checks import expect, expect_dtype, expect_last_dim_contiguous, expect_one_device, expect_tensor
from hybridkv_kernels._linear_recurrence import combine_steps, run_recurrence
from hybridkv_kernels._state_rows import live_rows, load_read_slot, load_states, split_rows, store_states
from hybridkv_kernels._triton import Launch, jit, next_power_of_2, tl
from hybridkv_kernels.constants import NULL_BLOCK_ID
from hybridkv_kernels.state_batch import INPUT_DTYPES, StateBatch, check_state_batch

__all__ = ["STATE_DTYPES", "check_rg_lru", "prepare_rg_lru", "rg_lru", "rg_lru_reference", "rg_lru_torch"]

STATE_DTYPES = (torch.float32,)
_MAX_TILE_TOKENS = 32
_MAX_TILE_WIDTH = 64


def _check_shapes(
    a: torch.Tensor, x: torch.Tensor, *, state: torch.Tensor, batch: StateBatch, out: torch.Tensor
) -> None:
    expect_tensor("x", x, None, (None, None))
    expect_dtype("x", x, INPUT_DTYPES)
    expect_tensor("a", a, None, x.shape)
    expect_tensor("out", out, x.dtype, x.shape)
    expect_tensor("state", state, None, (None, x.shape[1]))
    expect_dtype("state", state, STATE_DTYPES)
    for name, tensor in (("a", a), ("x", x), ("out", out), ("state", state)):
        expect_last_dim_contiguous(name, tensor)
    expect_one_device((("x", x), ("a", a), ("out", out), ("state", state), ("write_slots", batch.write_slots)))


def check_rg_lru(
    a: torch.Tensor, x: torch.Tensor, *, state: torch.Tensor, batch: StateBatch, out: torch.Tensor
) -> None:
    """Check shapes plus the invariants I1, I2; syncs, for tests and debugging.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(a, x, state=state, batch=batch, out=out)
    check_state_batch(batch, state.shape[0], x.shape[0])
    for row in live_rows(batch):
        decays = a[row.begin : row.end]
        inside = bool(((decays >= 0) & (decays <= 1)).all())
        expect(inside, f"a[{row.begin}:{row.end}]", "decays in [0, 1]", "a value outside, or NaN")


def rg_lru_reference(
    a: torch.Tensor, x: torch.Tensor, *, state: torch.Tensor, batch: StateBatch, out: torch.Tensor
) -> None:
    """Loop over rows, their tokens in float64.

    Shapes, dtypes: as in the module's contract.
    """
    for row in live_rows(batch):
        hidden = row.start_state(state).double()
        for token in range(row.begin, row.end):
            hidden = a[token].double() * hidden + x[token].double()
            out[token] = hidden.to(out.dtype)
        state[row.write_slot] = hidden.to(state.dtype)


def rg_lru_torch(
    a: torch.Tensor, x: torch.Tensor, *, state: torch.Tensor, batch: StateBatch, out: torch.Tensor
) -> None:
    """Scan with torch operations: rows of one token in one batch, longer rows one by one; syncs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device.
    """
    _check_shapes(a, x, state=state, batch=batch, out=out)
    rows = split_rows(batch)
    if rows.steps.numel():
        hidden = load_states(state, batch, rows.steps)
        decays, gains = (source.index_select(0, rows.step_tokens) for source in (a, x))
        hidden.mul_(decays).add_(gains)
        out.index_copy_(0, rows.step_tokens, hidden.to(out.dtype))
        store_states(state, batch, rows.steps, hidden)
    for row in rows.scans:
        hidden = x[row.begin : row.end].to(torch.float32, copy=True)
        decays = a[row.begin : row.end].float()
        state[row.write_slot] = run_recurrence(decays, hidden, row.start_state(state))
        out[row.begin : row.end] = hidden


@jit
def _rg_lru_kernel(
    a_ptr: tl.tensor,  # [T, W]
    x_ptr: tl.tensor,  # [T, W]
    state_ptr: tl.tensor,  # [num_slots, W] float32
    query_start_ptr: tl.tensor,  # [R + 1] int32
    read_slots_ptr: tl.tensor,  # [R] int64
    write_slots_ptr: tl.tensor,  # [R] int64
    zero_start_ptr: tl.tensor,  # [R] bool
    out_ptr: tl.tensor,  # [T, W]
    width: tl.tensor,
    stride_a: tl.tensor,
    stride_x: tl.tensor,
    stride_out: tl.tensor,
    stride_slot: tl.tensor,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    NULL_BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(1)
    write_slot = tl.load(write_slots_ptr + row)
    if write_slot <= NULL_BLOCK:
        return
    read_slot = load_read_slot(read_slots_ptr, zero_start_ptr, row, NULL_BLOCK)
    begin = tl.load(query_start_ptr + row)
    end = tl.load(query_start_ptr + row + 1)
    channel = tl.program_id(0).to(tl.int64) * BLOCK_W + tl.arange(0, BLOCK_W)
    in_state = channel < tl.where(read_slot > NULL_BLOCK, width, 0)
    hidden = tl.load(state_ptr + read_slot * stride_slot + channel, mask=in_state, other=0.0)
    is_last = tl.arange(0, BLOCK_T) == BLOCK_T - 1
    for first in range(begin, end, BLOCK_T):
        token = (first + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        mask = (token < end) & (channel < width)[None, :]
        # Past the row's end a step that changes nothing, so the tile's last step has the row's state.
        decay = tl.load(a_ptr + token * stride_a + channel[None, :], mask=mask, other=1.0).to(tl.float32)
        gain = tl.load(x_ptr + token * stride_x + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        if BLOCK_T > 1:
            decay, gain = tl.associative_scan((decay, gain), 0, combine_steps)
        states = decay * hidden[None, :] + gain
        tl.store(out_ptr + token * stride_out + channel[None, :], states.to(out_ptr.dtype.element_ty), mask=mask)
        hidden = tl.sum(tl.where(is_last[:, None], states, 0.0), 0)
    # Every thread has read the start state by now, also where both slots are one.
    tl.debug_barrier()
    tl.store(state_ptr + write_slot * stride_slot + channel, hidden, mask=channel < width)


def prepare_rg_lru(
    a: torch.Tensor, x: torch.Tensor, *, state: torch.Tensor, batch: StateBatch, out: torch.Tensor
) -> Launch:
    """Check shapes, dtypes, strides without a sync, then return the launch that `rg_lru` runs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(a, x, state=state, batch=batch, out=out)
    width = x.shape[1]
    block_w = min(_MAX_TILE_WIDTH, next_power_of_2(max(width, 1)))
    return Launch(
        name="rg_lru",
        kernel=_rg_lru_kernel,
        grid=(-(-width // block_w), batch.num_rows, 1),
        args=(
            *(a, x, state, batch.query_start_loc, batch.read_slots, batch.write_slots, batch.zero_start, out),
            *(width, a.stride(0), x.stride(0), out.stride(0), state.stride(0)),
        ),
        options={
            "BLOCK_T": min(_MAX_TILE_TOKENS, next_power_of_2(max(batch.max_query_len, 1))),
            **{"BLOCK_W": block_w, "NULL_BLOCK": NULL_BLOCK_ID, "num_warps": 4},
        },
    )


def rg_lru(a: torch.Tensor, x: torch.Tensor, *, state: torch.Tensor, batch: StateBatch, out: torch.Tensor) -> None:
    """Advance all rows with one kernel launch; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device; ImportError without triton.
    """
    prepare_rg_lru(a, x, state=state, batch=batch, out=out).run()
