"""How runs of neighbours along the columns of a row are numbered and stored."""

from __future__ import annotations

import torch

from hybridkv_kernels._triton import jit, tl

__all__ = ["running_max", "store_marked"]


def store_marked(out: torch.Tensor, segment: torch.Tensor, is_marked: torch.Tensor, values: torch.Tensor) -> None:
    """Store `values[r, j]` to `out[r, segment[r, j]]` where `is_marked[r, j]` and the segment exists; no sync.

    Shapes: out [R, S], segment, is_marked, values [R, J]; no two marked columns of a row name one segment.
    """
    num_rows, num_segments = out.shape
    wide = torch.cat([out, out.new_empty(num_rows, 1)], dim=1)  # one more column takes what is not stored
    target = torch.where(is_marked, segment, num_segments).clamp_(max=num_segments)
    wide.scatter_(1, target, values.to(out.dtype))
    out.copy_(wide[:, :num_segments])


@jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b)


@jit
def running_max(values: tl.tensor) -> tl.tensor:
    """Return at each place of a vector the largest value up to it."""
    return tl.associative_scan(values, 0, _larger)
