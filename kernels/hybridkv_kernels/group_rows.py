"""The rows of one group's block table that a page index is made of.

    words -> | entries | first_block_per_row | num_blocks_per_row |      rows     = [4, 0, -1]   (-1 is padding)
                  ^ meta says where                                      seq_lens = [37, 5, 0]

A block of batch position i is *in use* if its ordinal is live in row `rows[i]` and its first token, `ordinal * span`,
lies below `seq_lens[i]`; a token is in use if its block is and it lies below `seq_lens[i]` itself. Blocks that a row
holds for later tokens are not in use.

Invariants
    P1  rows are PAD_SLOT_ID or rows of the table: all their words lie in `words`
    P2  0 <= first <= count <= first + width, live entries are >= 0
    P3  seq_lens are >= 0; those of padding are not read
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridkv_kernels._checks import expect, expect_one_device, expect_tensor
from hybridkv_kernels._triton import jit, tl
from hybridkv_kernels.constants import NULL_BLOCK_ID, PAD_SLOT_ID
from hybridkv_kernels.group_meta import GroupMeta

__all__ = ["GroupRows", "RowRange", "check_group_rows", "gather_entries", "load_entries", "load_rows", "used_ordinals"]


@dataclass(frozen=True)
class GroupRows:
    """One group's table and the rows of a batch in it.

    Shapes:
        words     [num_words] int32, the tables of all groups
        rows      [R] int32, table row of each batch position; -1 for padding
        seq_lens  [R] int32, tokens in the cache after this step
    Raises: ValueError for a wrong shape, dtype, stride or device, or for a group of states, which has no tokens.
    """

    words: torch.Tensor
    meta: GroupMeta
    rows: torch.Tensor
    seq_lens: torch.Tensor

    def __post_init__(self) -> None:
        expect_tensor("words", self.words, torch.int32, (None,))
        expect_tensor("rows", self.rows, torch.int32, (self.num_rows,))
        expect_tensor("seq_lens", self.seq_lens, torch.int32, (self.num_rows,))
        named = (("words", self.words), ("rows", self.rows), ("seq_lens", self.seq_lens))
        for name, tensor in named:
            expect(tensor.is_contiguous(), f"{name}.stride()", "contiguous", tensor.stride())
        expect_one_device(named)
        expect(self.words.shape[0] > 0, "words.shape", "at least one word", list(self.words.shape))
        expect(self.meta.block_size > 0, "group_meta.block_size", "> 0 (a group of states has no tokens)", 0)

    @property
    def num_rows(self) -> int:
        """Number of batch positions, padding included."""
        return int(self.rows.shape[0])

    @property
    def kernel_args(self) -> tuple[torch.Tensor | int, ...]:
        """The first nine arguments of every kernel over rows, in the order that `load_rows` and `load_entries` use."""
        meta = self.meta
        table = (meta.table_offset, meta.row_stride, meta.width, meta.first_offset, meta.count_offset)
        return (self.words, self.rows, self.seq_lens, *table, meta.span)


@dataclass(frozen=True)
class RowRange:
    """What the rows of a batch use, one value a batch position.

    Shapes: row [R] int64, 0 for padding; first, end [R] int64, the ordinals in use; seq_len [R] int64, 0 for padding.
    """

    row: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    seq_len: torch.Tensor

    def select(self, index: torch.Tensor) -> RowRange:
        """Return the values of batch positions `index` [N] int64, one of them any number of times."""
        return RowRange(self.row[index], self.first[index], self.end[index], self.seq_len[index])


def check_group_rows(batch: GroupRows) -> None:
    """Check the invariants P1 to P3; syncs, for tests and debugging.

    Raises: ValueError naming the argument, what was expected, what was given.
    """
    words, meta, num_words = batch.words.tolist(), batch.meta, batch.words.shape[0]
    for row, seq_len in zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True):
        expect(row >= PAD_SLOT_ID, "rows", f">= {PAD_SLOT_ID}", row)
        if row == PAD_SLOT_ID:
            continue
        expect(seq_len >= 0, f"row {row}: seq_lens", ">= 0", seq_len)
        start = meta.table_offset + row * meta.row_stride
        for name, end in (
            ("entries", start + meta.width),
            ("first ordinal", meta.first_offset + row + 1),
            ("end ordinal", meta.count_offset + row + 1),
        ):
            expect(end <= num_words, f"row {row}: end of the {name} in words", f"<= {num_words}", end)
        live = meta.live_ordinals(words, row)
        in_order = 0 <= live.start <= live.stop <= live.start + meta.width
        rule = f"0 <= first <= end <= first + {meta.width}"
        expect(in_order, f"row {row}: live ordinals", rule, (live.start, live.stop))
        lowest = min((meta.entry(words, row, ordinal) for ordinal in live), default=NULL_BLOCK_ID)
        expect(lowest >= NULL_BLOCK_ID, f"row {row}: live block ids", f">= {NULL_BLOCK_ID}", lowest)


def used_ordinals(batch: GroupRows) -> RowRange:
    """Return the ordinals in use with torch operations; no sync."""
    meta, is_row = batch.meta, batch.rows >= 0
    row = batch.rows.long().clamp_(min=0)
    seq_len = batch.seq_lens.long().masked_fill_(~is_row, 0)
    first = batch.words.take(row + meta.first_offset).long().masked_fill_(~is_row, 0)
    end = batch.words.take(row + meta.count_offset).long().masked_fill_(~is_row, 0)
    return RowRange(row, first, torch.minimum(end, (seq_len + meta.span - 1) // meta.span), seq_len)


def gather_entries(batch: GroupRows, used: RowRange, ordinals: torch.Tensor) -> torch.Tensor:
    """Return block ids `[R, J]` int64 of ordinals `[R, J]` or `[1, J]` int64 (>= 0), the null block's if not in use."""
    in_use = (ordinals >= used.first[:, None]) & (ordinals < used.end[:, None])
    # A column exists for every ordinal, so no address leaves the row.
    columns = ordinals % batch.meta.width + (used.row * batch.meta.row_stride + batch.meta.table_offset)[:, None]
    return batch.words.take(columns).long().masked_fill_(~in_use, NULL_BLOCK_ID)


