"""Scatter of new keys with their values into a paged cache.

Contract
    key_cache[slot // block_size, slot % block_size] = key[t], likewise for values, where slot = slot_mapping[t];
    a token with slot < block_size writes nothing: PAD_SLOT_ID is padding, the slots 0..block_size-1 are the null block.

Shapes
    key            [T, H, Dk]                              any strides, last dimension contiguous
    value          [T, H, Dv]                              any strides, last dimension contiguous
    key_cache      NHD [num_blocks, block_size, H, Dk]     any strides; HND [num_blocks, H, block_size, Dk]
    value_cache    NHD [num_blocks, block_size, H, Dv]     any strides; HND [num_blocks, H, block_size, Dv]
    slot_mapping   [T] int64
    The four float dtypes are free; each source is cast to its cache's dtype.

Invariants
    I1  slots are -1 or in [block_size, num_blocks * block_size)
    I2  no slot occurs twice, else the winner is undefined

Grid: (T, cdiv(H, BLOCK_H)); it depends on the padded number of tokens only.
"""

from __future__ import annotations

import torch

from hybridkv_kernels._checks import expect, expect_last_dim_contiguous, expect_one_device, expect_tensor
from hybridkv_kernels._layout import Layout, as_nhd
from hybridkv_kernels._triton import Launch, jit, next_power_of_2, tl
from hybridkv_kernels.constants import NULL_BLOCK_ID, PAD_SLOT_ID

__all__ = ["check_write_kv", "prepare_write_kv", "write_kv", "write_kv_reference", "write_kv_torch"]

_MAX_TILE_ELEMENTS = 2048


def _check_shapes(
    key: torch.Tensor, value: torch.Tensor, key_nhd: torch.Tensor, value_nhd: torch.Tensor, slots: torch.Tensor
) -> None:
    num_tokens, num_heads = key.shape[0], key.shape[1]
    expect_tensor("key", key, None, (num_tokens, num_heads, None))
    expect_tensor("value", value, None, (num_tokens, num_heads, None))
    expect_tensor("slot_mapping", slots, torch.int64, (num_tokens,))
    num_blocks, block_size = key_nhd.shape[0], key_nhd.shape[1]
    expect_tensor("key_cache (as NHD)", key_nhd, None, (num_blocks, block_size, num_heads, key.shape[2]))
    expect_tensor("value_cache (as NHD)", value_nhd, None, (num_blocks, block_size, num_heads, value.shape[2]))
    named = (("key", key), ("value", value), ("key_cache", key_nhd), ("value_cache", value_nhd))
    expect_one_device((*named, ("slot_mapping", slots)))


def check_write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: Layout = "NHD",
) -> None:
    """Check shapes plus the invariants I1, I2; syncs, for tests and debugging.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    key_nhd = as_nhd(key_cache, layout)
    _check_shapes(key, value, key_nhd, as_nhd(value_cache, layout), slot_mapping)
    num_blocks, block_size = key_nhd.shape[0], key_nhd.shape[1]
    slots = [slot for slot in slot_mapping.tolist() if slot != PAD_SLOT_ID]
    null_end = (NULL_BLOCK_ID + 1) * block_size
    for slot in slots:
        in_cache = null_end <= slot < num_blocks * block_size
        expect(in_cache, "slot_mapping", f"{PAD_SLOT_ID} or {null_end}..{num_blocks * block_size - 1}", slot)
    expect(len(set(slots)) == len(slots), "slot_mapping", "distinct slots", sorted(slots))


def write_kv_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: Layout = "NHD",
) -> None:
    """Write token by token.

    Shapes, dtypes: as in the module's contract.
    """
    key_nhd, value_nhd = as_nhd(key_cache, layout), as_nhd(value_cache, layout)
    block_size = key_nhd.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        block_id, offset = divmod(slot, block_size)
        if block_id <= NULL_BLOCK_ID:
            continue
        key_nhd[block_id, offset] = key[token].to(key_nhd.dtype)
        value_nhd[block_id, offset] = value[token].to(value_nhd.dtype)


def write_kv_torch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: Layout = "NHD",
) -> None:
    """Write with torch indexing on any device, without a sync where the device is not the CPU.

    Off the CPU the shape may not depend on the slots, so a skipped token repeats the write of the first kept token;
    with no kept token at all, slot 0 gets its own bytes back.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype or device.
    """
    key_nhd, value_nhd = as_nhd(key_cache, layout), as_nhd(value_cache, layout)
    _check_shapes(key, value, key_nhd, value_nhd, slot_mapping)
    if key.shape[0] == 0:
        return
    block_size = key_nhd.shape[1]
    if key.device.type == "cpu":
        tokens = (slot_mapping >= (NULL_BLOCK_ID + 1) * block_size).nonzero().squeeze(1)
        slots = slot_mapping[tokens]
        block_ids, offsets = slots // block_size, slots % block_size
        key_nhd[block_ids, offsets] = key[tokens].to(key_nhd.dtype)
        value_nhd[block_ids, offsets] = value[tokens].to(value_nhd.dtype)
        return
    _write_fixed_shape(key, key_nhd, slot_mapping)
    _write_fixed_shape(value, value_nhd, slot_mapping)


def _fixed_shape_targets(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each token which token to write `[T]`, to which slot `[T]`; see `write_kv_torch`."""
    kept = slots >= (NULL_BLOCK_ID + 1) * block_size
    every_token = torch.arange(slots.shape[0], device=slots.device)
    token = torch.where(kept, every_token, kept.to(torch.int32).argmax())
    return token, torch.where(kept[token], slots[token], NULL_BLOCK_ID * block_size)


