"""Page index `block_offsets`: where the K half and the V half of every block lie in a pool, as TensorRT-LLM wants it.

Contract
    out[pool, i, plane, c] = kernel_id * scale + shift       (scale, k_shift, v_shift) = pools[pool],
                                                             shift = k_shift in plane 0, v_shift in plane 1
    kernel_id = entry * ratio + c % ratio                    of ordinal base + c // ratio of row rows[i], if it is in
                                                             use (`group_rows`) and not null
              = NULL_BLOCK_ID                                otherwise: an offset of the null block, which may be read
    base      = 0, or the row's first live ordinal if `window_local`

    An offset counts units of the pool's one K or V block: with L layers in a pool, K beside V, a block of the manager
    is scale = 2 * L units, layer l reads (2 * L, 2 * l, 2 * l + 1), or has 2 * l in its base pointer. With K and V in
    separate pools the scale is L and both shifts are equal. `ratio` is the number of kernel blocks in a block: all of
    them are given where the block is in use.

Shapes
    batch   GroupRows over [R] batch positions; blocks of context-parallel ranks are given by ordinal
    pools   [P, 3]        int64   scale, k_shift, v_shift
    out     [P, R, 2, W]  int32   W in kernel blocks; any strides, last dimension contiguous; every element is written

Invariants
    P1..P3 of `group_rows`
    I1  every block in use has a column: (its ordinal - base + 1) * ratio <= W
    I2  offsets are in 0..2**31 - 1

Grid: (R, cdiv(W, BLOCK), P).
"""

from __future__ import annotations

import torch

from hybridkv_kernels._checks import expect, expect_last_dim_contiguous, expect_one_device, expect_tensor
from hybridkv_kernels._triton import Launch, jit, tl
from hybridkv_kernels.constants import NULL_BLOCK_ID
from hybridkv_kernels.group_rows import (
    GroupRows,
    check_group_rows,
    gather_entries,
    load_entries,
    load_rows,
    used_ordinals,
)

__all__ = [
    "block_offsets",
    "block_offsets_reference",
    "block_offsets_torch",
    "check_block_offsets",
    "prepare_block_offsets",
]

_BLOCK_COLUMNS = 256
_POOL_COLUMNS = 3
_INT32_MAX = 2**31 - 1


def _check_shapes(batch: GroupRows, pools: torch.Tensor, ratio: int, out: torch.Tensor) -> None:
    expect_tensor("pools", pools, torch.int64, (None, _POOL_COLUMNS))
    expect(pools.is_contiguous(), "pools.stride()", "contiguous", pools.stride())
    expect_tensor("out", out, torch.int32, (pools.shape[0], batch.num_rows, 2, None))
    expect(ratio >= 1, "ratio", ">= 1 kernel blocks a block", ratio)
    expect_one_device((("words", batch.words), ("pools", pools), ("out", out)))


