"""Selective scan of Mamba-1 over the rows of a batch, each from a state of its own.

Contract, channel by channel (h has N elements a channel)
    d = softplus(dt + dt_bias)               without the softplus or the bias where not asked for
    h[t] = exp(d A) h[t-1] + d x[t] B[t]
    y[t] = h[t] . C[t] + D x[t], times silu(z[t]) with a gate

Shapes
    x      [T, H, P]                 float32, bfloat16 or float16; P channels in each of H heads that have their own
                                     B with C: plain Mamba is one head; `out` likewise
    dt, z  [T, H, P]                 any float dtype; dt raw, as projected; z or None
    B, C   [T, H, N]                 any float dtype
    state  [num_slots, H, P, N]      float32 or bfloat16, inner dimensions contiguous, any first stride
    The last dimension of each is contiguous; other strides of x, dt, z, B, C, out are free.

Invariants
    I1  S1..S5 of `state_batch`
    I2  A <= 0 and d >= 0, so that exp(d A) is a decay

All arithmetic is float32. Grid: (cdiv(P, BLOCK_P), H, R); a program scans its row in tiles of BLOCK_T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hybridkv_kernels._checks import expect, expect_dtype, expect_last_dim_contiguous, expect_one_device, expect_tensor
from hybridkv_kernels._chunked_rows import expect_matrix_state
from hybridkv_kernels._linear_recurrence import combine_steps, run_recurrence
from hybridkv_kernels._state_rows import live_rows, load_read_slot, load_states, split_rows, store_states
from hybridkv_kernels._triton import Launch, jit, next_power_of_2, tl
from hybridkv_kernels.constants import NULL_BLOCK_ID
from hybridkv_kernels.state_batch import INPUT_DTYPES, StateBatch, check_state_batch

__all__ = [
    "ScanInputs",
    "SelectiveScanParams",
    "check_selective_scan",
    "prepare_selective_scan",
    "selective_scan",
    "selective_scan_reference",
    "selective_scan_torch",
]

# Float32 state elements of one step of the torch path: few enough to stay in a core's cache.
_BLOCK_ELEMENTS = 2**18
_MAX_TILE_TOKENS = 16
# Chosen so that no variant listed in benchmarks/compile_kernels.py spills a register on any of its targets.
_STEP_TILE_ELEMENTS, _SCAN_TILE_ELEMENTS = 2048, 4096


@dataclass(frozen=True)
class SelectiveScanParams:
    """Weights and switches of one layer.

    Shapes: A [H, P, N] (negative), D [H, P] or None, dt_bias [H, P] or None; any float dtype, contiguous.
    """

    A: torch.Tensor
    D: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    dt_softplus: bool = True


@dataclass(frozen=True)
class ScanInputs:
    """What each token brings; shapes, dtypes as in the module's contract."""

    x: torch.Tensor
    dt: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    z: torch.Tensor | None = None

    def take(self, tokens: torch.Tensor | slice) -> ScanInputs:
        """Return those of some tokens in float32."""
        x, dt, B, C = (source[tokens].float() for source in (self.x, self.dt, self.B, self.C))
        return ScanInputs(x, dt, B, C, None if self.z is None else self.z[tokens].float())


def _step_sizes(dt: torch.Tensor, params: SelectiveScanParams) -> torch.Tensor:
    """Return d of the contract in the dtype of `dt`."""
    steps = dt if params.dt_bias is None else dt + params.dt_bias.to(dt.dtype)
    return F.softplus(steps) if params.dt_softplus else steps


def _check_shapes(
    inputs: ScanInputs, params: SelectiveScanParams, *, state: torch.Tensor, batch: StateBatch, out: torch.Tensor
) -> None:
    x = inputs.x
    expect_tensor("x", x, None, (None, None, None))
    expect_dtype("x", x, INPUT_DTYPES)
    num_tokens, num_heads, head_dim = x.shape
    expect_tensor("B", inputs.B, None, (num_tokens, num_heads, None))
    state_size = inputs.B.shape[2]
    named = [("x", x), ("dt", inputs.dt), ("B", inputs.B), ("C", inputs.C), ("out", out)]
    expect_tensor("dt", inputs.dt, None, x.shape)
    expect_tensor("C", inputs.C, None, inputs.B.shape)
    expect_tensor("out", out, x.dtype, x.shape)
    if inputs.z is not None:
        expect_tensor("z", inputs.z, None, x.shape)
        named.append(("z", inputs.z))
    for name, tensor in named:
        expect_last_dim_contiguous(name, tensor)
    expect_matrix_state(state, (num_heads, head_dim, state_size))
    named += _check_weights(params, (num_heads, head_dim, state_size))
    expect_one_device([*named, ("state", state), ("write_slots", batch.write_slots)])


