"""Causal depthwise convolution over the rows of a batch, each continuing the inputs kept in its state.

Contract
    y[t, c] = act(bias[c] + sum_k weight[c, k] * u[t - K + 1 + k, c])    act: none, or silu(v) = v * sigmoid(v)
    u is the row's start state (oldest input first) followed by the row's tokens; before the state it is not read.
    The end state is the last `columns` inputs of u: a row shorter than that keeps inputs of its start state.

Shapes
    x       [T, C]                       float32, bfloat16 or float16, last dimension contiguous; `out` likewise
    weight  [C, K]                       any float dtype, contiguous, 2 <= K <= 8
    bias    [C] or None                  any float dtype, contiguous
    state   [num_slots, C, columns]      float32, bfloat16 or float16, inner dimensions contiguous, any first stride;
                                         columns is K - 1, or K for models that keep one input more than is read

Invariants
    I1  S1..S5 of `state_batch`
    I2  `out` does not overlap `x`

All arithmetic is float32. Grid: (T // BLOCK_T + R, cdiv(C, BLOCK_C)); a tile belongs to one row, the row's first tile
reads its start state, then writes its end state.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F

from hybridkv_kernels._checks import expect, expect_dtype, expect_last_dim_contiguous, expect_one_device, expect_tensor
from hybridkv_kernels._row_tiles import find_row
from hybridkv_kernels._state_rows import LiveRow, live_rows, load_read_slot, load_states, split_rows, store_states
from hybridkv_kernels._triton import Launch, jit, next_power_of_2, tl
from hybridkv_kernels.constants import NULL_BLOCK_ID
from hybridkv_kernels.state_batch import INPUT_DTYPES, StateBatch, check_state_batch

__all__ = [
    "MAX_KERNEL",
    "MIN_KERNEL",
    "STATE_DTYPES",
    "Activation",
    "causal_conv1d",
    "causal_conv1d_reference",
    "causal_conv1d_torch",
    "check_causal_conv1d",
    "prepare_causal_conv1d",
]

Activation: TypeAlias = Literal["silu"] | None

STATE_DTYPES = INPUT_DTYPES
MIN_KERNEL, MAX_KERNEL = 2, 8
_MAX_TILE_TOKENS = 16
_MAX_TILE_CHANNELS = 256
_MAX_TILE_ELEMENTS = 1024
# Float32 elements of one step of the torch path: few enough to stay in a core's cache.
_BLOCK_ELEMENTS = 2**17


def _check_shapes(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: Activation,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    expect_tensor("x", x, None, (None, None))
    expect_dtype("x", x, INPUT_DTYPES)
    channels = x.shape[1]
    expect_tensor("weight", weight, None, (channels, None))
    kernel = weight.shape[1]
    expect(MIN_KERNEL <= kernel <= MAX_KERNEL, "weight.shape[1]", f"{MIN_KERNEL}..{MAX_KERNEL}", kernel)
    expect_tensor("out", out, x.dtype, x.shape)
    expect_tensor("state", state, None, (None, channels, None))
    expect_dtype("state", state, STATE_DTYPES)
    expect(state.shape[2] in (kernel - 1, kernel), "state.shape[2]", f"{kernel - 1} or {kernel}", state.shape[2])
    expect(state[:1].is_contiguous(), "state.stride()[1:]", "contiguous inner dimensions", state.stride()[1:])
    expect(activation in (None, "silu"), "activation", "None or 'silu'", activation)
    named = [("x", x), ("weight", weight), ("out", out), ("state", state), ("write_slots", batch.write_slots)]
    expect_last_dim_contiguous("x", x)
    expect_last_dim_contiguous("out", out)
    expect(weight.is_contiguous(), "weight.stride()", "contiguous", weight.stride())
    if bias is not None:
        expect_tensor("bias", bias, None, (channels,))
        expect_last_dim_contiguous("bias", bias)
        named.append(("bias", bias))
    expect_one_device(named)


def check_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation = None,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    """Check shapes plus the invariant I1; syncs, for tests and debugging.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(x, weight, bias, activation=activation, state=state, batch=batch, out=out)
    check_state_batch(batch, state.shape[0], x.shape[0])


