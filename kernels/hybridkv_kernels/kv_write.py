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
    k_scale, v_scale       float, or float32 [1] or [H] on the device; 1.0 unless the cache is float8
    The four float dtypes are free; each source is cast to its cache's dtype. A float8 cache (e4m3fn, e5m2, e4m3fnuz,
    e5m2fnuz) stores clamp(x / scale, -max, max), rounded to nearest even; NaN stays NaN; the same bits on every GPU
    (see `_float8`). Tokens that are float8 already are written through uint8 views of both.

Invariants
    I1  slots are -1 or in [block_size, num_blocks * block_size)
    I2  no slot occurs twice, else the winner is undefined
    I3  scales are finite and > 0

Grid: (T, cdiv(H, BLOCK_H)); it depends on the padded number of tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridkv_kernels._checks import expect, expect_last_dim_contiguous, expect_one_device, expect_tensor
from hybridkv_kernels._float8 import (
    FLOAT8_FORMATS,
    Float8Format,
    Scale,
    check_scale_values,
    expect_scale,
    quantize_float8,
)
from hybridkv_kernels._kv_write_kernels import write_kv_kernel
from hybridkv_kernels._layout import Layout, as_nhd
from hybridkv_kernels._triton import KernelArg, Launch, next_power_of_2
from hybridkv_kernels.constants import NULL_BLOCK_ID, PAD_SLOT_ID

__all__ = ["check_write_kv", "prepare_write_kv", "write_kv", "write_kv_reference", "write_kv_torch"]

_MAX_TILE_ELEMENTS = 2048
_NOT_FLOAT8 = Float8Format(0, 0, 0)


@dataclass(frozen=True)
class _Side:
    """The keys or the values of one call: `source` [T, H, D], the cache as NHD, its scale."""

    name: str
    source: torch.Tensor
    cache: torch.Tensor
    scale: Scale

    @property
    def cells(self) -> torch.Tensor:
        """The cache as its cells are written: float8 as bytes, since the kernel makes the codes itself."""
        return self.cache.view(torch.uint8) if self.cache.dtype in FLOAT8_FORMATS else self.cache

    def stored(self, source: torch.Tensor) -> torch.Tensor:
        """Return tokens `[..., H, D]` as the cells hold them."""
        if self.cache.dtype in FLOAT8_FORMATS:
            return quantize_float8(source, self.scale, self.cache.dtype)
        return source.to(self.cache.dtype)


def _sides(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layout: Layout,
    scales: tuple[Scale, Scale],
) -> tuple[_Side, _Side]:
    return (
        _Side("key", key, as_nhd(key_cache, layout), scales[0]),
        _Side("value", value, as_nhd(value_cache, layout), scales[1]),
    )


def _check_sides(sides: tuple[_Side, _Side], slots: torch.Tensor) -> None:
    """Check everything that needs no sync: shapes, dtypes, devices, scales."""
    num_tokens, num_heads = sides[0].source.shape[:2]
    num_blocks, block_size = sides[0].cache.shape[:2]
    named = [("slot_mapping", slots)]
    for side in sides:
        source, cache = side.source, side.cache
        expect_tensor(side.name, source, None, (num_tokens, num_heads, None))
        expect_tensor(f"{side.name}_cache (as NHD)", cache, None, (num_blocks, block_size, num_heads, source.shape[2]))
        expect_scale(f"{side.name[0]}_scale", side.scale, cache, num_heads)
        expected = "another dtype than float8 (to write float8 codes as they are, view both as uint8)"
        expect(source.dtype not in FLOAT8_FORMATS, f"{side.name}.dtype", expected, source.dtype)
        is_float = source.dtype.is_floating_point or cache.dtype not in FLOAT8_FORMATS
        expect(is_float, f"{side.name}.dtype", f"a float dtype for a cache of {cache.dtype}", source.dtype)
        named += [(side.name, source), (f"{side.name}_cache", cache)]
    expect_tensor("slot_mapping", slots, torch.int64, (num_tokens,))
    expect_one_device(named)