def check_block_offsets(
    batch: GroupRows, pools: torch.Tensor, *, ratio: int = 1, window_local: bool = False, out: torch.Tensor
) -> None:
    """Check the invariants; syncs, for tests and debugging.

    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(batch, pools, ratio, out)
    check_group_rows(batch)
    words, meta = batch.words.tolist(), batch.meta
    highest = NULL_BLOCK_ID
    for row, seq_len in zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True):
        live = meta.live_ordinals(words, row)
        used = range(live.start, min(live.stop, -(-seq_len // meta.span)))
        if not used:
            continue
        columns = (used.stop - (used.start if window_local else 0)) * ratio
        expect(columns <= out.shape[3], f"row {row}: columns", f"<= {out.shape[3]} (W)", columns)
        highest = max(highest, max(meta.entry(words, row, ordinal) for ordinal in used) * ratio + ratio - 1)
    for pool, (scale, *shifts) in enumerate(pools.tolist()):
        expect(scale >= 0 and min(shifts) >= 0, f"pools[{pool}]", "no value below 0", (scale, *shifts))
        offset = highest * scale + max(shifts)
        expect(offset <= _INT32_MAX, f"pools[{pool}]: highest offset", f"<= {_INT32_MAX}", offset)


def block_offsets_reference(
    batch: GroupRows, pools: torch.Tensor, *, ratio: int = 1, window_local: bool = False, out: torch.Tensor
) -> None:
    """Fill the offsets one by one.

    Shapes, dtypes: as in the module's contract.
    """
    words, meta = batch.words.tolist(), batch.meta
    for index, (row, seq_len) in enumerate(zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True)):
        base = meta.live_ordinals(words, row).start if window_local else 0
        for column in range(out.shape[3]):
            ordinal = base + column // ratio
            entry = meta.entry(words, row, ordinal) if ordinal * meta.span < seq_len else NULL_BLOCK_ID
            kernel_id = NULL_BLOCK_ID if entry == NULL_BLOCK_ID else entry * ratio + column % ratio
            for pool, (scale, k_shift, v_shift) in enumerate(pools.tolist()):
                out[pool, index, 0, column] = kernel_id * scale + k_shift
                out[pool, index, 1, column] = kernel_id * scale + v_shift


def block_offsets_torch(
    batch: GroupRows, pools: torch.Tensor, *, ratio: int = 1, window_local: bool = False, out: torch.Tensor
) -> None:
    """Fill the offsets with torch operations on any device; no sync.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype or device.
    """
    _check_shapes(batch, pools, ratio, out)
    used, num_columns = used_ordinals(batch), out.shape[3]
    ordinals = torch.arange(-(-num_columns // ratio), device=out.device)[None, :]
    entries = gather_entries(batch, used, ordinals + used.first[:, None] if window_local else ordinals)[:, :, None]
    ids = entries * ratio + torch.arange(ratio, device=out.device)  # [R, J, ratio]
    ids = ids.masked_fill_(entries == NULL_BLOCK_ID, NULL_BLOCK_ID).flatten(1)[:, :num_columns]
    scale, shifts = pools[:, :1, None, None], pools[:, None, 1:, None]  # [P, 1, 1, 1], [P, 1, 2, 1]
    out.copy_(ids[None, :, None, :] * scale + shifts)


@jit
def _block_offsets_kernel(
    words_ptr: tl.tensor,  # [num_words] int32
    rows_ptr: tl.tensor,  # [R] int32
    seq_lens_ptr: tl.tensor,  # [R] int32
    table_offset: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    first_offset: tl.tensor,
    count_offset: tl.tensor,
    span: tl.tensor,
    pools_ptr: tl.tensor,  # [P, 3] int64
    out_ptr: tl.tensor,  # [P, R, 2, W] int32
    stride_pool: tl.tensor,
    stride_row: tl.tensor,
    stride_plane: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    ratio: tl.tensor,
    POOL_COLUMNS: tl.constexpr,
    WINDOW_LOCAL: tl.constexpr,
    NULL_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pool = tl.program_id(2).to(tl.int64)
    row, first, end, _ = load_rows(
        words_ptr, rows_ptr, seq_lens_ptr, first_offset, count_offset, span, index, index < num_rows
    )
    ordinal = column // ratio
    if WINDOW_LOCAL:
        ordinal += first
    entry = load_entries(words_ptr, table_offset, row_stride, width, row, first, end, ordinal, NULL_BLOCK)
    kernel_id = tl.where(entry != NULL_BLOCK, entry * ratio + column % ratio, NULL_BLOCK)
    pool_row = pools_ptr + pool * POOL_COLUMNS
    offset = kernel_id * tl.load(pool_row)
    out = out_ptr + pool * stride_pool + index * stride_row + column
    in_row = column < num_columns
    tl.store(out, (offset + tl.load(pool_row + 1)).to(tl.int32), mask=in_row)
    tl.store(out + stride_plane, (offset + tl.load(pool_row + 2)).to(tl.int32), mask=in_row)


def prepare_block_offsets(
    batch: GroupRows, pools: torch.Tensor, *, ratio: int = 1, window_local: bool = False, out: torch.Tensor
) -> Launch:
    """Check shapes, dtypes, strides without a sync, then return the launch that `block_offsets` runs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(batch, pools, ratio, out)
    expect_last_dim_contiguous("out", out)
    num_pools, num_rows, _, num_columns = out.shape
    return Launch(
        name="block_offsets",
        kernel=_block_offsets_kernel,
        grid=(num_rows, -(-num_columns // _BLOCK_COLUMNS), num_pools),
        args=(*batch.kernel_args, pools, out, *out.stride()[:3], num_rows, num_columns, ratio),
        options={
            "POOL_COLUMNS": _POOL_COLUMNS,
            "WINDOW_LOCAL": window_local,
            "NULL_BLOCK": NULL_BLOCK_ID,
            "BLOCK": _BLOCK_COLUMNS,
            "num_warps": 4,
        },
    )


def block_offsets(
    batch: GroupRows, pools: torch.Tensor, *, ratio: int = 1, window_local: bool = False, out: torch.Tensor
) -> None:
    """Write the K and V offsets of all pools with one kernel launch; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device; ImportError without triton.
    """
    prepare_block_offsets(batch, pools, ratio=ratio, window_local=window_local, out=out).run()