def causal_conv1d_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation = None,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    """Loop over rows, their tokens, the taps in float64.

    Shapes, dtypes: as in the module's contract.
    """
    kernel, columns = weight.shape[1], state.shape[2]
    for row in live_rows(batch):
        tokens = x[row.begin : row.end].double()
        inputs = torch.cat([row.start_state(state).double().T, tokens])  # [columns + L, C]
        for idx, token in enumerate(range(row.begin, row.end), start=columns):
            total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
            for k in range(kernel):
                total += weight[:, k].double() * inputs[idx - kernel + 1 + k]
            if bias is not None:
                total += bias.double()
            if activation == "silu":
                total *= torch.sigmoid(total)
            out[token] = total.to(out.dtype)
        state[row.write_slot] = inputs[inputs.shape[0] - columns :].T.to(state.dtype)


def causal_conv1d_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation = None,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    """Convolve with torch operations: rows of one token in one batch, longer rows in blocks of tokens; syncs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device.
    """
    _check_shapes(x, weight, bias, activation=activation, state=state, batch=batch, out=out)
    taps = weight.float().T.contiguous()  # [K, C]
    offset = torch.zeros_like(taps[0]) if bias is None else bias.float()
    rows = split_rows(batch)
    if rows.steps.numel():
        start, tokens = load_states(state, batch, rows.steps), x.index_select(0, rows.step_tokens)
        window = [*start.float().unbind(2), tokens.float()][-taps.shape[0] :]  # K times [S, C]
        out.index_copy_(0, rows.step_tokens, _sum_taps(window, taps, offset, activation).to(out.dtype))
        # Over all channels at once: what crosses from one channel to the next is the column that is overwritten.
        ends = start.flatten(1).roll(-1, 1).view_as(start)
        ends[:, :, -1] = tokens
        store_states(state, batch, rows.steps, ends)
    for row in rows.scans:
        start_state = row.start_state(state)
        _convolve_row(x[row.begin : row.end], taps, offset, activation, start_state, out[row.begin : row.end])
        state[row.write_slot] = _end_state(x, row, start_state)


def _sum_taps(
    window: list[torch.Tensor], taps: torch.Tensor, offset: torch.Tensor, activation: Activation
) -> torch.Tensor:
    """Return the outputs `[L, C]` of K shifted inputs `[L, C]`, all float32."""
    total = torch.addcmul(offset, window[0], taps[0])
    for shifted, tap in zip(window[1:], taps[1:], strict=True):
        total.addcmul_(shifted, tap)
    return F.silu(total, inplace=True) if activation == "silu" else total


