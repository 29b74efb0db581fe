"""Slot mapping of all KV cache groups in one launch.

Contract
    slot(g, t) = entry * block_size + p % block_size    if row r = token_rows[t] >= 0, p = positions[t] >= 0, ordinal
                                                        j = p // block_size is live in r, entry != NULL_BLOCK_ID
               = PAD_SLOT_ID                            otherwise
    entry      = words[table_offset + r * row_stride + j % width]
    j is live  = words[first_offset + r] <= j < words[count_offset + r]

    A row is a ring of `width` columns; a full-attention row has a width that never wraps. `first_offset` leads to the
    first live ordinal of each row, `count_offset` to the ordinal after the last live one.

Shapes
    words         [num_words]  int32   block tables plus per-row live ranges of all groups, one flat buffer
    group_meta    [G, 6]       int64   table_offset, row_stride, width, block_size, first_offset, count_offset; offsets,
                                       strides in words; block_size 0 marks mode NONE (states): all PAD
    token_rows    [T]          int32   -1 for a padding token
    positions     [T]          int64   in tokens
    out           [G, T]       int64   every element is written

Invariants
    I1  every address of a row that a token names lies in `words`
    I2  0 <= first <= end <= first + width
    I3  live entries are >= 0
    I4  1 <= width <= row_stride in a group with block_size > 0

Grid: (cdiv(T, BLOCK), G). It depends on the padded number of tokens only, so a captured graph stays valid.
"""

from __future__ import annotations

import torch

from hybridkv_kernels._checks import expect, expect_one_device, expect_tensor
from hybridkv_kernels._triton import Launch, jit, tl
from hybridkv_kernels.constants import NULL_BLOCK_ID, PAD_SLOT_ID
from hybridkv_kernels.slot_mapping_reference import (
    NUM_META_COLUMNS,
    check_slot_mapping,
    compute_slot_mapping_numpy,
    compute_slot_mapping_reference,
)

__all__ = [
    "check_slot_mapping",
    "compute_slot_mapping",
    "compute_slot_mapping_numpy",
    "compute_slot_mapping_reference",
    "prepare_slot_mapping",
]

_BLOCK_TOKENS = 256


@jit
def _slot_mapping_kernel(
    words_ptr: tl.tensor,  # [num_words] int32
    meta_ptr: tl.tensor,  # [G, 6] int64
    rows_ptr: tl.tensor,  # [T] int32
    positions_ptr: tl.tensor,  # [T] int64
    out_ptr: tl.tensor,  # [G, T] int64
    num_tokens: tl.tensor,
    stride_out: tl.tensor,
    META_COLUMNS: tl.constexpr,
    PAD: tl.constexpr,
    NULL_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    group = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_batch = token < num_tokens
    meta = meta_ptr + group * META_COLUMNS
    table_offset = tl.load(meta)
    row_stride = tl.load(meta + 1)
    # A group in mode NONE may leave its width 0; nothing of it is live, but the division still runs.
    width = tl.maximum(tl.load(meta + 2), 1)
    block_size = tl.load(meta + 3)
    first_offset = tl.load(meta + 4)
    end_offset = tl.load(meta + 5)

    row = tl.load(rows_ptr + token, mask=in_batch, other=-1).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=in_batch, other=-1)
    # Mode NONE: with block size 0 every row is a padding row.
    row = tl.where(block_size > 0, row, -1)
    live = (row >= 0) & (position >= 0)
    # `//` truncates on a GPU: a negative position is masked out before it is divided.
    position = tl.where(live, position, 0)
    divisor = tl.maximum(block_size, 1)
    ordinal = position // divisor
    first = tl.load(words_ptr + first_offset + row, mask=live, other=0)
    end = tl.load(words_ptr + end_offset + row, mask=live, other=0)
    live = live & (ordinal >= first) & (ordinal < end)
    entry = tl.load(words_ptr + table_offset + row * row_stride + ordinal % width, mask=live, other=NULL_BLOCK)
    slot = entry.to(tl.int64) * divisor + position % divisor
    slot = tl.where(live & (entry != NULL_BLOCK), slot, PAD)
    tl.store(out_ptr + group * stride_out + token, slot, mask=in_batch)


def prepare_slot_mapping(
    words: torch.Tensor,
    group_meta: torch.Tensor,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    *,
    out: torch.Tensor,
) -> Launch:
    """Check shapes, dtypes, strides without a sync, then return the launch that `compute_slot_mapping` runs.

    Shapes, dtypes: as in the module's contract; `out` may have any stride between groups.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    num_groups, num_tokens = group_meta.shape[0], positions.shape[0]
    expect_tensor("words", words, torch.int32, (None,))
    expect_tensor("group_meta", group_meta, torch.int64, (num_groups, NUM_META_COLUMNS))
    expect_tensor("token_rows", token_rows, torch.int32, (num_tokens,))
    expect_tensor("positions", positions, torch.int64, (num_tokens,))
    expect_tensor("out", out, torch.int64, (num_groups, num_tokens))
    named = (("words", words), ("group_meta", group_meta), ("token_rows", token_rows), ("positions", positions))
    for name, tensor in named:
        expect(tensor.is_contiguous(), f"{name}.stride()", "contiguous", tensor.stride())
    expect(num_tokens <= 1 or out.stride(1) == 1, "out.stride(1)", 1, out.stride(1))
    expect_one_device((*named, ("out", out)))
    return Launch(
        name="compute_slot_mapping",
        kernel=_slot_mapping_kernel,
        grid=(-(-num_tokens // _BLOCK_TOKENS), num_groups, 1),
        args=(words, group_meta, token_rows, positions, out, num_tokens, out.stride(0)),
        options={
            "META_COLUMNS": NUM_META_COLUMNS,
            "PAD": PAD_SLOT_ID,
            "NULL_BLOCK": NULL_BLOCK_ID,
            "BLOCK": _BLOCK_TOKENS,
            "num_warps": 4,
        },
    )


def compute_slot_mapping(
    words: torch.Tensor,
    group_meta: torch.Tensor,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    *,
    out: torch.Tensor,
) -> None:
    """Write the slots of all tokens in all groups with one kernel launch; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device; ImportError without triton.
    """
    prepare_slot_mapping(words, group_meta, token_rows, positions, out=out).run()
