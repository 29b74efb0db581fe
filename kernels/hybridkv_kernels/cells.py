"""Page index `cells`: one cell per token and no pages, as llama.cpp sees a cache.

Contract
    Batch position i has one cell for every token of [first * block_size, min(seq_len, end * block_size)), where
    [first, end) are its ordinals in use (`group_rows`); a padding row has none. Cells lie in order of batch position,
    then of position:

    indptr[i]     = cells of the batch positions before i; indptr[R] = number of cells, also where that is more than C:
                    the list is cut, the count is not
    ids[c]        = slot of the token
    positions[c]  = its position
    rows[c]       = its table row, to be compared with the `token_rows` of the queries
    (0, -1, -1)   for a token in a null block, and for c >= indptr[R]: the null block's first slot, which may be read,
                    visible to no query (`cell_visibility`)

Shapes
    batch            GroupRows over [R] batch positions, not sharded by context parallelism
    cells.ids        [C]      int64
    cells.positions  [C]      int64
    cells.rows       [C]      int32
    cells.indptr     [R + 1]  int32
    Every element of all four is written.

Invariants
    P1..P3 of `group_rows`
    I1  indptr[R] <= C

Two launches: indptr with grid (1,), then the cells with grid (cdiv(C, BLOCK),), which search it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridkv_kernels._checks import expect, expect_one_device, expect_tensor
from hybridkv_kernels._triton import Launch, jit, tl
from hybridkv_kernels.constants import NULL_BLOCK_ID, PAD_SLOT_ID
from hybridkv_kernels.group_rows import (
    GroupRows,
    check_group_rows,
    gather_entries,
    load_entries,
    load_rows,
    used_ordinals,
)

__all__ = ["NO_POSITION", "Cells", "cells", "cells_reference", "cells_torch", "check_cells", "prepare_cells"]

NO_POSITION = -1
"""Position of a cell that holds no token."""
_EMPTY_CELL = (0, NO_POSITION, PAD_SLOT_ID)
_BLOCK_ROWS = 1024
_BLOCK_CELLS = 256


@dataclass(frozen=True)
class Cells:
    """The output of the op; shapes and dtypes as in the module's contract.

    Raises: ValueError for a wrong shape, dtype, stride or device.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    indptr: torch.Tensor

    def __post_init__(self) -> None:
        expect_tensor("ids", self.ids, torch.int64, (self.capacity,))
        expect_tensor("positions", self.positions, torch.int64, (self.capacity,))
        expect_tensor("rows", self.rows, torch.int32, (self.capacity,))
        expect_tensor("indptr", self.indptr, torch.int32, (None,))
        named = (("ids", self.ids), ("positions", self.positions), ("rows", self.rows), ("indptr", self.indptr))
        for name, tensor in named:
            expect(tensor.is_contiguous(), f"{name}.stride()", "contiguous", tensor.stride())
        expect_one_device(named)

    @property
    def capacity(self) -> int:
        """Number of cells that fit, C."""
        return int(self.ids.shape[0])

    @classmethod
    def empty(cls, capacity: int, num_rows: int, device: str | torch.device = "cpu") -> Cells:
        """Allocate room for `capacity` cells of `num_rows` batch positions."""
        return cls(
            ids=torch.empty(capacity, dtype=torch.int64, device=device),
            positions=torch.empty(capacity, dtype=torch.int64, device=device),
            rows=torch.empty(capacity, dtype=torch.int32, device=device),
            indptr=torch.empty(num_rows + 1, dtype=torch.int32, device=device),
        )


def _check_shapes(batch: GroupRows, out: Cells) -> None:
    expect_tensor("indptr", out.indptr, torch.int32, (batch.num_rows + 1,))
    expect_one_device((("words", batch.words), ("ids", out.ids)))
    expected = "1 (cells of tokens that other ranks hold have no slot here)"
    expect(batch.meta.num_ranks == 1, "group_meta.num_ranks", expected, batch.meta.num_ranks)


