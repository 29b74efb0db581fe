"""Slot mapping of all groups on the host, without torch.

The contract is in `slot_mapping`; the functions here take numpy arrays. `compute_slot_mapping_reference` is the loop a
reader checks by eye, `compute_slot_mapping_numpy` is the production path of a CPU device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from hybridkv_kernels._checks import expect
from hybridkv_kernels.constants import NULL_BLOCK_ID, PAD_SLOT_ID

if TYPE_CHECKING:
    import torch

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
IntArray: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]

NUM_META_COLUMNS = 6
"""Columns of `group_meta`: table_offset, row_stride, width, block_size, first_offset, count_offset."""


def _to_numpy(array: IntArray | torch.Tensor) -> IntArray:
    if isinstance(array, np.ndarray):
        return array
    host: IntArray = array.cpu().numpy()
    return host


def _check_shapes(words: IntArray, group_meta: IntArray, rows: IntArray, positions: IntArray, out: IntArray) -> None:
    named = (("words", words, np.int32, 1), ("group_meta", group_meta, np.int64, 2), ("token_rows", rows, np.int32, 1))
    for name, array, dtype, ndim in (*named, ("positions", positions, np.int64, 1), ("out", out, np.int64, 2)):
        expect(array.dtype == dtype, f"{name}.dtype", np.dtype(dtype), array.dtype)
        expect(array.ndim == ndim, f"{name}.ndim", ndim, array.ndim)
    num_groups, num_tokens = group_meta.shape[0], positions.shape[0]
    expect(group_meta.shape[1] == NUM_META_COLUMNS, "group_meta.shape[1]", NUM_META_COLUMNS, group_meta.shape[1])
    expect(rows.shape[0] == num_tokens, "token_rows.shape", (num_tokens,), rows.shape)
    expect(out.shape == (num_groups, num_tokens), "out.shape", (num_groups, num_tokens), out.shape)


def _check_group(group: int, words: IntArray, meta: list[int], rows: list[int]) -> None:
    """Check one group's meta row, then the live range and live entries of every row in `rows`."""
    table_offset, row_stride, width, block_size, first_offset, end_offset = meta
    expect(block_size >= 0, f"group_meta[{group}].block_size", ">= 0 (0 marks mode NONE)", block_size)
    if block_size == 0:
        return
    expect(0 < width <= row_stride, f"group_meta[{group}].width", f"1..{row_stride} (row_stride)", width)
    for row in rows:
        start = table_offset + row * row_stride
        for name, low, high in (
            ("table row", start, start + width),
            ("first ordinal", first_offset + row, first_offset + row + 1),
            ("end ordinal", end_offset + row, end_offset + row + 1),
        ):
            inside = low >= 0 and high <= words.shape[0]
            expect(inside, f"group {group} row {row}: words of the {name}", f"within 0..{words.shape[0]}", (low, high))
        first, end = int(words[first_offset + row]), int(words[end_offset + row])
        rule = f"0 <= first <= end <= first + {width}"
        expect(0 <= first <= end <= first + width, f"group {group} row {row}: live ordinals", rule, (first, end))
        live = words[start + np.arange(first, end) % width]
        lowest = int(live.min(initial=NULL_BLOCK_ID))
        expect(lowest >= NULL_BLOCK_ID, f"group {group} row {row}: live block ids", f">= {NULL_BLOCK_ID}", lowest)


def check_slot_mapping(
    words: IntArray | torch.Tensor,
    group_meta: IntArray | torch.Tensor,
    token_rows: IntArray | torch.Tensor,
    positions: IntArray | torch.Tensor,
    *,
    out: IntArray | torch.Tensor,
) -> None:
    """Check invariants I1..I4 of the contract; for tests and debugging, since device tensors are copied to the host.

    Shapes, dtypes: as in `slot_mapping`.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    words, group_meta, rows = _to_numpy(words), _to_numpy(group_meta), _to_numpy(token_rows)
    _check_shapes(words, group_meta, rows, _to_numpy(positions), _to_numpy(out))
    lowest = int(rows.min(initial=PAD_SLOT_ID))
    expect(lowest >= PAD_SLOT_ID, "token_rows", f">= {PAD_SLOT_ID}", lowest)
    used = sorted({row for row in rows.tolist() if row >= 0})
    for group, meta in enumerate(group_meta.tolist()):
        _check_group(group, words, meta, used)


def compute_slot_mapping_reference(
    words: Int32Array, group_meta: Int64Array, token_rows: Int32Array, positions: Int64Array, *, out: Int64Array
) -> None:
    """Compute the slot mapping with one Python loop over groups by tokens.

    Shapes, dtypes: as in `slot_mapping`, numpy arrays; `out` is overwritten.
    """
    for group, meta in enumerate(group_meta.tolist()):
        table_offset, row_stride, width, block_size, first_offset, end_offset = meta
        for token, (row, position) in enumerate(zip(token_rows.tolist(), positions.tolist(), strict=True)):
            out[group, token] = PAD_SLOT_ID
            if block_size == 0 or row < 0 or position < 0:
                continue
            ordinal = position // block_size
            if not words[first_offset + row] <= ordinal < words[end_offset + row]:
                continue
            block_id = int(words[table_offset + row * row_stride + ordinal % width])
            if block_id != NULL_BLOCK_ID:
                out[group, token] = block_id * block_size + position % block_size


def compute_slot_mapping_numpy(
    words: Int32Array, group_meta: Int64Array, token_rows: Int32Array, positions: Int64Array, *, out: Int64Array
) -> None:
    """Compute the slot mapping with array operations over [num_groups, num_tokens].

    Shapes, dtypes: as in `slot_mapping`, numpy arrays; `out` is overwritten.
    Raises: ValueError for a wrong shape or dtype. An out-of-range address is clipped, since only dead tokens make one.
    """
    _check_shapes(words, group_meta, token_rows, positions, out)
    if words.shape[0] == 0:
        out.fill(PAD_SLOT_ID)
        return
    table_offset, row_stride, width, block_size, first_offset, end_offset = group_meta.T[:, :, np.newaxis]
    divisor = np.maximum(block_size, 1)
    rows = np.maximum(token_rows, 0).astype(np.int64)
    ordinal = positions // divisor  # [G, T]
    live = words.take(first_offset + rows, mode="clip") <= ordinal
    live &= ordinal < words.take(end_offset + rows, mode="clip")
    live &= (token_rows >= 0) & (positions >= 0)
    live &= block_size > 0
    address = ordinal % np.maximum(width, 1)
    address += table_offset + rows * row_stride
    block_ids = words.take(address, mode="clip")
    live &= block_ids != NULL_BLOCK_ID
    # block_id * B + p % B, with p % B = p - ordinal * B so that one division serves both.
    np.subtract(block_ids, ordinal, out=ordinal)
    ordinal *= divisor
    ordinal += positions
    out.fill(PAD_SLOT_ID)
    np.copyto(out, ordinal, where=live)
