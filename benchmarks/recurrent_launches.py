"""Launches of the ops with element-wise states on empty tensors, at the sizes of real models."""

from __future__ import annotations

import torch

from hybridkv_kernels._triton import Launch
from hybridkv_kernels.causal_conv1d import prepare_causal_conv1d
from hybridkv_kernels.rg_lru import prepare_rg_lru
from hybridkv_kernels.selective_scan import ScanInputs, SelectiveScanParams, prepare_selective_scan
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


def _conv(
    channels: int, kernel: int, query_len: int, *, columns: int, silu: bool = True, dtype: torch.dtype = _BF16
) -> Launch:
    tokens = torch.empty(_NUM_ROWS * query_len, channels, dtype=dtype)
    return prepare_causal_conv1d(
        tokens,
        torch.empty(channels, kernel, dtype=dtype),
        torch.empty(channels, dtype=dtype) if silu else None,
        activation="silu" if silu else None,
        state=torch.empty(_NUM_SLOTS, channels, columns, dtype=dtype),
        batch=_batch(query_len),
        out=tokens,
    )


def _selective_scan(
    sizes: tuple[int, int, int], query_len: int, *, dtype: torch.dtype = _BF16, state_dtype: torch.dtype = _FP32
) -> Launch:
    heads, head_dim, state_size = sizes
    x = torch.empty(_NUM_ROWS * query_len, heads, head_dim, dtype=dtype)
    key = torch.empty(x.shape[0], heads, state_size, dtype=dtype)
    weight = torch.empty(heads, head_dim)
    return prepare_selective_scan(
        ScanInputs(x, x, key, key, x),
        SelectiveScanParams(torch.empty(*sizes), weight, weight),
        state=torch.empty(_NUM_SLOTS, *sizes, dtype=state_dtype),
        batch=_batch(query_len),
        out=x,
    )


def _rg_lru(width: int, query_len: int) -> Launch:
    x = torch.empty(_NUM_ROWS * query_len, width, dtype=_BF16)
    decay, state = x.float(), torch.empty(_NUM_SLOTS, width)
    return prepare_rg_lru(decay, x, state=state, batch=_batch(query_len), out=x)


def recurrent_launches() -> dict[str, Launch]:
    """Return the launches by the name they have in the table: every kernel for decode, for prefill."""
    falcon_mamba, zamba = (1, 8192, 16), (2, 3712, 16)
    return {
        "causal_conv1d bf16 8192 kernel 4 decode": _conv(8192, 4, 1, columns=4),
        "causal_conv1d bf16 8192 kernel 4 prefill": _conv(8192, 4, 256, columns=4),
        "causal_conv1d fp32 5120 kernel 4 prefill": _conv(5120, 4, 256, columns=3, dtype=_FP32),
        "causal_conv1d bf16 2048 kernel 3 prefill": _conv(2048, 3, 256, columns=2, silu=False),
        "causal_conv1d bf16 2560 kernel 8 prefill": _conv(2560, 8, 256, columns=7),
        "selective_scan bf16 8192 decode": _selective_scan(falcon_mamba, 1),
        "selective_scan bf16 8192 4 tokens": _selective_scan(falcon_mamba, 4),
        "selective_scan bf16 8192 prefill": _selective_scan(falcon_mamba, 256),
        "selective_scan bf16 2 heads of 3712 prefill": _selective_scan(zamba, 256, state_dtype=_BF16),
        "selective_scan fp32 8192 prefill": _selective_scan(falcon_mamba, 256, dtype=_FP32),
        "rg_lru bf16 2560 decode": _rg_lru(2560, 1),
        "rg_lru bf16 2560 prefill": _rg_lru(2560, 256),
    }