@jit
def load_rows(
    words_ptr: tl.tensor,  # [num_words] int32
    rows_ptr: tl.tensor,  # [R] int32
    seq_lens_ptr: tl.tensor,  # [R] int32
    first_offset: tl.tensor,
    count_offset: tl.tensor,
    span: tl.tensor,
    index: tl.tensor,
    in_batch: tl.tensor,
) -> tl.tensor:
    """Return what `RowRange` holds of batch positions `index` int64, all zero where one is padding."""
    row = tl.load(rows_ptr + index, mask=in_batch, other=-1).to(tl.int64)
    is_row = row >= 0
    row = tl.where(is_row, row, 0)
    first = tl.load(words_ptr + first_offset + row, mask=is_row, other=0).to(tl.int64)
    end = tl.load(words_ptr + count_offset + row, mask=is_row, other=0).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + index, mask=is_row, other=0).to(tl.int64)
    return row, first, tl.minimum(end, (seq_len + span - 1) // span), seq_len


@jit
def load_entries(
    words_ptr: tl.tensor,  # [num_words] int32
    table_offset: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    ordinal: tl.tensor,
    NULL_BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the block ids int64 of ordinals int64, the null block's if not in use; `row`.. from `load_rows`.

    An ordinal may be -1, the one before the first.
    """
    in_use = (ordinal >= first) & (ordinal < end)
    address = words_ptr + table_offset + row * row_stride + tl.maximum(ordinal, 0) % width
    return tl.load(address, mask=in_use, other=NULL_BLOCK).to(tl.int64)
