"""Cache layouts NHD versus HND as one canonical strided view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from hybridkv_kernels._checks import expect

if TYPE_CHECKING:
    import torch

Layout: TypeAlias = Literal["NHD", "HND"]


def as_nhd(cache: torch.Tensor, layout: Layout) -> torch.Tensor:
    """View a cache as `[num_blocks, block_size, num_heads, head_dim]`; no bytes move.

    Shapes: NHD `[num_blocks, block_size, num_heads, head_dim]`, HND `[num_blocks, num_heads, block_size, head_dim]`.
    Raises: ValueError for another layout or another number of dimensions.
    """
    expect(layout in ("NHD", "HND"), "layout", "'NHD' or 'HND'", repr(layout))
    expect(cache.dim() == 4, "cache.dim()", 4, cache.dim())
    return cache if layout == "NHD" else cache.permute(0, 2, 1, 3)
