"""Triton kernel of the gated delta rule with its launch.

A program holds a tile [BLOCK_V, BLOCK_K] of one head's state in registers while it walks a row: by chunks of BLOCK_T
tokens, or token by token (BLOCK_T = 1) in short rows, where the decay is per key channel, or where keys are too wide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridkv_kernels._checks import expect, expect_last_dim_contiguous
from hybridkv_kernels._decay_scan_kernels import (
    MAX_STEP_TOKENS,
    causal_decay,
    dot_float32,
    load_rows,
    sum_log_decays,
)
from hybridkv_kernels._delta_rule_torch import L2_EPSILON
from hybridkv_kernels._state_rows import LOWEST_LOG_DECAY, load_read_slot
from hybridkv_kernels._triton import Launch, jit, next_power_of_2, tl
from hybridkv_kernels.constants import NULL_BLOCK_ID
from hybridkv_kernels.state_batch import MAX_MATRIX_DIM, StateBatch

__all__ = ["DeltaRuleTensors", "prepare_delta_rule"]

_MAX_CHUNK_KEY_BYTES = 256


@jit
def _unit_lower_inverse(lower: tl.tensor, t: tl.tensor, LOG_T: tl.constexpr) -> tl.tensor:
    """Return the inverse of I + `lower`, which is strictly lower triangular; both are [2**LOG_T, 2**LOG_T].

    The inverses of diagonal blocks double in size: that of [[P, 0], [L, Q]] is [[P', 0], [-Q' L P', Q']]. Unlike powers
    of `lower`, all terms stay as small as the inverse itself. Always in full precision: an error here would grow with
    each level.
    """
    row = t[:, None]
    column = t[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, lower, 0.0)
    for level in tl.static_range(1, LOG_T):
        joins = (row // 2 ** (level + 1) == column // 2 ** (level + 1)) & (row // 2**level != column // 2**level)
        left = dot_float32(inverse, tl.where(joins, lower, 0.0), False)
        inverse -= dot_float32(left, inverse, False)
    return inverse


@jit
def _advance_chunk(
    query: tl.tensor,  # [BLOCK_T, BLOCK_K]
    key: tl.tensor,  # [BLOCK_T, BLOCK_K]
    value: tl.tensor,  # [BLOCK_T, BLOCK_V]
    log_decay: tl.tensor,  # [BLOCK_T]
    beta: tl.tensor,  # [BLOCK_T]
    state: tl.tensor,  # [BLOCK_V, BLOCK_K]
    t: tl.tensor,  # [BLOCK_T]
    LOG_T: tl.constexpr,
    LOWEST_LOG_DECAY: tl.constexpr,
    IS_HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return outputs [BLOCK_T, BLOCK_V] with the next state [BLOCK_V, BLOCK_K]."""
    total, whole = sum_log_decays(log_decay, LOWEST_LOG_DECAY)
    from_start = tl.exp(total.to(tl.float32))[:, None]
    between = causal_decay(total, t)
    # Each token's change depends on those before it in the chunk: a triangular system, whose diagonal is 1.
    wanted = (value - dot_float32(key, tl.trans(state), IS_HALF) * from_start) * beta[:, None]
    scores = dot_float32(key, tl.trans(key), IS_HALF) * between * beta[:, None]
    scores = tl.where(t[:, None] > t[None, :], scores, 0.0)
    change = dot_float32(_unit_lower_inverse(scores, t, LOG_T), wanted, False)
    out = dot_float32(query, tl.trans(state), IS_HALF) * from_start
    out += dot_float32(dot_float32(query, tl.trans(key), IS_HALF) * between, change, IS_HALF)
    change = change * tl.exp((whole - total).to(tl.float32))[:, None]
    return out, state * tl.exp(whole.to(tl.float32)) + dot_float32(tl.trans(change), key, IS_HALF)


