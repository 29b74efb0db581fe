"""Launches of the ops with matrix states on empty tensors, at the sizes of real models."""

from __future__ import annotations

import torch

from hybridkv_kernels._triton import Launch
from hybridkv_kernels.gated_delta_rule import DeltaRuleParams, prepare_gated_delta_rule
from hybridkv_kernels.lightning_attention import prepare_lightning_attention
from hybridkv_kernels.mamba2_scan import Mamba2Params, prepare_mamba2_scan
from hybridkv_kernels.state_batch import StateBatch

_BF16, _FP32 = torch.bfloat16, torch.float32
_NUM_ROWS, _NUM_SLOTS = 32, 64


def _batch(query_len: int) -> StateBatch:
    """Make a batch of rows of at most `query_len` tokens."""
    return StateBatch(
        query_start_loc=torch.empty(_NUM_ROWS + 1, dtype=torch.int32),
        read_slots=torch.empty(_NUM_ROWS, dtype=torch.int64),
        write_slots=torch.empty(_NUM_ROWS, dtype=torch.int64),
        zero_start=torch.empty(_NUM_ROWS, dtype=torch.bool),
        max_query_len=query_len,
    )


def _mamba2(
    state: tuple[int, int, int], num_groups: int, query_len: int, dtype: torch.dtype = _BF16, *, has_limit: bool = False
) -> Launch:
    num_tokens, num_heads = _NUM_ROWS * query_len, state[0]
    x = torch.empty(num_tokens, *state[:2], dtype=dtype)
    key = torch.empty(num_tokens, num_groups, state[2], dtype=dtype)
    weight = torch.empty(num_heads, dtype=dtype)
    limit = (0.001, float("inf")) if has_limit else None
    return prepare_mamba2_scan(
        x,
        torch.empty(num_tokens, num_heads, dtype=dtype),
        key,
        key,
        Mamba2Params(torch.empty(num_heads), weight, weight, dt_limit=limit),
        state=torch.empty(_NUM_SLOTS, *state),
        batch=_batch(query_len),
        out=x,
    )


def _lightning(num_heads: int, dim: int, query_len: int) -> Launch:
    x = torch.empty(_NUM_ROWS * query_len, num_heads, dim, dtype=_BF16)
    state = torch.empty(_NUM_SLOTS, num_heads, dim, dim)
    return prepare_lightning_attention(x, x, x, torch.empty(num_heads), state=state, batch=_batch(query_len), out=x)


def _delta(
    num_key_heads: int,
    state: tuple[int, int, int],
    query_len: int,
    *,
    dtype: torch.dtype = _BF16,
    state_dtype: torch.dtype = _FP32,
    per_channel: bool = False,
) -> Launch:
    num_heads, value_dim, key_dim = state
    num_tokens = _NUM_ROWS * query_len
    key = torch.empty(num_tokens, num_key_heads, key_dim, dtype=dtype)
    value = torch.empty(num_tokens, num_heads, value_dim, dtype=dtype)
    return prepare_gated_delta_rule(
        key,
        key,
        value,
        torch.empty(num_tokens, num_heads, key_dim) if per_channel else torch.empty(num_tokens, num_heads),
        torch.empty(num_tokens, num_heads, dtype=dtype),
        DeltaRuleParams(scale=0.1, l2_normalize=True),
        state=torch.empty(_NUM_SLOTS, *state, dtype=state_dtype),
        batch=_batch(query_len),
        out=value,
    )


def matrix_state_launches() -> dict[str, Launch]:
    """Return the launches by the name they have in the table: each model's sizes for decode, for prefill."""
    bamba, nemotron_h, nano, zamba2, falcon_h1 = (
        (128, 64, 128),
        (256, 64, 256),
        (128, 80, 128),
        (112, 64, 64),
        (24, 128, 256),
    )
    qwen3_next, olmo_hybrid, wide = (32, 128, 128), (30, 192, 96), (16, 256, 256)
    return {
        "mamba2_scan bf16 64x128 decode": _mamba2(bamba, 1, 1),
        "mamba2_scan bf16 64x128 4 tokens": _mamba2(bamba, 1, 4),
        "mamba2_scan bf16 64x128 prefill": _mamba2(bamba, 1, 256, has_limit=True),
        "mamba2_scan bf16 80x128 decode": _mamba2(nano, 8, 1),
        "mamba2_scan bf16 80x128 prefill": _mamba2(nano, 8, 256),
        "mamba2_scan bf16 64x256 decode": _mamba2(nemotron_h, 8, 1),
        "mamba2_scan bf16 64x256 prefill": _mamba2(nemotron_h, 8, 256),
        "mamba2_scan bf16 128x256 prefill": _mamba2(falcon_h1, 1, 256),
        "mamba2_scan bf16 64x64 prefill": _mamba2(zamba2, 2, 256),
        "mamba2_scan fp32 64x128 prefill": _mamba2(bamba, 1, 256, _FP32),
        "mamba2_scan fp32 64x64 prefill": _mamba2(zamba2, 2, 256, _FP32),
        "lightning_attention bf16 128x128 decode": _lightning(64, 128, 1),
        "lightning_attention bf16 128x128 prefill": _lightning(64, 128, 256),
        "gated_delta_rule bf16 128x128 decode": _delta(16, qwen3_next, 1),
        "gated_delta_rule bf16 128x128 prefill": _delta(16, qwen3_next, 256),
        "gated_delta_rule bf16 128x128 prefill bf16 state": _delta(16, qwen3_next, 256, state_dtype=_BF16),
        "gated_delta_rule bf16 192x96 decode": _delta(30, olmo_hybrid, 1),
        "gated_delta_rule bf16 192x96 prefill": _delta(30, olmo_hybrid, 256),
        "gated_delta_rule bf16 256x256 decode": _delta(16, wide, 1),
        "gated_delta_rule bf16 256x256 prefill": _delta(16, wide, 256),
        "gated_delta_rule fp32 128x128 prefill": _delta(16, qwen3_next, 256, dtype=_FP32),
        "gated_delta_rule bf16 128x128 per channel decode": _delta(32, qwen3_next, 1, per_channel=True),
        "gated_delta_rule bf16 128x128 per channel prefill": _delta(32, qwen3_next, 256, per_channel=True),
    }
