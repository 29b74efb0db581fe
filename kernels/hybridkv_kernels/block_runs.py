"""Page index `runs`: each row as runs of neighbouring blocks, as DeepInfer's kernels read it.

Contract
    Walk the ordinals in use (`group_rows`) of row rows[i] from max(first live ordinal, first_ordinals[i]) on. A run is
    a longest stretch of ordinals whose block ids rise by one; a null block belongs to no run.

    runs[i, k]  = (block id of the k-th run's first block, its number of blocks), both times `ratio`
                = (0, 0) from the last run on
    counts[i]   = number of runs of the row, also where that is more than max_runs: the list is cut, the count is not

    `ratio` is the number of kernel blocks in a block: a run of blocks is a run of kernel blocks. Ordinals are walked
    in order, so a ring that wrapped gives the runs of its sequence, not of its columns.

Shapes
    batch           GroupRows over [R] batch positions
    first_ordinals  [R]               int32   optional
    runs            [R, max_runs, 2]  int32   contiguous; every element is written
    counts          [R]               int32

Invariants
    P1..P3 of `group_rows`
    I1  no row has more than max_runs runs (width runs always suffice)
    I2  first_ordinals are >= 0, (entry + 1) * ratio <= 2**31

Grid: (R,); a program walks its row in tiles.
"""

from __future__ import annotations

import torch

from hybridkv_kernels._checks import expect, expect_one_device, expect_tensor
from hybridkv_kernels._segments import running_max, store_marked
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

__all__ = ["block_runs", "block_runs_reference", "block_runs_torch", "check_block_runs", "prepare_block_runs"]

_BLOCK_ORDINALS = 512


def _check_shapes(
    batch: GroupRows, first_ordinals: torch.Tensor | None, ratio: int, runs: torch.Tensor, counts: torch.Tensor
) -> None:
    expect_tensor("runs", runs, torch.int32, (batch.num_rows, None, 2))
    expect_tensor("counts", counts, torch.int32, (batch.num_rows,))
    named = [("words", batch.words), ("runs", runs), ("counts", counts)]
    if first_ordinals is not None:
        expect_tensor("first_ordinals", first_ordinals, torch.int32, (batch.num_rows,))
        named.append(("first_ordinals", first_ordinals))
    for name, tensor in named:
        expect(tensor.is_contiguous(), f"{name}.stride()", "contiguous", tensor.stride())
    expect(ratio >= 1, "ratio", ">= 1 kernel blocks a block", ratio)
    expect_one_device(named)


def _list_runs(batch: GroupRows, first_ordinals: torch.Tensor | None) -> list[list[list[int]]]:
    """Return the runs `[start, length]` of every batch position in blocks, block by block."""
    words, meta = batch.words.tolist(), batch.meta
    firsts = [0] * batch.num_rows if first_ordinals is None else first_ordinals.tolist()
    found = []
    for row, seq_len, first in zip(batch.rows.tolist(), batch.seq_lens.tolist(), firsts, strict=True):
        runs: list[list[int]] = []
        expected = NULL_BLOCK_ID
        for ordinal in meta.live_ordinals(words, row):
            if ordinal < first or ordinal * meta.span >= seq_len:
                continue
            entry = meta.entry(words, row, ordinal)
            if entry == NULL_BLOCK_ID:
                expected = NULL_BLOCK_ID
                continue
            if entry == expected:
                runs[-1][1] += 1
            else:
                runs.append([entry, 1])
            expected = entry + 1
        found.append(runs)
    return found