def _list_cells(batch: GroupRows) -> list[list[tuple[int, int, int]]]:
    """Return the cells (id, position, row) of every batch position, token by token."""
    words, meta = batch.words.tolist(), batch.meta
    found = []
    for row, seq_len in zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True):
        live = meta.live_ordinals(words, row)
        positions = range(live.start * meta.block_size, min(seq_len, live.stop * meta.block_size))
        slots = [meta.slot(words, row, position) for position in positions]
        found.append(
            [
                _EMPTY_CELL if slot == PAD_SLOT_ID else (slot, position, row)
                for slot, position in zip(slots, positions, strict=True)
            ]
        )
    return found


def check_cells(batch: GroupRows, *, out: Cells) -> None:
    """Check the invariants; syncs, for tests and debugging.

    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(batch, out)
    check_group_rows(batch)
    num_cells = sum(len(row_cells) for row_cells in _list_cells(batch))
    expect(num_cells <= out.capacity, "cells", f"<= {out.capacity} (the capacity)", num_cells)


def cells_reference(batch: GroupRows, *, out: Cells) -> None:
    """List the cells token by token.

    Shapes, dtypes: as in the module's contract.
    """
    listed: list[tuple[int, int, int]] = []
    out.indptr[0] = 0
    for index, row_cells in enumerate(_list_cells(batch)):
        listed += row_cells
        out.indptr[index + 1] = len(listed)
    for c in range(out.capacity):
        out.ids[c], out.positions[c], out.rows[c] = listed[c] if c < len(listed) else _EMPTY_CELL


def cells_torch(batch: GroupRows, *, out: Cells) -> None:
    """List the cells with torch operations; syncs off the CPU, since temporaries follow the number of cells.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype or device, for a group sharded by context parallelism.
    """
    _check_shapes(batch, out)
    size, used = batch.meta.block_size, used_ordinals(batch)
    begin = used.first * size
    counts = (torch.minimum(used.seq_len, used.end * size) - begin).clamp_(min=0)
    ends = counts.cumsum(0)
    out.indptr[0] = 0
    out.indptr[1:] = ends
    index = torch.arange(batch.num_rows, device=begin.device).repeat_interleave(counts)[: out.capacity]
    num_cells = index.shape[0]
    shift = begin - ends + counts
    positions = torch.arange(num_cells, device=begin.device) + shift[index]
    entries = gather_entries(batch, used.select(index), (positions // size)[:, None]).squeeze(1)
    is_null = entries == NULL_BLOCK_ID
    for tensor, values, empty in (
        (out.ids, entries * size + positions % size, _EMPTY_CELL[0]),
        (out.positions, positions, _EMPTY_CELL[1]),
        (out.rows, batch.rows[index], _EMPTY_CELL[2]),
    ):
        tensor[:num_cells] = values.masked_fill(is_null, empty)
        tensor[num_cells:] = empty


@jit
def _cell_indptr_kernel(
    words_ptr: tl.tensor,  # [num_words] int32
    rows_ptr: tl.tensor,  # [R] int32
    seq_lens_ptr: tl.tensor,  # [R] int32
    first_offset: tl.tensor,
    count_offset: tl.tensor,
    size: tl.tensor,  # block size
    indptr_ptr: tl.tensor,  # [R + 1] int32
    num_rows: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    steps = tl.arange(0, BLOCK).to(tl.int64)
    total = tl.full((), 0, tl.int64)
    tl.store(indptr_ptr, total.to(tl.int32))
    for tile in range(0, num_rows, BLOCK):
        index = tile + steps
        in_batch = index < num_rows
        _, first, end, seq_len = load_rows(
            words_ptr, rows_ptr, seq_lens_ptr, first_offset, count_offset, size, index, in_batch
        )
        count = tl.maximum(tl.minimum(seq_len, end * size) - first * size, 0)
        tl.store(indptr_ptr + 1 + index, (total + tl.cumsum(count, 0)).to(tl.int32), mask=in_batch)
        total += tl.sum(count, 0)


@jit
def _cells_kernel(
    words_ptr: tl.tensor,  # [num_words] int32
    rows_ptr: tl.tensor,  # [R] int32
    seq_lens_ptr: tl.tensor,  # [R] int32
    table_offset: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    first_offset: tl.tensor,
    count_offset: tl.tensor,
    size: tl.tensor,  # block size
    indptr_ptr: tl.tensor,  # [R + 1] int32
    ids_ptr: tl.tensor,  # [C] int64
    positions_ptr: tl.tensor,  # [C] int64
    cell_rows_ptr: tl.tensor,  # [C] int32
    num_rows: tl.tensor,
    capacity: tl.tensor,
    SEARCH_STEPS: tl.constexpr,
    NULL_BLOCK: tl.constexpr,
    EMPTY_ID: tl.constexpr,
    EMPTY_POSITION: tl.constexpr,
    EMPTY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_listed = cell < tl.load(indptr_ptr + num_rows)
    # The batch position of a cell is the first one whose cells end behind it.
    low = tl.zeros((BLOCK,), tl.int64)
    high = low + (num_rows - 1)
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        is_before = tl.load(indptr_ptr + middle + 1, mask=is_listed, other=0) <= cell
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    row, first, end, _ = load_rows(words_ptr, rows_ptr, seq_lens_ptr, first_offset, count_offset, size, low, is_listed)
    position = first * size + cell - tl.load(indptr_ptr + low, mask=is_listed, other=0)
    entry = load_entries(words_ptr, table_offset, row_stride, width, row, first, end, position // size, NULL_BLOCK)
    is_held = is_listed & (entry != NULL_BLOCK)
    is_stored = cell < capacity
    tl.store(ids_ptr + cell, tl.where(is_held, entry * size + position % size, EMPTY_ID), mask=is_stored)
    tl.store(positions_ptr + cell, tl.where(is_held, position, EMPTY_POSITION), mask=is_stored)
    tl.store(cell_rows_ptr + cell, tl.where(is_held, row, EMPTY_ROW).to(tl.int32), mask=is_stored)


def prepare_cells(batch: GroupRows, *, out: Cells) -> tuple[Launch, Launch]:
    """Check shapes, dtypes, strides without a sync, then return the launches that `cells` runs in order.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(batch, out)
    meta, num_rows = batch.meta, batch.num_rows
    counting = Launch(
        name="cell_indptr",
        kernel=_cell_indptr_kernel,
        grid=(1, 1, 1),
        args=(
            *(batch.words, batch.rows, batch.seq_lens, meta.first_offset, meta.count_offset, meta.block_size),
            *(out.indptr, num_rows),
        ),
        options={"BLOCK": _BLOCK_ROWS, "num_warps": 4},
    )
    listing = Launch(
        name="cells",
        kernel=_cells_kernel,
        grid=(-(-out.capacity // _BLOCK_CELLS), 1, 1),
        args=(*batch.kernel_args, out.indptr, out.ids, out.positions, out.rows, num_rows, out.capacity),
        options={
            "SEARCH_STEPS": num_rows.bit_length(),
            "NULL_BLOCK": NULL_BLOCK_ID,
            "EMPTY_ID": _EMPTY_CELL[0],
            "EMPTY_POSITION": _EMPTY_CELL[1],
            "EMPTY_ROW": _EMPTY_CELL[2],
            "BLOCK": _BLOCK_CELLS,
            "num_warps": 4,
        },
    )
    return counting, listing


def cells(batch: GroupRows, *, out: Cells) -> None:
    """List the cells of every row with two kernel launches; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device, for a group sharded by context parallelism;
        ImportError without triton.
    """
    for launch in prepare_cells(batch, out=out):
        launch.run()
