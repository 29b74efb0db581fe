"""Launches of the copying ops on empty tensors, at the sizes of real models."""

from __future__ import annotations

import torch

from hybridkv_kernels._float8 import Scale
from hybridkv_kernels._triton import Launch
from hybridkv_kernels.block_copy import prepare_copy_blocks
from hybridkv_kernels.kv_write import prepare_write_kv

_BF16, _FP32 = torch.bfloat16, torch.float32
_NUM_TOKENS, _NUM_HEADS, _NUM_BLOCKS, _BLOCK_SIZE = 256, 8, 64, 16


def _write_kv(key_dim: int, value_dim: int, cache_dtype: torch.dtype = _BF16, scale: Scale = 1.0) -> Launch:
    return prepare_write_kv(
        torch.empty(_NUM_TOKENS, _NUM_HEADS, key_dim, dtype=_BF16),
        torch.empty(_NUM_TOKENS, _NUM_HEADS, value_dim, dtype=_BF16),
        torch.empty(_NUM_BLOCKS, _BLOCK_SIZE, _NUM_HEADS, key_dim, dtype=cache_dtype),
        torch.empty(_NUM_BLOCKS, _BLOCK_SIZE, _NUM_HEADS, value_dim, dtype=cache_dtype),
        torch.empty(_NUM_TOKENS, dtype=torch.int64),
        k_scale=scale,
        v_scale=scale,
    )


def _copy_blocks(dtype: torch.dtype) -> Launch:
    num_copies, num_groups = 256, 8
    return prepare_copy_blocks(
        torch.empty(1 << 26, dtype=torch.uint8),
        torch.empty(num_copies, 3, dtype=dtype),
        torch.empty(1, dtype=torch.int32),
        torch.empty(num_groups, 2, dtype=torch.int64),
    )


def copy_launches() -> dict[str, Launch]:
    """Return the launches under the names they have in the table."""
    per_tensor, per_head = torch.empty(1, dtype=_FP32), torch.empty(_NUM_HEADS, dtype=_FP32)
    return {
        "write_kv bf16 64": _write_kv(64, 64),
        "write_kv bf16 128": _write_kv(128, 128),
        "write_kv bf16 256": _write_kv(256, 256),
        "write_kv bf16 192/128": _write_kv(192, 128),
        "write_kv e4m3fn 128": _write_kv(128, 128, torch.float8_e4m3fn, 0.5),
        "write_kv e4m3fn 128 scale tensor": _write_kv(128, 128, torch.float8_e4m3fn, per_tensor),
        "write_kv e4m3fn 256 scale per head": _write_kv(256, 256, torch.float8_e4m3fn, per_head),
        "write_kv e5m2 128": _write_kv(128, 128, torch.float8_e5m2, 0.5),
        "write_kv e4m3fnuz 128 scale per head": _write_kv(128, 128, torch.float8_e4m3fnuz, per_head),
        "copy_blocks int32": _copy_blocks(torch.int32),
        "copy_blocks int64": _copy_blocks(torch.int64),
    }