def _check_weights(params: SelectiveScanParams, shape: tuple[int, int, int]) -> list[tuple[str, torch.Tensor]]:
    """Check the weights of a layer with `[H, P, N]` = `shape`, then return those there are."""
    named = []
    for name, weight in (("A", params.A), ("D", params.D), ("dt_bias", params.dt_bias)):
        if weight is not None:
            expect_tensor(name, weight, None, shape if name == "A" else shape[:2])
            expect(weight.is_contiguous(), f"{name}.stride()", "contiguous", weight.stride())
            named.append((name, weight))
    return named


def check_selective_scan(
    inputs: ScanInputs, params: SelectiveScanParams, *, state: torch.Tensor, batch: StateBatch, out: torch.Tensor
) -> None:
    """Check shapes plus the invariants I1, I2; syncs, for tests and debugging.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(inputs, params, state=state, batch=batch, out=out)
    check_state_batch(batch, state.shape[0], inputs.x.shape[0])
    expect(bool((params.A <= 0).all()), "A", "<= 0 everywhere (exp(d A) is a decay)", float(params.A.max()))
    for row in live_rows(batch):
        steps = _step_sizes(inputs.dt[row.begin : row.end].float(), params)
        expect(bool((steps >= 0).all()), f"dt[{row.begin}:{row.end}]", "steps >= 0; use dt_softplus", "a negative step")


def selective_scan_reference(
    inputs: ScanInputs, params: SelectiveScanParams, *, state: torch.Tensor, batch: StateBatch, out: torch.Tensor
) -> None:
    """Loop over rows, their tokens in float64.

    Shapes, dtypes: as in the module's contract.
    """
    for row in live_rows(batch):
        hidden = row.start_state(state).double()  # [H, P, N]
        for token in range(row.begin, row.end):
            x = inputs.x[token].double()  # [H, P]
            step = _step_sizes(inputs.dt[token].double(), params)
            decay = torch.exp(step[:, :, None] * params.A.double())
            hidden = decay * hidden + (step * x)[:, :, None] * inputs.B[token].double()[:, None, :]
            y = (hidden * inputs.C[token].double()[:, None, :]).sum(-1)
            if params.D is not None:
                y += params.D.double() * x
            if inputs.z is not None:
                gate = inputs.z[token].double()
                y *= gate * torch.sigmoid(gate)
            out[token] = y.to(out.dtype)
        state[row.write_slot] = hidden.to(state.dtype)


def selective_scan_torch(
    inputs: ScanInputs, params: SelectiveScanParams, *, state: torch.Tensor, batch: StateBatch, out: torch.Tensor
) -> None:
    """Scan with torch operations: rows of one token in batches, longer rows one by one; syncs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device.
    """
    _check_shapes(inputs, params, state=state, batch=batch, out=out)
    rows = split_rows(batch)
    block = max(1, _BLOCK_ELEMENTS // max(params.A.numel(), 1))
    for first in range(0, rows.steps.numel(), block):
        steps, tokens = rows.steps[first : first + block], rows.step_tokens[first : first + block]
        taken = inputs.take(tokens)
        decay, gain = _decay_and_gain(taken, params)
        hidden = gain.addcmul_(decay, load_states(state, batch, steps).float())
        out[tokens] = _outputs(hidden, taken, params).to(out.dtype)
        store_states(state, batch, steps, hidden)
    for row in rows.scans:
        last = row.start_state(state).float()
        for first in range(row.begin, row.end, block):
            span = slice(first, min(first + block, row.end))
            taken = inputs.take(span)
            decay, gain = _decay_and_gain(taken, params)
            last = run_recurrence(decay, gain, last)
            out[span] = _outputs(gain, taken, params)
        state[row.write_slot] = last


def _decay_and_gain(inputs: ScanInputs, params: SelectiveScanParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exp(d A) with d x B, both `[L, H, P, N]` float32, for tokens `[L]` in float32."""
    steps = _step_sizes(inputs.dt, params)
    decay = (steps.unsqueeze(-1) * params.A.float()).exp_()
    return decay, (steps * inputs.x).unsqueeze(-1) * inputs.B.unsqueeze(-2)