def check_block_runs(
    batch: GroupRows,
    *,
    first_ordinals: torch.Tensor | None = None,
    ratio: int = 1,
    runs: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Check the invariants; syncs, for tests and debugging.

    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(batch, first_ordinals, ratio, runs, counts)
    check_group_rows(batch)
    if first_ordinals is not None:
        lowest = min(first_ordinals.tolist(), default=0)
        expect(lowest >= 0, "first_ordinals", ">= 0", lowest)
    max_runs = runs.shape[1]
    for row, row_runs in zip(batch.rows.tolist(), _list_runs(batch, first_ordinals), strict=True):
        expect(len(row_runs) <= max_runs, f"row {row}: runs", f"<= {max_runs} (max_runs)", len(row_runs))
        highest = max((start + length for start, length in row_runs), default=0) * ratio
        expect(highest <= 2**31, f"row {row}: end of the highest run", f"<= {2**31}", highest)


def block_runs_reference(
    batch: GroupRows,
    *,
    first_ordinals: torch.Tensor | None = None,
    ratio: int = 1,
    runs: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Collect the runs block by block.

    Shapes, dtypes: as in the module's contract.
    """
    runs.fill_(0)
    for index, row_runs in enumerate(_list_runs(batch, first_ordinals)):
        counts[index] = len(row_runs)
        for k, (start, length) in enumerate(row_runs[: runs.shape[1]]):
            runs[index, k, 0], runs[index, k, 1] = start * ratio, length * ratio


def block_runs_torch(
    batch: GroupRows,
    *,
    first_ordinals: torch.Tensor | None = None,
    ratio: int = 1,
    runs: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Collect the runs with torch operations on any device; no sync.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype or device.
    """
    _check_shapes(batch, first_ordinals, ratio, runs, counts)
    used = used_ordinals(batch)
    begin = used.first if first_ordinals is None else torch.maximum(used.first, first_ordinals.long())
    steps = torch.arange(batch.meta.width, device=runs.device)
    entries = gather_entries(batch, used, begin[:, None] + steps)  # [R, width]
    is_held = entries != NULL_BLOCK_ID
    is_start, is_end = is_held.clone(), is_held.clone()
    follows = is_held[:, :-1] & (entries[:, 1:] == entries[:, :-1] + 1)
    is_start[:, 1:] &= ~follows
    is_end[:, :-1] &= ~follows
    segment = is_start.cumsum(1) - 1
    start_step = torch.where(is_start, steps, 0).cummax(1).values
    runs.fill_(0)
    store_marked(runs[:, :, 0], segment, is_start, entries * ratio)
    store_marked(runs[:, :, 1], segment, is_end, (steps - start_step + 1) * ratio)
    counts.copy_(is_start.sum(1))


@jit
def _block_runs_kernel(
    words_ptr: tl.tensor,  # [num_words] int32
    rows_ptr: tl.tensor,  # [R] int32
    seq_lens_ptr: tl.tensor,  # [R] int32
    table_offset: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    first_offset: tl.tensor,
    count_offset: tl.tensor,
    span: tl.tensor,
    first_ordinals_ptr: tl.tensor,  # [R] int32, or None
    runs_ptr: tl.tensor,  # [R, max_runs, 2] int32
    counts_ptr: tl.tensor,  # [R] int32
    num_rows: tl.tensor,
    max_runs: tl.tensor,
    ratio: tl.tensor,
    NULL_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    row, first, end, _ = load_rows(
        words_ptr, rows_ptr, seq_lens_ptr, first_offset, count_offset, span, index, index < num_rows
    )
    if first_ordinals_ptr is not None:
        first = tl.maximum(first, tl.load(first_ordinals_ptr + index).to(tl.int64))
    row_runs = runs_ptr + index * max_runs * 2
    steps = tl.arange(0, BLOCK).to(tl.int64)
    num_runs = tl.full((), 0, tl.int64)
    run_start = first
    for tile in range(first, end, BLOCK):
        ordinal = tile + steps
        entry = load_entries(words_ptr, table_offset, row_stride, width, row, first, end, ordinal, NULL_BLOCK)
        before = load_entries(words_ptr, table_offset, row_stride, width, row, first, end, ordinal - 1, NULL_BLOCK)
        after = load_entries(words_ptr, table_offset, row_stride, width, row, first, end, ordinal + 1, NULL_BLOCK)
        is_held = entry != NULL_BLOCK
        is_start = is_held & ((before == NULL_BLOCK) | (entry != before + 1))
        is_end = is_held & (after != entry + 1)
        run = num_runs + tl.cumsum(is_start.to(tl.int64), 0) - 1
        start = running_max(tl.where(is_start, ordinal, run_start))
        fits = run < max_runs
        tl.store(row_runs + run * 2, (entry * ratio).to(tl.int32), mask=is_start & fits)
        tl.store(row_runs + run * 2 + 1, ((ordinal - start + 1) * ratio).to(tl.int32), mask=is_end & fits)
        num_runs += tl.sum(is_start.to(tl.int64), 0)
        run_start = tl.max(start, 0)
    tl.store(counts_ptr + index, num_runs.to(tl.int32))
    for tile in range(num_runs, max_runs, BLOCK):
        unused = tile + steps
        zeros = tl.zeros((BLOCK,), tl.int32)
        tl.store(row_runs + unused * 2, zeros, mask=unused < max_runs)
        tl.store(row_runs + unused * 2 + 1, zeros, mask=unused < max_runs)


def prepare_block_runs(
    batch: GroupRows,
    *,
    first_ordinals: torch.Tensor | None = None,
    ratio: int = 1,
    runs: torch.Tensor,
    counts: torch.Tensor,
) -> Launch:
    """Check shapes, dtypes, strides without a sync, then return the launch that `block_runs` runs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(batch, first_ordinals, ratio, runs, counts)
    return Launch(
        name="block_runs",
        kernel=_block_runs_kernel,
        grid=(batch.num_rows, 1, 1),
        args=(*batch.kernel_args, first_ordinals, runs, counts, batch.num_rows, runs.shape[1], ratio),
        options={"NULL_BLOCK": NULL_BLOCK_ID, "BLOCK": _BLOCK_ORDINALS, "num_warps": 4},
    )


def block_runs(
    batch: GroupRows,
    *,
    first_ordinals: torch.Tensor | None = None,
    ratio: int = 1,
    runs: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Write the runs of every row with one kernel launch; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device; ImportError without triton.
    """
    prepare_block_runs(batch, first_ordinals=first_ordinals, ratio=ratio, runs=runs, counts=counts).run()