@jit
def delta_rule_kernel(
    query_ptr: tl.tensor,  # [T, Hk, Dk]
    key_ptr: tl.tensor,  # [T, Hk, Dk]
    value_ptr: tl.tensor,  # [T, Hv, Dv]
    decay_ptr: tl.tensor,  # [T, Hv] or [T, Hv, Dk]
    beta_ptr: tl.tensor,  # [T, Hv]
    state_ptr: tl.tensor,  # [num_slots, Hv, Dv, Dk]
    out_ptr: tl.tensor,  # [T, Hv, Dv]
    query_start_ptr: tl.tensor,  # [R + 1] int32
    read_slots_ptr: tl.tensor,  # [R] int64
    write_slots_ptr: tl.tensor,  # [R] int64
    zero_start_ptr: tl.tensor,  # [R] bool
    scale: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_g_token: tl.tensor,
    stride_g_head: tl.tensor,
    stride_b_token: tl.tensor,
    stride_s_slot: tl.tensor,
    stride_s_head: tl.tensor,
    stride_o_token: tl.tensor,
    stride_o_head: tl.tensor,
    HEADS_PER_KEY: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LOG_T: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    L2_EPSILON: tl.constexpr,
    NULL_BLOCK: tl.constexpr,
    LOWEST_LOG_DECAY: tl.constexpr,
    IS_HALF: tl.constexpr,
) -> None:
    row = tl.program_id(2).to(tl.int64)
    write_slot = tl.load(write_slots_ptr + row)
    if write_slot <= NULL_BLOCK:
        return
    head = tl.program_id(1).to(tl.int64)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    v_ok = v < DV
    k_ok = k < DK
    tile_ok = v_ok[:, None] & k_ok[None, :]
    tile = state_ptr + head * stride_s_head + (v * DK)[:, None] + k[None, :]
    read_slot = load_read_slot(read_slots_ptr, zero_start_ptr, row, NULL_BLOCK)
    read_ok = tl.where(read_slot > NULL_BLOCK, tile_ok, False)
    state = tl.load(tile + read_slot * stride_s_slot, mask=read_ok, other=0.0).to(tl.float32)
    query_head = query_ptr + head // HEADS_PER_KEY * stride_q_head
    key_head = key_ptr + head // HEADS_PER_KEY * stride_k_head
    value_head = value_ptr + head * stride_v_head
    decay_head = decay_ptr + head * stride_g_head
    beta_head = beta_ptr + head
    out_head = out_ptr + head * stride_o_head
    begin = tl.load(query_start_ptr + row)
    end = tl.load(query_start_ptr + row + 1)
    t = tl.arange(0, BLOCK_T)
    for start in range(begin, end, BLOCK_T):
        if BLOCK_T == 1:
            one = tl.cast(start, tl.int64)
            query = tl.load(query_head + one * stride_q_token + k, mask=k_ok, other=0.0).to(tl.float32)  # [BLOCK_K]
            key = tl.load(key_head + one * stride_k_token + k, mask=k_ok, other=0.0).to(tl.float32)
            value = tl.load(value_head + one * stride_v_token + v, mask=v_ok, other=0.0).to(tl.float32)  # [BLOCK_V]
            beta = tl.load(beta_head + one * stride_b_token).to(tl.float32)
            if NORMALIZE:
                query = query * tl.rsqrt(tl.sum(query * query, 0) + L2_EPSILON)
                key = key * tl.rsqrt(tl.sum(key * key, 0) + L2_EPSILON)
            if PER_CHANNEL:
                log_decay = tl.load(decay_head + one * stride_g_token + k, mask=k_ok, other=0.0).to(tl.float32)
                state = state * tl.exp(log_decay)[None, :]
            else:
                state = state * tl.exp(tl.load(decay_head + one * stride_g_token).to(tl.float32))
            change = beta * (value - tl.sum(state * key[None, :], 1))
            state += change[:, None] * key[None, :]
            out = scale * tl.sum(state * query[None, :], 1)
            tl.store(out_head + one * stride_o_token + v, out.to(out_ptr.dtype.element_ty), mask=v_ok)
        else:
            token = (start + t).to(tl.int64)
            t_ok = start + t < end
            tk_ok = t_ok[:, None] & k_ok[None, :]
            tv_ok = t_ok[:, None] & v_ok[None, :]
            query = load_rows(query_head, token * stride_q_token, k, tk_ok)  # [BLOCK_T, BLOCK_K]
            key = load_rows(key_head, token * stride_k_token, k, tk_ok)
            value = load_rows(value_head, token * stride_v_token, v, tv_ok)  # [BLOCK_T, BLOCK_V]
            beta = tl.load(beta_head + token * stride_b_token, mask=t_ok, other=0.0).to(tl.float32)
            if NORMALIZE:
                query = query * tl.rsqrt(tl.sum(query * query, 1) + L2_EPSILON)[:, None]
                key = key * tl.rsqrt(tl.sum(key * key, 1) + L2_EPSILON)[:, None]
            query = query * scale
            log_decay = tl.load(decay_head + token * stride_g_token, mask=t_ok, other=0.0).to(tl.float32)
            out, state = _advance_chunk(query, key, value, log_decay, beta, state, t, LOG_T, LOWEST_LOG_DECAY, IS_HALF)
            out_rows = out_head + (token * stride_o_token)[:, None] + v[None, :]
            tl.store(out_rows, out.to(out_ptr.dtype.element_ty), mask=tv_ok)
    # Every thread has read the start state by now, also where both slots are one: in tiles smaller than the program,
    # several threads hold the same element.
    tl.debug_barrier()
    tl.store(tile + write_slot * stride_s_slot, state.to(state_ptr.dtype.element_ty), mask=tile_ok)


