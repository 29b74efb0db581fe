"""Block tables of one group in a flat buffer whose every dead word is poison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from hybridkv_kernels.group_meta import GroupMeta
from hybridkv_kernels.group_rows import GroupRows

POISON = 12345


@dataclass(frozen=True)
class Table:
    """One group's table: the block ids of the live ordinals of every row, first ordinal first."""

    block_size: int
    width: int
    firsts: Sequence[int]
    block_ids: Sequence[Sequence[int]]
    num_ranks: int = 1
    rank: int = 0
    interleave: int = 1

    def batch(self, rows: Sequence[int], seq_lens: Sequence[int], device: torch.device | str = "cpu") -> GroupRows:
        """Lay the table into a buffer where no offset is 0, then take `rows` of it."""
        row_stride = self.width + 2
        words = [POISON]
        for first, ids in zip(self.firsts, self.block_ids, strict=True):
            columns = [POISON] * row_stride
            for step, block_id in enumerate(ids):
                columns[(first + step) % self.width] = block_id
            words += columns
        first_offset = len(words)
        words += list(self.firsts)
        words += [first + len(ids) for first, ids in zip(self.firsts, self.block_ids, strict=True)]
        meta = GroupMeta(
            *(1, row_stride, self.width, self.block_size, first_offset, first_offset + len(self.firsts)),
            *(self.num_ranks, self.rank, self.interleave),
        )
        return move(GroupRows(int32(words), meta, int32(rows), int32(seq_lens)), device)


def int32(values: Sequence[int]) -> torch.Tensor:
    """Make an int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)


def move(batch: GroupRows, device: torch.device | str) -> GroupRows:
    """Copy a batch to a device."""
    words, rows, seq_lens = (tensor.to(device) for tensor in (batch.words, batch.rows, batch.seq_lens))
    return GroupRows(words, batch.meta, rows, seq_lens)


def with_meta(batch: GroupRows, **values: int) -> GroupRows:
    """Replace fields of the batch's meta."""
    return replace(batch, meta=replace(batch.meta, **values))


RING = Table(block_size=4, width=3, firsts=[2, 0], block_ids=[[6, 7, 8], [5, 0]])
"""Row 0 holds ordinals 2, 3, 4 in columns 2, 0, 1; row 1 holds ordinal 0 and a null block as ordinal 1."""


def ring(device: torch.device | str = "cpu") -> GroupRows:
    """Rows 0 (18 tokens), padding, 1 (6 tokens) of the ring."""
    return RING.batch([0, -1, 1], [18, 99, 6], device)


@st.composite
def batches(draw: st.DrawFn, *, is_sharded: bool = False) -> GroupRows:
    """Draw rows that wrapped, hold null blocks or runs, are empty, padding, or longer or shorter than their blocks."""
    block_size, width, num_rows = (
        draw(st.sampled_from([1, 2, 3, 4, 6])),
        draw(st.integers(1, 6)),
        draw(st.integers(1, 3)),
    )
    num_ranks = draw(st.integers(1, 3)) if is_sharded else 1
    interleave = draw(st.sampled_from([size for size in (1, 2, 3, 4, 6) if block_size % size == 0]))
    # Few ids, so that many of them are neighbours, and some that need all 31 bits with small ratios.
    ids = st.lists(st.integers(0, 6) | st.integers(2**28, 2**28 + 2), max_size=width)
    table = Table(
        block_size,
        width,
        draw(st.lists(st.integers(0, 7), min_size=num_rows, max_size=num_rows)),
        [draw(ids) for _ in range(num_rows)],
        num_ranks,
        draw(st.integers(0, num_ranks - 1)),
        interleave,
    )
    rows = draw(st.lists(st.integers(-1, num_rows - 1), max_size=4))
    span = block_size * num_ranks
    most = [0 if row < 0 else (table.firsts[row] + len(table.block_ids[row])) * span for row in rows]
    seq_lens = [draw(st.integers(0, end + 3) | st.just(end)) for end in most]
    return table.batch(rows, seq_lens)
