"""Float8 caches: scales, saturating quantisation in torch, the same bits in Triton.

Contract: code = float8(clamp(x / scale, -max, max)), x and scale in float32, IEEE division, rounding to nearest even;
    infinities saturate, NaN stays NaN (its sign is undefined), formats without a negative zero store +0.

    torch dtype       exponent, mantissa bits   bias   max      largest code   NaN
    float8_e4m3fn     4, 3                      7      448      0x7E           0x7F, 0xFF
    float8_e5m2       5, 2                      15     57344    0x7B           0x7F, 0xFF (reads take 0x7D up)
    float8_e4m3fnuz   4, 3                      8      240      0x7F           0x80
    float8_e5m2fnuz   5, 2                      16     57344    0x7F           0x80

The kernel rounds in integers: not every GPU converts to every format (sm_80 has no e4m3fn, gfx942 only the fnuz ones),
and the bits must not depend on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

import torch

from hybridkv_kernels._checks import expect, expect_one_device, expect_tensor
from hybridkv_kernels._triton import jit, tl

__all__ = [
    "FLOAT8_FORMATS",
    "Float8Format",
    "Scale",
    "check_scale_values",
    "expect_scale",
    "quantize_float8",
    "to_float8_codes",
]

Scale: TypeAlias = float | torch.Tensor


@dataclass(frozen=True)
class Float8Format:
    """What the kernel needs of a format; `max_code` is the code of the largest finite value."""

    mantissa_bits: int
    exponent_bias: int
    max_code: int


FLOAT8_FORMATS: Final[Mapping[torch.dtype, Float8Format]] = MappingProxyType(
    {
        torch.float8_e4m3fn: Float8Format(3, 7, 0x7E),
        torch.float8_e5m2: Float8Format(2, 15, 0x7B),
        torch.float8_e4m3fnuz: Float8Format(3, 8, 0x7F),
        torch.float8_e5m2fnuz: Float8Format(2, 16, 0x7F),
    }
)


def expect_scale(name: str, scale: Scale, cache: torch.Tensor, num_heads: int) -> None:
    """Check a cache's scale without a sync: a positive float, or float32 `[1]` or `[num_heads]` beside the cache.

    Raises: ValueError naming the argument, what was expected, what was given; a scale other than 1.0 for a cache that
        is not float8 is refused, since nothing would apply it.
    """
    if cache.dtype not in FLOAT8_FORMATS:
        plain = isinstance(scale, float | int) and scale == 1.0
        expect(plain, name, f"1.0 for a cache of {cache.dtype} (scales are for float8 caches)", scale)
    elif isinstance(scale, torch.Tensor):
        expect_tensor(name, scale, torch.float32, (None,))
        expect(scale.shape[0] in (1, num_heads), f"{name}.shape", f"[1] or [{num_heads}]", list(scale.shape))
        expect(scale.is_contiguous(), f"{name}.stride()", "contiguous", scale.stride())
        expect_one_device((("the cache", cache), (name, scale)))
    else:
        expect(math.isfinite(scale) and scale > 0, name, "a finite number > 0", scale)


def check_scale_values(name: str, scale: Scale) -> None:
    """Check that every element of a scale is finite and positive; syncs.

    Raises: ValueError naming the argument, what was expected, what was given.
    """
    for value in scale.tolist() if isinstance(scale, torch.Tensor) else [scale]:
        expect(math.isfinite(value) and value > 0, name, "finite numbers > 0", value)


def quantize_float8(source: torch.Tensor, scale: Scale, dtype: torch.dtype) -> torch.Tensor:
    """Return the codes `[..., H, D]` uint8 of `source` `[..., H, D]`; one scale, or one a head."""
    if not isinstance(scale, torch.Tensor):
        # torch multiplies by the inverse of a host number on a GPU, which rounds differently.
        scale = torch.full((1,), scale, dtype=torch.float32, device=source.device)
    largest = torch.finfo(dtype).max
    # torch's cast does not saturate: beyond the maximum it gives NaN or infinity.
    return (source.float() / scale[:, None]).clamp(-largest, largest).to(dtype).view(torch.uint8)


@jit
def to_float8_codes(
    value: tl.tensor,  # float32
    MANTISSA_BITS: tl.constexpr,
    BIAS: tl.constexpr,
    MAX_CODE: tl.constexpr,
) -> tl.tensor:
    """Return the uint8 codes of the module's contract for values that are already divided by their scale."""
    INFINITY_BITS: tl.constexpr = 0x7F800000
    SHIFT: tl.constexpr = 23 - MANTISSA_BITS
    # A float32 that ends at the step of the subnormals: adding it rounds a small value to whole steps.
    STEPS_EXPONENT: tl.constexpr = 24 - BIAS - MANTISSA_BITS
    STEPS_BITS: tl.constexpr = (127 + STEPS_EXPONENT) << 23
    MIN_NORMAL_BITS: tl.constexpr = (128 - BIAS) << 23
    IS_FNUZ: tl.constexpr = BIAS == 1 << (6 - MANTISSA_BITS)
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > INFINITY_BITS
    magnitude = tl.minimum(magnitude, INFINITY_BITS)
    half = (1 << (SHIFT - 1)) - 1 + ((magnitude >> SHIFT) & 1)
    normal = ((magnitude + half) >> SHIFT) - ((127 - BIAS) << MANTISSA_BITS)
    small = tl.minimum(magnitude, MIN_NORMAL_BITS).to(tl.float32, bitcast=True)
    subnormal = (small + 2.0**STEPS_EXPONENT).to(tl.int32, bitcast=True) - STEPS_BITS
    code = tl.where(magnitude < MIN_NORMAL_BITS, subnormal, tl.minimum(normal, MAX_CODE))
    if IS_FNUZ:
        code = tl.where(code == 0, 0, code | sign)
        code = tl.where(is_nan, 0x80, code)
    else:
        code = tl.where(is_nan, 0x7F, code) | sign
    return code.to(tl.uint8)
