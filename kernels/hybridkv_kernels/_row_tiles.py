"""How a flat grid of query tiles finds the row of a tile.

Row r owns the tiles from `query_start_loc[r] // BLOCK_Q + r` on, so T // BLOCK_Q + R tiles hold every row.
"""

from __future__ import annotations

from hybridkv_kernels._triton import jit, tl

__all__ = ["find_row"]


@jit
def find_row(query_start_ptr: tl.tensor, tile: tl.tensor, num_rows: tl.tensor, BLOCK_Q: tl.constexpr) -> tl.tensor:
    """Return the last batch row whose first tile is at or before `tile`."""
    low = tile * 0
    high = low + num_rows
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = tl.load(query_start_ptr + middle) // BLOCK_Q + middle
        low = tl.where(first_tile <= tile, middle, low)
        high = tl.where(first_tile <= tile, high, middle)
    return low
