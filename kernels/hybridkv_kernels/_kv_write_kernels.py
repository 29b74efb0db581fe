"""Triton kernel of the K/V write; its contract is in `kv_write`."""

from __future__ import annotations

from hybridkv_kernels._float8 import to_float8_codes
from hybridkv_kernels._triton import jit, tl


@jit
def _copy_heads(
    source_ptr: tl.tensor,  # the token's [H, D]
    cache_ptr: tl.tensor,  # the slot's [H, D], uint8 for a float8 cache
    scale: tl.tensor,  # scalar or [BLOCK_H] float32, of a float8 cache
    heads: tl.tensor,  # [BLOCK_H] int64
    stride_source_head: tl.tensor,
    stride_cache_head: tl.tensor,
    stride_cache_dim: tl.tensor,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,  # 0 if the cache is not float8
    BIAS: tl.constexpr,
    MAX_CODE: tl.constexpr,
) -> None:
    dims = tl.arange(0, BLOCK_D)
    mask = (heads < NUM_HEADS)[:, None] & (dims < DIM)[None, :]
    tile = tl.load(source_ptr + heads[:, None] * stride_source_head + dims[None, :], mask=mask)
    if MANTISSA_BITS > 0:
        # `/` is approximate on a GPU.
        tile = tl.div_rn(tile.to(tl.float32), tl.broadcast_to(scale[:, None], tile.shape))
        tile = to_float8_codes(tile, MANTISSA_BITS, BIAS, MAX_CODE)
    cache_offsets = heads[:, None] * stride_cache_head + dims[None, :].to(tl.int64) * stride_cache_dim
    tl.store(cache_ptr + cache_offsets, tile.to(cache_ptr.dtype.element_ty), mask=mask)


@jit
def _load_scales(
    scale_ptr: tl.tensor,  # [1] or [H] float32, or None
    scale: tl.tensor,  # float32, used where there is no tensor
    stride: tl.tensor,  # 0 or 1
    heads: tl.tensor,  # [BLOCK_H] int64
    NUM_HEADS: tl.constexpr,
) -> tl.tensor:
    if scale_ptr is None:
        scales = tl.zeros(heads.shape, tl.float32) + scale
    else:
        scales = tl.load(scale_ptr + heads * stride, mask=heads < NUM_HEADS, other=1.0)
    return scales


@jit
def write_kv_kernel(
    key_ptr: tl.tensor,  # [T, H, Dk]
    value_ptr: tl.tensor,  # [T, H, Dv]
    key_cache_ptr: tl.tensor,  # [num_blocks, block_size, H, Dk]
    value_cache_ptr: tl.tensor,  # [num_blocks, block_size, H, Dv]
    slots_ptr: tl.tensor,  # [T] int64
    k_scale_ptr: tl.tensor,  # [1] or [H] float32, or None
    v_scale_ptr: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    stride_k_scale: tl.tensor,
    stride_v_scale: tl.tensor,
    block_size: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_kc_block: tl.tensor,
    stride_kc_token: tl.tensor,
    stride_kc_head: tl.tensor,
    stride_kc_dim: tl.tensor,
    stride_vc_block: tl.tensor,
    stride_vc_token: tl.tensor,
    stride_vc_head: tl.tensor,
    stride_vc_dim: tl.tensor,
    NUM_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NULL_BLOCK: tl.constexpr,
    K_MANTISSA_BITS: tl.constexpr,
    K_BIAS: tl.constexpr,
    K_MAX_CODE: tl.constexpr,
    V_MANTISSA_BITS: tl.constexpr,
    V_BIAS: tl.constexpr,
    V_MAX_CODE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < (NULL_BLOCK + 1) * block_size:
        return
    block_id = slot // block_size
    offset = slot % block_size
    heads = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    k_scales = _load_scales(k_scale_ptr, k_scale, stride_k_scale, heads, NUM_HEADS)
    _copy_heads(
        key_ptr + token * stride_k_token,
        key_cache_ptr + block_id * stride_kc_block + offset * stride_kc_token,
        k_scales,
        heads,
        stride_k_head,
        stride_kc_head,
        stride_kc_dim,
        NUM_HEADS,
        DK,
        BLOCK_DK,
        K_MANTISSA_BITS,
        K_BIAS,
        K_MAX_CODE,
    )
    v_scales = _load_scales(v_scale_ptr, v_scale, stride_v_scale, heads, NUM_HEADS)
    _copy_heads(
        value_ptr + token * stride_v_token,
        value_cache_ptr + block_id * stride_vc_block + offset * stride_vc_token,
        v_scales,
        heads,
        stride_v_head,
        stride_vc_head,
        stride_vc_dim,
        NUM_HEADS,
        DV,
        BLOCK_DV,
        V_MANTISSA_BITS,
        V_BIAS,
        V_MAX_CODE,
    )