@dataclass(frozen=True)
class DeltaRuleTensors:
    """Tensors of one launch, in the shapes that the kernel names."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor
    out: torch.Tensor

    def strides(self) -> tuple[int, ...]:
        """Check, without a sync, that each last dimension is contiguous, then return the strides in kernel order."""
        inputs = (("query", self.query), ("key", self.key), ("value", self.value), ("log_decay", self.log_decay))
        for name, tensor in (*inputs, ("beta", self.beta), ("out", self.out)):
            expect_last_dim_contiguous(name, tensor)
        heads = (stride for _, tensor in inputs for stride in tensor.stride()[:2])
        return (*heads, self.beta.stride(0), *self.state.stride()[:2], *self.out.stride()[:2])


@dataclass(frozen=True)
class _Tile:
    """Shape of one program."""

    block_v: int
    block_t: int
    num_warps: int
    num_stages: int


def _choose_tile(block_k: int, value_dim: int, *, is_step: bool) -> _Tile:
    """Choose a tile for a state of `value_dim` by `block_k`, padded to a power of two."""
    # Chosen so that no variant listed in benchmarks/compile_kernels.py spills a register on any of its targets.
    widest = next_power_of_2(value_dim)
    if is_step:
        return _Tile(block_v=min(widest, 4096 // block_k), block_t=1, num_warps=4, num_stages=1)
    return _Tile(block_v=max(16, min(widest, 32)), block_t=16, num_warps=4, num_stages=1)


def prepare_delta_rule(tensors: DeltaRuleTensors, batch: StateBatch, *, scale: float, l2_normalize: bool) -> Launch:
    """Choose a tile, then return the launch.

    Raises: ValueError for strides or sizes that the kernel does not serve.
    """
    strides = tensors.strides()
    num_heads, value_dim, key_dim = tensors.state.shape[1:]
    expect(max(value_dim, key_dim) <= MAX_MATRIX_DIM, "head sizes", f"<= {MAX_MATRIX_DIM}", (key_dim, value_dim))
    is_per_channel = tensors.log_decay.dim() == 3
    item_bytes = tensors.query.element_size()
    block_k = max(16, next_power_of_2(key_dim))
    # A chunk's products need whole keys in registers: wider ones would spill, as would a decay per key channel, whose
    # products have to be split at several tokens of the chunk.
    is_step = is_per_channel or batch.max_query_len <= MAX_STEP_TOKENS or block_k * item_bytes > _MAX_CHUNK_KEY_BYTES
    tile = _choose_tile(block_k, value_dim, is_step=is_step)
    return Launch(
        name="gated_delta_rule",
        kernel=delta_rule_kernel,
        grid=(-(-value_dim // tile.block_v), num_heads, batch.num_rows),
        args=(
            *(tensors.query, tensors.key, tensors.value, tensors.log_decay, tensors.beta, tensors.state, tensors.out),
            *(batch.query_start_loc, batch.read_slots, batch.write_slots, batch.zero_start),
            *(scale, *strides),
        ),
        options={
            **{"HEADS_PER_KEY": num_heads // tensors.key.shape[1], "DK": key_dim, "DV": value_dim},
            **{"BLOCK_K": block_k, "BLOCK_V": tile.block_v, "BLOCK_T": tile.block_t},
            **{"LOG_T": tile.block_t.bit_length() - 1, "PER_CHANNEL": is_per_channel, "NORMALIZE": l2_normalize},
            **{"L2_EPSILON": L2_EPSILON, "NULL_BLOCK": NULL_BLOCK_ID},
            **{"LOWEST_LOG_DECAY": LOWEST_LOG_DECAY, "IS_HALF": item_bytes == 2},
            **{"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        },
    )
