"""Where one group's block table lies in the flat buffer of all groups' tables, as host integers.

    words = ... | entries [num_rows, row_stride] | first_block_per_row [num_rows] | num_blocks_per_row [num_rows] | ...

Row r holds the ordinals `[words[first_offset + r], words[count_offset + r])`, ordinal j in column `j % width`. On one
of `num_ranks` ranks that share the tokens of a sequence in turns of `interleave` tokens:

    span        = block_size * num_ranks            positions that one block covers over all ranks
    ordinal(p)  = p // span
    owner(p)    = (p // interleave) % num_ranks
    offset(p)   = (p % span) // (interleave * num_ranks) * interleave + p % interleave
    slot(r, p)  = entry * block_size + offset(p)    if ordinal(p) is live, owner(p) == rank, entry != NULL_BLOCK_ID
                = PAD_SLOT_ID                       otherwise
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Final

from hybridkv_kernels._checks import expect
from hybridkv_kernels.constants import NULL_BLOCK_ID, PAD_SLOT_ID

__all__ = ["NUM_META_COLUMNS", "GroupMeta"]


@dataclass(frozen=True)
class GroupMeta:
    """One row of `group_meta`, the values in column order.

    `table_offset`, `first_offset`, `count_offset` are words from the start of the buffer, `row_stride` is in words,
    `width` in blocks, `block_size` in tokens of one rank; block size 0 marks a group of states, which has no slots.

    Raises: ValueError for an offset below 0, a width that no row of this stride has, an interleave that does not
        divide the block size, a rank that does not exist.
    """

    table_offset: int
    row_stride: int
    width: int
    block_size: int
    first_offset: int
    count_offset: int
    num_ranks: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        for name in ("table_offset", "first_offset", "count_offset", "block_size"):
            value: int = getattr(self, name)
            expect(value >= 0, f"group_meta.{name}", ">= 0", value)
        if self.block_size == 0:
            return
        width_rule = f"1..{self.row_stride} (row_stride)"
        expect(1 <= self.width <= self.row_stride, "group_meta.width", width_rule, self.width)
        expect(self.num_ranks >= 1, "group_meta.num_ranks", ">= 1", self.num_ranks)
        expect(0 <= self.rank < self.num_ranks, "group_meta.rank", f"0..{self.num_ranks - 1}", self.rank)
        divides = self.interleave >= 1 and self.block_size % self.interleave == 0
        expect(divides, "group_meta.interleave", f"a divisor of block size {self.block_size}", self.interleave)

    @classmethod
    def from_row(cls, row: Sequence[int]) -> GroupMeta:
        """Make it of one row of `group_meta`, as `as_row` returns it."""
        expect(len(row) == NUM_META_COLUMNS, "group_meta.shape[1]", NUM_META_COLUMNS, len(row))
        return cls(*(int(value) for value in row))

    def as_row(self) -> tuple[int, ...]:
        """Return the values in column order."""
        row: tuple[int, ...] = astuple(self)
        return row

    @property
    def span(self) -> int:
        """Positions that one block covers over all ranks."""
        return self.block_size * self.num_ranks

    def live_ordinals(self, words: Sequence[int], row: int) -> range:
        """Return the live ordinals of a row; none for a padding row."""
        return range(0) if row < 0 else range(words[self.first_offset + row], words[self.count_offset + row])

    def entry(self, words: Sequence[int], row: int, ordinal: int) -> int:
        """Return the block id of an ordinal, the null block's where the ordinal is not live."""
        if ordinal not in self.live_ordinals(words, row):
            return NULL_BLOCK_ID
        return words[self.table_offset + row * self.row_stride + ordinal % self.width]

    def offset(self, position: int) -> int:
        """Return the place in its block of a token that this rank holds."""
        turn = (position % self.span) // (self.interleave * self.num_ranks)
        return turn * self.interleave + position % self.interleave

    def owner(self, position: int) -> int:
        """Return the rank that holds a token."""
        return position // self.interleave % self.num_ranks

    def slot(self, words: Sequence[int], row: int, position: int) -> int:
        """Return the slot of a token of a row, PAD_SLOT_ID if it has none here."""
        if self.block_size == 0 or position < 0 or self.owner(position) != self.rank:
            return PAD_SLOT_ID
        entry = self.entry(words, row, position // self.span)
        return PAD_SLOT_ID if entry == NULL_BLOCK_ID else entry * self.block_size + self.offset(position)


NUM_META_COLUMNS: Final = len(fields(GroupMeta))
"""Columns of `group_meta [num_groups, NUM_META_COLUMNS] int64`."""