def _write_fixed_shape(source: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Scatter `[T, H, D]` into an NHD cache with shapes that depend on T only."""
    block_size = cache.shape[1]
    token, target = _fixed_shape_targets(slots, block_size)
    block_ids, offsets = target // block_size, target % block_size
    is_written = (block_ids != NULL_BLOCK_ID)[:, None, None]
    cache[block_ids, offsets] = torch.where(is_written, source[token].to(cache.dtype), cache[block_ids, offsets])


@jit
def _copy_heads(
    source_ptr: tl.tensor,  # the token's [H, D]
    cache_ptr: tl.tensor,  # the slot's [H, D]
    heads: tl.tensor,  # [BLOCK_H] int64
    stride_source_head: tl.tensor,
    stride_cache_head: tl.tensor,
    stride_cache_dim: tl.tensor,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    dims = tl.arange(0, BLOCK_D)
    mask = (heads < NUM_HEADS)[:, None] & (dims < DIM)[None, :]
    tile = tl.load(source_ptr + heads[:, None] * stride_source_head + dims[None, :], mask=mask)
    cache_offsets = heads[:, None] * stride_cache_head + dims[None, :].to(tl.int64) * stride_cache_dim
    tl.store(cache_ptr + cache_offsets, tile.to(cache_ptr.dtype.element_ty), mask=mask)


@jit
def _write_kv_kernel(
    key_ptr: tl.tensor,  # [T, H, Dk]
    value_ptr: tl.tensor,  # [T, H, Dv]
    key_cache_ptr: tl.tensor,  # [num_blocks, block_size, H, Dk]
    value_cache_ptr: tl.tensor,  # [num_blocks, block_size, H, Dv]
    slots_ptr: tl.tensor,  # [T] int64
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
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < (NULL_BLOCK + 1) * block_size:
        return
    block_id = slot // block_size
    offset = slot % block_size
    heads = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    key_row = key_ptr + token * stride_k_token
    key_slot = key_cache_ptr + block_id * stride_kc_block + offset * stride_kc_token
    _copy_heads(key_row, key_slot, heads, stride_k_head, stride_kc_head, stride_kc_dim, NUM_HEADS, DK, BLOCK_DK)
    value_row = value_ptr + token * stride_v_token
    value_slot = value_cache_ptr + block_id * stride_vc_block + offset * stride_vc_token
    _copy_heads(value_row, value_slot, heads, stride_v_head, stride_vc_head, stride_vc_dim, NUM_HEADS, DV, BLOCK_DV)


def prepare_write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: Layout = "NHD",
) -> Launch:
    """Check shapes, dtypes, strides without a sync, then return the launch that `write_kv` runs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    key_nhd, value_nhd = as_nhd(key_cache, layout), as_nhd(value_cache, layout)
    _check_shapes(key, value, key_nhd, value_nhd, slot_mapping)
    expect_last_dim_contiguous("key", key)
    expect_last_dim_contiguous("value", value)
    expect_last_dim_contiguous("slot_mapping", slot_mapping)
    num_tokens, num_heads, key_dim = key.shape
    value_dim = value.shape[2]
    block_dk, block_dv = next_power_of_2(max(key_dim, 1)), next_power_of_2(max(value_dim, 1))
    block_h = max(1, min(next_power_of_2(max(num_heads, 1)), _MAX_TILE_ELEMENTS // max(block_dk, block_dv)))
    strides = (*key.stride()[:2], *value.stride()[:2], *key_nhd.stride(), *value_nhd.stride())
    return Launch(
        name="write_kv",
        kernel=_write_kv_kernel,
        grid=(num_tokens, -(-num_heads // block_h), 1),
        args=(key, value, key_nhd, value_nhd, slot_mapping, key_nhd.shape[1], *strides),
        options={
            "NUM_HEADS": num_heads,
            "DK": key_dim,
            "DV": value_dim,
            "BLOCK_DK": block_dk,
            "BLOCK_DV": block_dv,
            "BLOCK_H": block_h,
            "NULL_BLOCK": NULL_BLOCK_ID,
            "num_warps": 4,
        },
    )


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: Layout = "NHD",
) -> None:
    """Write the new tokens of one layer with one kernel launch; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device; ImportError without triton.
    """
    prepare_write_kv(key, value, key_cache, value_cache, slot_mapping, layout=layout).run()