def _convolve_row(
    tokens: torch.Tensor,  # [L, C]
    taps: torch.Tensor,  # [K, C]
    offset: torch.Tensor,  # [C]
    activation: Activation,
    start_state: torch.Tensor,  # [C, columns]
    out: torch.Tensor,  # [L, C]
) -> None:
    past = taps.shape[0] - 1
    history = start_state[:, start_state.shape[1] - past :].T
    block = max(MAX_KERNEL, _BLOCK_ELEMENTS // max(tokens.shape[1], 1))
    for first in range(0, tokens.shape[0], block):
        length = min(block, tokens.shape[0] - first)
        if first == 0:
            inputs = torch.cat([history.float(), tokens[:length].float()])
        else:
            inputs = tokens[first - past : first + length].float()
        window = [inputs[k : k + length] for k in range(past + 1)]
        out[first : first + length] = _sum_taps(window, taps, offset, activation)


def _end_state(x: torch.Tensor, row: LiveRow, start_state: torch.Tensor) -> torch.Tensor:
    """Return the last inputs of a row `[C, columns]`."""
    columns = start_state.shape[1]
    newest = x[max(row.begin, row.end - columns) : row.end].T.to(start_state.dtype)
    return torch.cat([start_state, newest], dim=1)[:, newest.shape[1] :]


@jit
def _causal_conv1d_kernel(
    x_ptr: tl.tensor,  # [T, C]
    weight_ptr: tl.tensor,  # [C, K]
    bias_ptr: tl.tensor,  # [C] or None
    state_ptr: tl.tensor,  # [num_slots, C, COLUMNS]
    query_start_ptr: tl.tensor,  # [R + 1] int32
    read_slots_ptr: tl.tensor,  # [R] int64
    write_slots_ptr: tl.tensor,  # [R] int64
    zero_start_ptr: tl.tensor,  # [R] bool
    out_ptr: tl.tensor,  # [T, C]
    num_rows: tl.tensor,
    num_channels: tl.tensor,
    stride_x: tl.tensor,
    stride_out: tl.tensor,
    stride_slot: tl.tensor,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SILU: tl.constexpr,
    NULL_BLOCK: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    row = find_row(query_start_ptr, tile, num_rows, BLOCK_T)
    begin = tl.load(query_start_ptr + row)
    length = tl.load(query_start_ptr + row + 1) - begin
    first = (tile - (begin // BLOCK_T + row)) * BLOCK_T
    write_slot = tl.load(write_slots_ptr + row)
    # The first tile of an empty row still copies its state.
    if (write_slot <= NULL_BLOCK) | ((first >= length) & (first > 0)):
        return
    read_slot = load_read_slot(read_slots_ptr, zero_start_ptr, row, NULL_BLOCK)
    channel = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_state = channel < tl.where(read_slot > NULL_BLOCK, num_channels, 0)
    state_in = state_ptr + read_slot * stride_slot + channel * COLUMNS
    x_row = x_ptr + begin.to(tl.int64) * stride_x

    token = first + tl.arange(0, BLOCK_T)
    is_token = (token < length)[:, None] & (channel < num_channels)[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=channel < num_channels, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(K):
        tap = tl.load(weight_ptr + channel * K + k, mask=channel < num_channels, other=0.0).to(tl.float32)
        source = token - (K - 1) + k  # [BLOCK_T], negative in the start state
        x_offsets = source.to(tl.int64)[:, None] * stride_x + channel[None, :]
        value = tl.load(x_row + x_offsets, mask=is_token & (source >= 0)[:, None], other=0.0).to(tl.float32)
        old_offsets = state_in[None, :] + (COLUMNS + source)[:, None]
        value += tl.load(old_offsets, mask=in_state[None, :] & (source < 0)[:, None], other=0.0).to(tl.float32)
        total += value * tap[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    out_offsets = (begin + token).to(tl.int64)[:, None] * stride_out + channel[None, :]
    tl.store(out_ptr + out_offsets, total.to(out_ptr.dtype.element_ty), mask=is_token)

    if first == 0:
        column = tl.arange(0, BLOCK_COLUMNS)
        newest = length - COLUMNS + column  # [BLOCK_COLUMNS], negative in the start state
        is_column = (channel < num_channels)[:, None] & (column < COLUMNS)[None, :]
        newest_offsets = newest.to(tl.int64)[None, :] * stride_x + channel[:, None]
        kept = tl.load(x_row + newest_offsets, mask=is_column & (newest >= 0)[None, :], other=0.0).to(tl.float32)
        is_old = in_state[:, None] & ((column < COLUMNS) & (newest < 0))[None, :]
        kept += tl.load(state_in[:, None] + (COLUMNS + newest)[None, :], mask=is_old, other=0.0).to(tl.float32)
        # Other threads of this program may still have to read what is overwritten where both slots are one.
        tl.debug_barrier()
        state_out = state_ptr + write_slot * stride_slot + channel * COLUMNS
        tl.store(state_out[:, None] + column[None, :], kept.to(state_ptr.dtype.element_ty), mask=is_column)


def prepare_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation = None,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> Launch:
    """Check shapes, dtypes, strides without a sync, then return the launch that `causal_conv1d` runs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(x, weight, bias, activation=activation, state=state, batch=batch, out=out)
    num_tokens, channels = x.shape
    columns = state.shape[2]
    # With several tiles a row, the second must not reach back into the start state: BLOCK_T >= K - 1.
    block_t = min(_MAX_TILE_TOKENS, next_power_of_2(max(batch.max_query_len, 1)))
    block_c = min(_MAX_TILE_CHANNELS, _MAX_TILE_ELEMENTS // block_t, next_power_of_2(max(channels, 1)))
    return Launch(
        name="causal_conv1d",
        kernel=_causal_conv1d_kernel,
        grid=(num_tokens // block_t + batch.num_rows if batch.num_rows else 0, -(-channels // block_c), 1),
        args=(
            *(x, weight, bias, state, batch.query_start_loc, batch.read_slots, batch.write_slots, batch.zero_start),
            *(out, batch.num_rows, channels, x.stride(0), out.stride(0), state.stride(0)),
        ),
        options={
            **{"K": weight.shape[1], "COLUMNS": columns, "BLOCK_COLUMNS": next_power_of_2(columns)},
            **{"BLOCK_T": block_t, "BLOCK_C": block_c, "SILU": activation == "silu"},
            **{"NULL_BLOCK": NULL_BLOCK_ID, "num_warps": 4},
        },
    )


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation = None,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    """Convolve the tokens of all rows with one kernel launch, advancing their states; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device; ImportError without triton.
    """
    prepare_causal_conv1d(x, weight, bias, activation=activation, state=state, batch=batch, out=out).run()
