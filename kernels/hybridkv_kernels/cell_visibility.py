"""Mask of the cells that each query token sees.

Contract
    visible(t, c) = cell_rows[c] == token_rows[t] >= 0  and  lowest(p) <= cell_positions[c] <= p,   p = positions[t]
    lowest(p)     = 0                         kind FULL
                  = max(0, p - size + 1)      kind SLIDING_WINDOW, a window of `size` tokens that counts the query
                  = p // size * size          kind CHUNKED
    out[t, c]     = visible(t, c)             bool
                  = 0.0 if visible else -inf  a float dtype: what is added to the scores

Shapes
    token_rows  [T]     int32   table row of each query token, -1 for padding: it sees nothing
    positions   [T]     int64   position of each query token
    cells       Cells of capacity C (`cells`); its empty cells are seen by no query
    out         [T, C]  bool, float32, float16 or bfloat16   any row stride; every element is written

Grid: (T, cdiv(C, BLOCK)).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from hybridkv_kernels._checks import expect, expect_last_dim_contiguous, expect_one_device, expect_tensor
from hybridkv_kernels._triton import Launch, jit, tl
from hybridkv_kernels.cells import Cells

__all__ = [
    "CellMask",
    "MaskKind",
    "cell_visibility",
    "cell_visibility_reference",
    "cell_visibility_torch",
    "check_cell_visibility",
    "prepare_cell_visibility",
]

_BLOCK_CELLS = 1024
_OUT_DTYPES = (torch.bool, torch.float32, torch.float16, torch.bfloat16)


class MaskKind(IntEnum):
    """Which earlier tokens of its sequence a token sees."""

    FULL = 0
    SLIDING_WINDOW = 1
    CHUNKED = 2


@dataclass(frozen=True)
class CellMask:
    """A kind of mask with its window or chunk in tokens; `size` is not read for FULL.

    Raises: ValueError for a window or chunk below 1.
    """

    kind: MaskKind
    size: int = 1

    def __post_init__(self) -> None:
        expect(self.size >= 1, "mask.size", ">= 1 token", self.size)

    def lowest(self, position: int) -> int:
        """Return the first position that a query at `position` (>= 0) sees."""
        if self.kind is MaskKind.SLIDING_WINDOW:
            return max(0, position - self.size + 1)
        return position // self.size * self.size if self.kind is MaskKind.CHUNKED else 0


def _check_shapes(token_rows: torch.Tensor, positions: torch.Tensor, cells: Cells, out: torch.Tensor) -> None:
    num_tokens = positions.shape[0]
    expect_tensor("token_rows", token_rows, torch.int32, (num_tokens,))
    expect_tensor("positions", positions, torch.int64, (num_tokens,))
    expect(out.dtype in _OUT_DTYPES, "out.dtype", f"one of {_OUT_DTYPES}", out.dtype)
    expect_tensor("out", out, None, (num_tokens, cells.capacity))
    named = (("token_rows", token_rows), ("positions", positions))
    for name, tensor in named:
        expect(tensor.is_contiguous(), f"{name}.stride()", "contiguous", tensor.stride())
    expect_one_device((*named, ("cells.ids", cells.ids), ("out", out)))


def check_cell_visibility(
    token_rows: torch.Tensor, positions: torch.Tensor, cells: Cells, *, out: torch.Tensor
) -> None:
    """Check shapes, then that no query lies before its sequence; syncs, for tests and debugging.

    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(token_rows, positions, cells, out)
    for token, (row, position) in enumerate(zip(token_rows.tolist(), positions.tolist(), strict=True)):
        expect(row < 0 or position >= 0, f"positions[{token}]", ">= 0", position)


def cell_visibility_reference(
    token_rows: torch.Tensor, positions: torch.Tensor, cells: Cells, *, mask: CellMask, out: torch.Tensor
) -> None:
    """Fill the mask pair by pair.

    Shapes, dtypes: as in the module's contract.
    """
    cell_list = list(zip(cells.rows.tolist(), cells.positions.tolist(), strict=True))
    for t, (row, position) in enumerate(zip(token_rows.tolist(), positions.tolist(), strict=True)):
        for c, (cell_row, cell_position) in enumerate(cell_list):
            visible = cell_row == row >= 0 and mask.lowest(position) <= cell_position <= position
            out[t, c] = visible if out.dtype == torch.bool else (0.0 if visible else float("-inf"))


