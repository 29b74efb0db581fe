"""Block table of kernels whose blocks are smaller than the manager's.

Contract
    out[n, c] = entries[n, c // ratio] * ratio + c % ratio     if entries[n, c // ratio] != NULL_BLOCK_ID
              = NULL_BLOCK_ID                                  otherwise, and from column J * ratio on

    A block of B tokens is `ratio` kernel blocks of B / ratio tokens, one after another in memory. The ring goes on:
    kernel ordinal k of a row of `width` blocks is in column `k % (width * ratio)`.

Shapes
    entries  [N, J]  int32   any row stride, last dimension contiguous
    out      [N, W]  int32   any row stride, last dimension contiguous; every element is written

Invariants
    I1  entries are >= 0 and (entry + 1) * ratio <= 2**31
    I2  J * ratio <= W, so that no kernel block is left out

Grid: (N, cdiv(W, BLOCK)).
"""

from __future__ import annotations

import torch

from hybridkv_kernels._checks import expect, expect_last_dim_contiguous, expect_one_device, expect_tensor
from hybridkv_kernels._triton import Launch, jit, tl
from hybridkv_kernels.constants import NULL_BLOCK_ID

__all__ = [
    "check_kernel_block_table",
    "kernel_block_table",
    "kernel_block_table_reference",
    "kernel_block_table_torch",
    "prepare_kernel_block_table",
]

_BLOCK_COLUMNS = 256


def _check_shapes(entries: torch.Tensor, ratio: int, out: torch.Tensor) -> None:
    expect(ratio >= 1, "ratio", ">= 1 kernel blocks a block", ratio)
    expect_tensor("entries", entries, torch.int32, (None, None))
    expect_tensor("out", out, torch.int32, (entries.shape[0], None))
    num_columns = entries.shape[1] * ratio
    expect(num_columns <= out.shape[1], "out.shape[1]", f">= {num_columns} (columns * ratio)", out.shape[1])
    expect_one_device((("entries", entries), ("out", out)))


def check_kernel_block_table(entries: torch.Tensor, ratio: int, *, out: torch.Tensor) -> None:
    """Check the invariants; syncs, for tests and debugging.

    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(entries, ratio, out)
    found = [entry for row in entries.tolist() for entry in row]
    highest_id = 2**31 // ratio - 1
    for entry in (min(found, default=0), max(found, default=0)):
        expect(NULL_BLOCK_ID <= entry <= highest_id, "entries", f"{NULL_BLOCK_ID}..{highest_id}", entry)


def kernel_block_table_reference(entries: torch.Tensor, ratio: int, *, out: torch.Tensor) -> None:
    """Expand entry by entry.

    Shapes, dtypes: as in the module's contract.
    """
    out.fill_(NULL_BLOCK_ID)
    for n, row in enumerate(entries.tolist()):
        for column, entry in enumerate(row):
            for part in range(ratio):
                out[n, column * ratio + part] = NULL_BLOCK_ID if entry == NULL_BLOCK_ID else entry * ratio + part


def kernel_block_table_torch(entries: torch.Tensor, ratio: int, *, out: torch.Tensor) -> None:
    """Expand with torch operations on any device; no sync.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype or device.
    """
    _check_shapes(entries, ratio, out)
    blocks = entries[:, :, None]
    parts = torch.arange(ratio, dtype=torch.int32, device=entries.device)
    expanded = (blocks * ratio + parts).masked_fill_(blocks == NULL_BLOCK_ID, NULL_BLOCK_ID)
    num_columns = entries.shape[1] * ratio
    out[:, :num_columns] = expanded.view(entries.shape[0], num_columns)
    out[:, num_columns:] = NULL_BLOCK_ID


@jit
def _kernel_block_table_kernel(
    entries_ptr: tl.tensor,  # [N, J] int32
    out_ptr: tl.tensor,  # [N, W] int32
    stride_entries: tl.tensor,
    stride_out: tl.tensor,
    num_entries: tl.tensor,
    num_columns: tl.tensor,
    ratio: tl.tensor,
    NULL_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    block = column // ratio
    entry = tl.load(entries_ptr + row * stride_entries + block, mask=block < num_entries, other=NULL_BLOCK)
    kernel_id = tl.where(entry != NULL_BLOCK, entry.to(tl.int64) * ratio + column % ratio, NULL_BLOCK)
    tl.store(out_ptr + row * stride_out + column, kernel_id.to(tl.int32), mask=column < num_columns)


def prepare_kernel_block_table(entries: torch.Tensor, ratio: int, *, out: torch.Tensor) -> Launch:
    """Check shapes, dtypes, strides without a sync, then return the launch that `kernel_block_table` runs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(entries, ratio, out)
    expect_last_dim_contiguous("entries", entries)
    expect_last_dim_contiguous("out", out)
    num_columns = out.shape[1]
    return Launch(
        name="kernel_block_table",
        kernel=_kernel_block_table_kernel,
        grid=(out.shape[0], -(-num_columns // _BLOCK_COLUMNS), 1),
        args=(entries, out, entries.stride(0), out.stride(0), entries.shape[1], num_columns, ratio),
        options={"NULL_BLOCK": NULL_BLOCK_ID, "BLOCK": _BLOCK_COLUMNS, "num_warps": 4},
    )


def kernel_block_table(entries: torch.Tensor, ratio: int, *, out: torch.Tensor) -> None:
    """Write the table of kernel blocks with one kernel launch; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device; ImportError without triton.
    """
    prepare_kernel_block_table(entries, ratio, out=out).run()
