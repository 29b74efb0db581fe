"""Launches of the page index converters on empty tensors, at the sizes of real models."""

from __future__ import annotations

import torch

from hybridkv_kernels._triton import Launch
from hybridkv_kernels.block_offsets import prepare_block_offsets
from hybridkv_kernels.block_runs import prepare_block_runs
from hybridkv_kernels.cell_visibility import CellMask, MaskKind, prepare_cell_visibility
from hybridkv_kernels.cells import Cells, prepare_cells
from hybridkv_kernels.group_meta import GroupMeta
from hybridkv_kernels.group_rows import GroupRows
from hybridkv_kernels.kernel_blocks import prepare_kernel_block_table
from hybridkv_kernels.load_plan import prepare_load_plan
from hybridkv_kernels.token_table import prepare_token_table

_NUM_ROWS, _MAX_TOKENS, _NUM_CELLS, _NUM_QUERIES = 256, 131_072, 1_048_576, 512


def _int32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)


def _batch(width: int, block_size: int, *sharding: int) -> GroupRows:
    """Make rows of a table `width` blocks wide, sharded over `sharding` = (num_ranks, rank, interleave) if given."""
    num_words = _NUM_ROWS * (width + 2)
    first_offset = _NUM_ROWS * width
    meta = GroupMeta(0, width, width, block_size, first_offset, first_offset + _NUM_ROWS, *sharding)
    return GroupRows(_int32(num_words), meta, _int32(_NUM_ROWS), _int32(_NUM_ROWS))


def _token_table(batch: GroupRows, dtype: torch.dtype) -> Launch:
    return prepare_token_table(batch, out=torch.empty(_NUM_ROWS, _MAX_TOKENS, dtype=dtype))


def _block_offsets(batch: GroupRows, num_columns: int, *, ratio: int, window_local: bool) -> Launch:
    pools = torch.empty(2, 3, dtype=torch.int64)
    out = _int32(2, _NUM_ROWS, 2, num_columns)
    return prepare_block_offsets(batch, pools, ratio=ratio, window_local=window_local, out=out)


def _block_runs(batch: GroupRows, *, starts_later: bool) -> Launch:
    firsts = _int32(_NUM_ROWS) if starts_later else None
    return prepare_block_runs(batch, first_ordinals=firsts, runs=_int32(_NUM_ROWS, 64, 2), counts=_int32(_NUM_ROWS))


def _cell_visibility(kind: MaskKind, dtype: torch.dtype) -> Launch:
    token_rows, positions = _int32(_NUM_QUERIES), torch.empty(_NUM_QUERIES, dtype=torch.int64)
    out = torch.empty(_NUM_QUERIES, _NUM_CELLS, dtype=dtype)
    mask = CellMask(kind, 1024)
    return prepare_cell_visibility(token_rows, positions, Cells.empty(_NUM_CELLS, _NUM_ROWS), mask=mask, out=out)


def page_index_launches() -> dict[str, Launch]:
    """Return the launches by the name they have in the table."""
    full, ring, sharded = _batch(8192, 16), _batch(136, 16), _batch(4096, 16, 2, 0, 16)
    cell_indptr, cells = prepare_cells(full, out=Cells.empty(_NUM_CELLS, _NUM_ROWS))
    segments = _int32(_NUM_ROWS, 128, 4)
    return {
        "token_table int32 full": _token_table(full, torch.int32),
        "token_table int64 2 ranks": _token_table(sharded, torch.int64),
        "block_offsets full": _block_offsets(full, 8192, ratio=1, window_local=False),
        "block_offsets ring ratio 2": _block_offsets(ring, 272, ratio=2, window_local=True),
        "cell_indptr": cell_indptr,
        "cells": cells,
        "cell_visibility bool causal": _cell_visibility(MaskKind.FULL, torch.bool),
        "cell_visibility fp16 window": _cell_visibility(MaskKind.SLIDING_WINDOW, torch.float16),
        "cell_visibility bf16 chunk": _cell_visibility(MaskKind.CHUNKED, torch.bfloat16),
        "block_runs full": _block_runs(full, starts_later=False),
        "block_runs from an ordinal": _block_runs(full, starts_later=True),
        "load_plan": prepare_load_plan(ring, _int32(_NUM_ROWS, 2), segments=segments, counts=_int32(_NUM_ROWS)),
        "kernel_block_table ratio 2": prepare_kernel_block_table(
            _int32(_NUM_ROWS, 8192), 2, out=_int32(_NUM_ROWS, 16_384)
        ),
    }