def cell_visibility_torch(
    token_rows: torch.Tensor, positions: torch.Tensor, cells: Cells, *, mask: CellMask, out: torch.Tensor
) -> None:
    """Fill the mask with torch operations on any device; no sync.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype or device.
    """
    _check_shapes(token_rows, positions, cells, out)
    lowest = torch.zeros_like(positions)
    if mask.kind is MaskKind.SLIDING_WINDOW:
        lowest = (positions - mask.size + 1).clamp_(min=0)
    elif mask.kind is MaskKind.CHUNKED:
        lowest = positions // mask.size * mask.size
    visible = (cells.rows == token_rows[:, None]) & (token_rows >= 0)[:, None]
    visible &= (cells.positions <= positions[:, None]) & (cells.positions >= lowest[:, None])
    if out.dtype == torch.bool:
        out.copy_(visible)
    else:
        out.zero_().masked_fill_(~visible, float("-inf"))


@jit
def _cell_visibility_kernel(
    token_rows_ptr: tl.tensor,  # [T] int32
    positions_ptr: tl.tensor,  # [T] int64
    cell_rows_ptr: tl.tensor,  # [C] int32
    cell_positions_ptr: tl.tensor,  # [C] int64
    out_ptr: tl.tensor,  # [T, C] bool or float
    stride_out: tl.tensor,
    capacity: tl.tensor,
    size: tl.tensor,
    KIND: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    IS_BOOL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    cell = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_list = cell < capacity
    row = tl.load(token_rows_ptr + token)
    # No cell lies in 0..-1, so a padding token sees none.
    position = tl.where(row >= 0, tl.load(positions_ptr + token), -1)
    lowest = tl.full((), 0, tl.int64)
    if KIND == WINDOW:
        lowest = tl.maximum(position - size + 1, 0)
    elif KIND == CHUNKED:
        lowest = tl.maximum(position, 0) // size * size
    cell_row = tl.load(cell_rows_ptr + cell, mask=in_list, other=-1)
    cell_position = tl.load(cell_positions_ptr + cell, mask=in_list, other=-1)
    visible = (cell_row == row) & (cell_position <= position) & (cell_position >= lowest)
    out = out_ptr + token * stride_out + cell
    if IS_BOOL:
        tl.store(out, visible, mask=in_list)
    else:
        tl.store(out, tl.where(visible, 0.0, float("-inf")).to(out_ptr.dtype.element_ty), mask=in_list)


def prepare_cell_visibility(
    token_rows: torch.Tensor, positions: torch.Tensor, cells: Cells, *, mask: CellMask, out: torch.Tensor
) -> Launch:
    """Check shapes, dtypes, strides without a sync, then return the launch that `cell_visibility` runs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(token_rows, positions, cells, out)
    expect_last_dim_contiguous("out", out)
    num_tokens, capacity = out.shape
    return Launch(
        name="cell_visibility",
        kernel=_cell_visibility_kernel,
        grid=(num_tokens, -(-capacity // _BLOCK_CELLS), 1),
        args=(token_rows, positions, cells.rows, cells.positions, out, out.stride(0), capacity, mask.size),
        options={
            "KIND": int(mask.kind),
            "WINDOW": int(MaskKind.SLIDING_WINDOW),
            "CHUNKED": int(MaskKind.CHUNKED),
            "IS_BOOL": out.dtype == torch.bool,
            "BLOCK": _BLOCK_CELLS,
            "num_warps": 4,
        },
    )


def cell_visibility(
    token_rows: torch.Tensor, positions: torch.Tensor, cells: Cells, *, mask: CellMask, out: torch.Tensor
) -> None:
    """Write the mask of all query tokens with one kernel launch; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device; ImportError without triton.
    """
    prepare_cell_visibility(token_rows, positions, cells, mask=mask, out=out).run()
