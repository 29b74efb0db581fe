"""Triton kernels of linear attention whose state decays by one number a head and token, with their launch.

S = exp(d rate) S + d v k^T; y = S q + skip v, over tiles [BLOCK_P, BLOCK_N] of a head's state, held in registers while
a program walks its row: by chunks of BLOCK_T tokens, or token by token (BLOCK_T = 1) in short rows, where keys are too
wide. Without `dt`, d is 1 and the rate is negated: lightning attention gives its slope.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hybridkv_kernels._checks import expect, expect_last_dim_contiguous
from hybridkv_kernels._state_rows import LOWEST_LOG_DECAY, load_read_slot
from hybridkv_kernels._triton import KernelArg, Launch, jit, next_power_of_2, tl
from hybridkv_kernels.constants import NULL_BLOCK_ID
from hybridkv_kernels.state_batch import MAX_MATRIX_DIM, StateBatch

__all__ = [
    "MAX_STEP_TOKENS",
    "ScanTensors",
    "causal_decay",
    "dot_float32",
    "load_rows",
    "prepare_decay_scan",
    "sum_log_decays",
]

# Up to so many tokens a row, walking them one by one beats a chunk, which is mostly empty.
MAX_STEP_TOKENS = 8
_MAX_FLOAT32_CHUNK_DIM = 64


@jit
def dot_float32(left: tl.tensor, right: tl.tensor, IS_HALF: tl.constexpr) -> tl.tensor:
    """Multiply float32 tiles `[A, B]` by `[B, C]`, on tensor cores; returns `[A, C]`.

    NVIDIA's take TF32, factors of 11 significant bits. With 16-bit inputs (IS_HALF) that is enough: those are exact in
    it, what was computed from them, as the state, is rounded to 2**-12 of itself for the product, as float16 would be.
    Otherwise factors are split in three, good to about 2**-21.
    """
    if tl.target_info.is_cuda():
        if IS_HALF:
            product = tl.dot(left, right, input_precision="tf32")
        else:
            product = tl.dot(left, right, input_precision="tf32x3")
    else:
        product = tl.dot(left, right, input_precision="ieee")
    return product


@jit
def _step_size(
    raw: tl.tensor, bias: tl.tensor, dt_min: tl.tensor, dt_max: tl.tensor, SOFTPLUS: tl.constexpr
) -> tl.tensor:
    """Return clamp(softplus(raw + bias), dt_min, dt_max), float32 in the shape of `raw`."""
    size = raw.to(tl.float32) + bias
    if SOFTPLUS:
        # log(1 + e) with the correction e / ((1 + e) - 1), so that a small step keeps its precision.
        e = tl.exp(tl.minimum(size, 20.0))
        one_more = 1.0 + e
        rounded = one_more - 1.0
        exact = tl.log(one_more) * (e / tl.where(rounded == 0.0, 1.0, rounded))
        size = tl.where(size > 20.0, size, tl.where(rounded == 0.0, e, exact))
    return tl.minimum(tl.maximum(size, dt_min), dt_max)


@jit
def sum_log_decays(log_decay: tl.tensor, LOWEST_LOG_DECAY: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return float64 sums of a chunk's log decays `[BLOCK_T]`: up to each token `[BLOCK_T]`, of all.

    Sums are there to be subtracted: float64 keeps the precision of a small difference of two large ones, the lowest log
    decay keeps -inf - -inf away.
    """
    log_decay = tl.where(log_decay < LOWEST_LOG_DECAY, LOWEST_LOG_DECAY, log_decay).to(tl.float64)
    return tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)


@jit
def causal_decay(total: tl.tensor, t: tl.tensor) -> tl.tensor:
    """Return the decay between two tokens `[BLOCK_T, BLOCK_T]` from `sum_log_decays`, 0 above the diagonal."""
    difference = (total[:, None] - total[None, :]).to(tl.float32)
    return tl.exp(tl.where(t[:, None] >= t[None, :], difference, float("-inf")))