def _outputs(hidden: torch.Tensor, inputs: ScanInputs, params: SelectiveScanParams) -> torch.Tensor:
    """Return the outputs `[L, H, P]` float32 of states `[L, H, P, N]`."""
    y = (inputs.C.unsqueeze(-2) @ hidden.mT).squeeze(-2)
    if params.D is not None:
        y.addcmul_(inputs.x, params.D.float())
    return y if inputs.z is None else y.mul_(F.silu(inputs.z))


@jit
def _softplus(value: tl.tensor) -> tl.tensor:
    """Return log(1 + exp(value)) with a small relative error also where the result is small, as time steps are."""
    small = tl.exp(-tl.abs(value))
    total = 1.0 + small
    # log(total) alone loses the digits that the sum rounds away; the quotient restores them.
    log1p = tl.where(total == 1.0, small, tl.log(total) * small / tl.where(total == 1.0, 1.0, total - 1.0))
    return tl.maximum(value, 0.0) + log1p


@jit
def _selective_scan_kernel(
    x_ptr: tl.tensor,  # [T, H, P]
    dt_ptr: tl.tensor,  # [T, H, P]
    b_ptr: tl.tensor,  # [T, H, N]
    c_ptr: tl.tensor,  # [T, H, N]
    z_ptr: tl.tensor,  # [T, H, P] or None
    a_ptr: tl.tensor,  # [H, P, N]
    d_ptr: tl.tensor,  # [H, P] or None
    bias_ptr: tl.tensor,  # [H, P] or None
    state_ptr: tl.tensor,  # [num_slots, H, P, N]
    query_start_ptr: tl.tensor,  # [R + 1] int32
    read_slots_ptr: tl.tensor,  # [R] int64
    write_slots_ptr: tl.tensor,  # [R] int64
    zero_start_ptr: tl.tensor,  # [R] bool
    out_ptr: tl.tensor,  # [T, H, P]
    stride_x_token: tl.tensor,
    stride_x_head: tl.tensor,
    stride_dt_token: tl.tensor,
    stride_dt_head: tl.tensor,
    stride_b_token: tl.tensor,
    stride_b_head: tl.tensor,
    stride_c_token: tl.tensor,
    stride_c_head: tl.tensor,
    stride_z_token: tl.tensor,
    stride_z_head: tl.tensor,
    stride_out_token: tl.tensor,
    stride_out_head: tl.tensor,
    stride_slot: tl.tensor,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    NULL_BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(2)
    write_slot = tl.load(write_slots_ptr + row)
    if write_slot <= NULL_BLOCK:
        return
    read_slot = load_read_slot(read_slots_ptr, zero_start_ptr, row, NULL_BLOCK)
    begin = tl.load(query_start_ptr + row)
    end = tl.load(query_start_ptr + row + 1)
    head = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_channel = channel < P
    entry = tl.arange(0, BLOCK_N)
    is_entry = entry < N
    offsets = (head * P + channel)[:, None] * N + entry[None, :]
    in_state = channel < tl.where(read_slot > NULL_BLOCK, P, 0)
    state_in = state_ptr + read_slot * stride_slot + offsets
    hidden = tl.load(state_in, mask=in_state[:, None] & is_entry[None, :], other=0.0).to(tl.float32)
    is_weight = is_channel[:, None] & is_entry[None, :]
    weight = tl.load(a_ptr + offsets, mask=is_weight, other=0.0).to(tl.float32)
    x_ptr += head * stride_x_head + channel[None, :]
    dt_ptr += head * stride_dt_head + channel[None, :]
    b_ptr += head * stride_b_head + entry[None, :]
    c_ptr += head * stride_c_head + entry[None, :]
    out_ptr += head * stride_out_head + channel[None, :]
    is_last = tl.arange(0, BLOCK_T) == BLOCK_T - 1

    for first in range(begin, end, BLOCK_T):
        token = (first + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        mask = (token < end) & is_channel[None, :]
        entry_mask = (token < end) & is_entry[None, :]
        x = tl.load(x_ptr + token * stride_x_token, mask=mask, other=0.0).to(tl.float32)
        step = tl.load(dt_ptr + token * stride_dt_token, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            step += tl.load(bias_ptr + head * P + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        if SOFTPLUS:
            step = _softplus(step)
        # Past the row's end a step of size 0 changes nothing, so the tile's last step has the row's state.
        step = tl.where(mask, step, 0.0)
        key = tl.load(b_ptr + token * stride_b_token, mask=entry_mask, other=0.0).to(tl.float32)
        query = tl.load(c_ptr + token * stride_c_token, mask=entry_mask, other=0.0).to(tl.float32)
        decay = tl.exp(step[:, :, None] * weight[None, :, :])  # [BLOCK_T, BLOCK_P, BLOCK_N]
        gain = (step * x)[:, :, None] * key[:, None, :]
        if BLOCK_T > 1:
            decay, gain = tl.associative_scan((decay, gain), 0, combine_steps)
        states = decay * hidden[None, :, :] + gain
        y = tl.sum(states * query[:, None, :], 2)
        if d_ptr is not None:
            y += tl.load(d_ptr + head * P + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :] * x
        if z_ptr is not None:
            gate_offsets = head * stride_z_head + channel[None, :] + token * stride_z_token
            gate = tl.load(z_ptr + gate_offsets, mask=mask, other=0.0).to(tl.float32)
            y = y * gate / (1.0 + tl.exp(-gate))
        tl.store(out_ptr + token * stride_out_token, y.to(out_ptr.dtype.element_ty), mask=mask)
        hidden = tl.sum(tl.where(is_last[:, None, None], states, 0.0), 0)
    # Every thread has read the start state by now, also where both slots are one.
    tl.debug_barrier()
    state_out = state_ptr + write_slot * stride_slot + offsets
    tl.store(state_out, hidden.to(state_ptr.dtype.element_ty), mask=is_weight)


def prepare_selective_scan(
    inputs: ScanInputs, params: SelectiveScanParams, *, state: torch.Tensor, batch: StateBatch, out: torch.Tensor
) -> Launch:
    """Check shapes, dtypes, strides without a sync, then return the launch that `selective_scan` runs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(inputs, params, state=state, batch=batch, out=out)
    _, num_heads, head_dim, state_size = state.shape
    block_t = min(_MAX_TILE_TOKENS, next_power_of_2(max(batch.max_query_len, 1)))
    block_n = next_power_of_2(max(state_size, 1))
    largest = _STEP_TILE_ELEMENTS if block_t == 1 else _SCAN_TILE_ELEMENTS
    block_p = min(max(1, largest // (block_t * block_n)), next_power_of_2(max(head_dim, 1)))
    gate_strides = (0, 0) if inputs.z is None else inputs.z.stride()[:2]
    return Launch(
        name="selective_scan",
        kernel=_selective_scan_kernel,
        grid=(-(-head_dim // block_p), num_heads, batch.num_rows),
        args=(
            *(inputs.x, inputs.dt, inputs.B, inputs.C, inputs.z, params.A, params.D, params.dt_bias, state),
            *(batch.query_start_loc, batch.read_slots, batch.write_slots, batch.zero_start, out),
            *(*inputs.x.stride()[:2], *inputs.dt.stride()[:2], *inputs.B.stride()[:2], *inputs.C.stride()[:2]),
            *(*gate_strides, *out.stride()[:2], state.stride(0)),
        ),
        options={
            **{"P": head_dim, "N": state_size, "BLOCK_T": block_t, "BLOCK_P": block_p, "BLOCK_N": block_n},
            **{"SOFTPLUS": params.dt_softplus, "NULL_BLOCK": NULL_BLOCK_ID, "num_warps": 4},
        },
    )


def selective_scan(
    inputs: ScanInputs, params: SelectiveScanParams, *, state: torch.Tensor, batch: StateBatch, out: torch.Tensor
) -> None:
    """Advance all rows with one kernel launch; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device; ImportError without triton.
    """
    prepare_selective_scan(inputs, params, state=state, batch=batch, out=out).run()