def check_write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: Layout = "NHD",
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
) -> None:
    """Check shapes plus the invariants I1 to I3; syncs, for tests and debugging.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    sides = _sides(key, value, key_cache, value_cache, layout, (k_scale, v_scale))
    _check_sides(sides, slot_mapping)
    for side in sides:
        check_scale_values(f"{side.name[0]}_scale", side.scale)
    num_blocks, block_size = sides[0].cache.shape[:2]
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
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
) -> None:
    """Write token by token.

    Shapes, dtypes: as in the module's contract.
    """
    for side in _sides(key, value, key_cache, value_cache, layout, (k_scale, v_scale)):
        for token, slot in enumerate(slot_mapping.tolist()):
            block_id, offset = divmod(slot, side.cache.shape[1])
            if block_id > NULL_BLOCK_ID:
                side.cells[block_id, offset] = side.stored(side.source[token])


def write_kv_torch(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: Layout = "NHD",
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
) -> None:
    """Write with torch indexing on any device, without a sync where the device is not the CPU.

    Off the CPU the shape may not depend on the slots, so a skipped token repeats the write of the first kept token;
    with no kept token at all, slot 0 gets its own bytes back.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype or device.
    """
    sides = _sides(key, value, key_cache, value_cache, layout, (k_scale, v_scale))
    _check_sides(sides, slot_mapping)
    if key.shape[0] == 0:
        return
    if key.device.type != "cpu":
        for side in sides:
            _write_fixed_shape(side, slot_mapping)
        return
    block_size = sides[0].cache.shape[1]
    tokens = (slot_mapping >= (NULL_BLOCK_ID + 1) * block_size).nonzero().squeeze(1)
    slots = slot_mapping[tokens]
    block_ids, offsets = slots // block_size, slots % block_size
    for side in sides:
        side.cells[block_ids, offsets] = side.stored(side.source[tokens])


def _fixed_shape_targets(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each token which token to write `[T]`, to which slot `[T]`; see `write_kv_torch`."""
    kept = slots >= (NULL_BLOCK_ID + 1) * block_size
    every_token = torch.arange(slots.shape[0], device=slots.device)
    token = torch.where(kept, every_token, kept.to(torch.int32).argmax())
    return token, torch.where(kept[token], slots[token], NULL_BLOCK_ID * block_size)


def _write_fixed_shape(side: _Side, slots: torch.Tensor) -> None:
    """Scatter into an NHD cache with shapes that depend on T only."""
    block_size = side.cache.shape[1]
    token, target = _fixed_shape_targets(slots, block_size)
    block_ids, offsets = target // block_size, target % block_size
    is_written = (block_ids != NULL_BLOCK_ID)[:, None, None]
    cells = side.cells
    cells[block_ids, offsets] = torch.where(is_written, side.stored(side.source[token]), cells[block_ids, offsets])


def prepare_write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: Layout = "NHD",
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
) -> Launch:
    """Check shapes, dtypes, strides without a sync, then return the launch that `write_kv` runs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    sides = _sides(key, value, key_cache, value_cache, layout, (k_scale, v_scale))
    _check_sides(sides, slot_mapping)
    expect_last_dim_contiguous("key", key)
    expect_last_dim_contiguous("value", value)
    expect_last_dim_contiguous("slot_mapping", slot_mapping)
    num_tokens, num_heads, key_dim = key.shape
    value_dim = value.shape[2]
    block_dk, block_dv = next_power_of_2(max(key_dim, 1)), next_power_of_2(max(value_dim, 1))
    block_h = max(1, min(next_power_of_2(max(num_heads, 1)), _MAX_TILE_ELEMENTS // max(block_dk, block_dv)))
    key_cells, value_cells = (side.cells for side in sides)
    strides = (*key.stride()[:2], *value.stride()[:2], *key_cells.stride(), *value_cells.stride())
    return Launch(
        name="write_kv",
        kernel=write_kv_kernel,
        grid=(num_tokens, -(-num_heads // block_h), 1),
        args=(
            *(key, value, key_cells, value_cells, slot_mapping),
            *_scale_args((k_scale, v_scale)),
            *(key_cells.shape[1], *strides),
        ),
        options={
            "NUM_HEADS": num_heads,
            "DK": key_dim,
            "DV": value_dim,
            "BLOCK_DK": block_dk,
            "BLOCK_DV": block_dv,
            "BLOCK_H": block_h,
            "NULL_BLOCK": NULL_BLOCK_ID,
            **_format_options("K", key_cache.dtype),
            **_format_options("V", value_cache.dtype),
            "num_warps": 4,
        },
    )


def _scale_args(scales: tuple[Scale, Scale]) -> tuple[KernelArg, ...]:
    """Return the kernel's two pointers, two numbers, two strides."""
    tensors = [scale if isinstance(scale, torch.Tensor) else None for scale in scales]
    numbers = [1.0 if isinstance(scale, torch.Tensor) else float(scale) for scale in scales]
    return (*tensors, *numbers, *(0 if tensor is None or tensor.shape[0] == 1 else 1 for tensor in tensors))


def _format_options(side: str, dtype: torch.dtype) -> dict[str, int]:
    form = FLOAT8_FORMATS.get(dtype, _NOT_FLOAT8)
    return {
        f"{side}_MANTISSA_BITS": form.mantissa_bits,
        f"{side}_BIAS": form.exponent_bias,
        f"{side}_MAX_CODE": form.max_code,
    }


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: Layout = "NHD",
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
) -> None:
    """Write the new tokens of one layer with one kernel launch; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device; ImportError without triton.
    """
    prepare_write_kv(
        key, value, key_cache, value_cache, slot_mapping, layout=layout, k_scale=k_scale, v_scale=v_scale
    ).run()