@jit
def load_rows(base_ptr: tl.tensor, offsets: tl.tensor, columns: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load rows at int64 `offsets` `[A]`, at `columns` `[B]`; returns float32 `[A, B]`, what is masked reads 0."""
    return tl.load(base_ptr + offsets[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@jit
def decay_scan_kernel(
    query_ptr: tl.tensor,  # [T, G, N]
    key_ptr: tl.tensor,  # [T, G, N]
    value_ptr: tl.tensor,  # [T, H, P]
    dt_ptr: tl.tensor,  # [T, H] or None
    rate_ptr: tl.tensor,  # [H]
    dt_bias_ptr: tl.tensor,  # [H] or None
    skip_ptr: tl.tensor,  # [H] or None
    state_ptr: tl.tensor,  # [num_slots, H, P, N]
    out_ptr: tl.tensor,  # [T, H, P]
    query_start_ptr: tl.tensor,  # [R + 1] int32
    read_slots_ptr: tl.tensor,  # [R] int64
    write_slots_ptr: tl.tensor,  # [R] int64
    zero_start_ptr: tl.tensor,  # [R] bool
    dt_min: tl.tensor,
    dt_max: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_group: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_group: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_dt_token: tl.tensor,
    stride_s_slot: tl.tensor,
    stride_s_head: tl.tensor,
    stride_s_p: tl.tensor,
    stride_s_n: tl.tensor,
    stride_o_token: tl.tensor,
    stride_o_head: tl.tensor,
    HEADS_PER_GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HAS_DT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    NULL_BLOCK: tl.constexpr,
    LOWEST_LOG_DECAY: tl.constexpr,
    IS_HALF: tl.constexpr,
) -> None:
    row = tl.program_id(2).to(tl.int64)
    write_slot = tl.load(write_slots_ptr + row)
    if write_slot <= NULL_BLOCK:
        return
    head = tl.program_id(1).to(tl.int64)
    group = head // HEADS_PER_GROUP
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    p_ok = p < P
    n_ok = n < N
    tile_ok = p_ok[:, None] & n_ok[None, :]
    tile = state_ptr + head * stride_s_head + (p.to(tl.int64) * stride_s_p)[:, None] + (n * stride_s_n)[None, :]
    read_slot = load_read_slot(read_slots_ptr, zero_start_ptr, row, NULL_BLOCK)
    read_ok = tl.where(read_slot > NULL_BLOCK, tile_ok, False)
    state = tl.load(tile + read_slot * stride_s_slot, mask=read_ok, other=0.0).to(tl.float32)
    rate = tl.load(rate_ptr + head).to(tl.float32)
    bias = tl.load(dt_bias_ptr + head).to(tl.float32) if HAS_BIAS else 0.0
    begin = tl.load(query_start_ptr + row)
    end = tl.load(query_start_ptr + row + 1)
    skip = tl.load(skip_ptr + head).to(tl.float32) if HAS_SKIP else 0.0
    query_head = query_ptr + group * stride_q_group
    key_head = key_ptr + group * stride_k_group
    value_head = value_ptr + head * stride_v_head
    out_head = out_ptr + head * stride_o_head
    t = tl.arange(0, BLOCK_T)
    for start in range(begin, end, BLOCK_T):
        if BLOCK_T == 1:
            one = tl.cast(start, tl.int64)
            query = tl.load(query_head + one * stride_q_token + n, mask=n_ok, other=0.0).to(tl.float32)  # [BLOCK_N]
            key = tl.load(key_head + one * stride_k_token + n, mask=n_ok, other=0.0).to(tl.float32)
            value = tl.load(value_head + one * stride_v_token + p, mask=p_ok, other=0.0).to(tl.float32)  # [BLOCK_P]
            update = value
            log_decay = -rate
            if HAS_DT:
                size = _step_size(tl.load(dt_ptr + one * stride_dt_token + head), bias, dt_min, dt_max, SOFTPLUS)
                log_decay = size * rate
                update = value * size
            state = state * tl.exp(log_decay) + update[:, None] * key[None, :]
            out = tl.sum(state * query[None, :], 1) + skip * value
            tl.store(out_head + one * stride_o_token + p, out.to(out_ptr.dtype.element_ty), mask=p_ok)
        else:
            token = (start + t).to(tl.int64)
            t_ok = start + t < end
            tn_ok = t_ok[:, None] & n_ok[None, :]
            tp_ok = t_ok[:, None] & p_ok[None, :]
            query = load_rows(query_head, token * stride_q_token, n, tn_ok)  # [BLOCK_T, BLOCK_N]
            key = load_rows(key_head, token * stride_k_token, n, tn_ok)
            value = load_rows(value_head, token * stride_v_token, p, tp_ok)  # [BLOCK_T, BLOCK_P]
            update = value
            log_decay = tl.where(t_ok, -rate, 0.0)
            if HAS_DT:
                raw = tl.load(dt_ptr + token * stride_dt_token + head, mask=t_ok, other=0.0)
                size = _step_size(raw, bias, dt_min, dt_max, SOFTPLUS)
                log_decay = tl.where(t_ok, size * rate, 0.0)
                update = value * size[:, None]
            total, whole = sum_log_decays(log_decay, LOWEST_LOG_DECAY)
            between = causal_decay(total, t)  # [BLOCK_T, BLOCK_T]
            scores = dot_float32(query, tl.trans(key), IS_HALF) * between  # [BLOCK_T, BLOCK_T]
            out = dot_float32(query, tl.trans(state), IS_HALF) * tl.exp(total.to(tl.float32))[:, None] + skip * value
            out += dot_float32(scores, update, IS_HALF)
            update = update * tl.exp((whole - total).to(tl.float32))[:, None]
            state = state * tl.exp(whole.to(tl.float32)) + dot_float32(tl.trans(update), key, IS_HALF)
            out_rows = out_head + (token * stride_o_token)[:, None] + p[None, :]
            tl.store(out_rows, out.to(out_ptr.dtype.element_ty), mask=tp_ok)
    # Every thread has read the start state by now, also where both slots are one: in tiles smaller than the program,
    # several threads hold the same element.
    tl.debug_barrier()
    tl.store(tile + write_slot * stride_s_slot, state.to(state_ptr.dtype.element_ty), mask=tile_ok)


@dataclass(frozen=True)
class ScanTensors:
    """Tensors of one launch, in the shapes that the kernels name; `state` may be a transposed view."""

    name: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    state: torch.Tensor
    out: torch.Tensor
    rate: torch.Tensor
    dt: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    skip: torch.Tensor | None = None

    def expect_strides(self) -> None:
        """Check, without a sync, that each last dimension is contiguous, the state's excepted."""
        named = (("query", self.query), ("key", self.key), ("value", self.value), ("out", self.out))
        optional = (("rate", self.rate), ("dt", self.dt), ("dt_bias", self.dt_bias), ("skip", self.skip))
        for name, tensor in (*named, *optional):
            if tensor is not None:
                expect_last_dim_contiguous(name, tensor)

    def strides(self) -> tuple[int, ...]:
        """Return the strides in the kernels' order."""
        dt_stride = 0 if self.dt is None else self.dt.stride(0)
        inputs = (*self.query.stride()[:2], *self.key.stride()[:2], *self.value.stride()[:2], dt_stride)
        return (*inputs, *self.state.stride(), *self.out.stride()[:2])


@dataclass(frozen=True)
class _Tile:
    """Shape of one program."""

    block_p: int
    block_t: int
    num_warps: int
    num_stages: int


def _choose_tile(block_n: int, item_bytes: int, head_dim: int, *, is_step: bool) -> _Tile:
    """Choose a tile for a state of `head_dim` by `block_n`, padded to a power of two."""
    # Chosen so that no variant listed in benchmarks/compile_kernels.py spills a register on any of its targets.
    widest = next_power_of_2(head_dim)
    if is_step:
        return _Tile(block_p=min(widest, 4096 // block_n), block_t=1, num_warps=4, num_stages=1)
    key_bytes = block_n * item_bytes
    if key_bytes > 256:
        return _Tile(block_p=16, block_t=16, num_warps=8, num_stages=1)
    return _Tile(block_p=max(16, min(widest, 32)), block_t=32 if key_bytes <= 128 else 16, num_warps=4, num_stages=1)


def prepare_decay_scan(
    tensors: ScanTensors,
    batch: StateBatch,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
) -> Launch:
    """Choose a tile, then return the launch.

    Raises: ValueError for strides or sizes that the kernels do not serve.
    """
    tensors.expect_strides()
    num_heads, head_dim, key_dim = tensors.state.shape[1:]
    expect(max(head_dim, key_dim) <= MAX_MATRIX_DIM, "head sizes", f"<= {MAX_MATRIX_DIM}", (head_dim, key_dim))
    item_bytes = tensors.query.element_size()
    block_n = max(16, next_power_of_2(key_dim))
    # A chunk's products need whole keys in registers: wide ones in float32 would spill.
    is_step = batch.max_query_len <= MAX_STEP_TOKENS or (item_bytes == 4 and block_n > _MAX_FLOAT32_CHUNK_DIM)
    tile = _choose_tile(block_n, item_bytes, head_dim, is_step=is_step)
    dt_min, dt_max = (-math.inf, math.inf) if dt_limit is None else dt_limit
    inputs: tuple[KernelArg, ...] = (tensors.query, tensors.key, tensors.value, tensors.dt, tensors.rate)
    return Launch(
        name=tensors.name,
        kernel=decay_scan_kernel,
        grid=(-(-head_dim // tile.block_p), num_heads, batch.num_rows),
        args=(
            *(*inputs, tensors.dt_bias, tensors.skip, tensors.state, tensors.out),
            *(batch.query_start_loc, batch.read_slots, batch.write_slots, batch.zero_start),
            *(dt_min, dt_max, *tensors.strides()),
        ),
        options={
            **{"HEADS_PER_GROUP": num_heads // tensors.key.shape[1], "P": head_dim, "N": key_dim},
            **{"BLOCK_P": tile.block_p, "BLOCK_N": block_n, "BLOCK_T": tile.block_t},
            **{"HAS_DT": tensors.dt is not None, "HAS_BIAS": tensors.dt_bias is not None},
            **{"HAS_SKIP": tensors.skip is not None, "SOFTPLUS": dt_softplus, "NULL_BLOCK": NULL_BLOCK_ID},
            **{"LOWEST_LOG_DECAY": LOWEST_LOG_DECAY, "IS_HALF": item_bytes == 2},
            **{"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        },
    )
