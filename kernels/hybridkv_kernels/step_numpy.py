"""The step on a host with array operations, for a CPU device; its contract is in `step_tables`.

Groups whose tokens fall on the same ordinals are mapped together. A token at a time costs about ten operations on
`[groups, tokens]`; chunks of whole blocks are mapped a block at a time, where one sum gives a block's slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from hybridkv_kernels.constants import NULL_BLOCK_ID, PAD_SLOT_ID
from hybridkv_kernels.group_meta import GroupMeta
from hybridkv_kernels.step_layout import IndexMeta
from hybridkv_kernels.step_reference import StepArrays

if TYPE_CHECKING:
    from hybridkv_kernels._host import Tables

__all__ = ["NumpyStep", "local_lens", "page_counts"]

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]

_CHUNK_TOKENS = 64
"""From so many tokens a batch position on, on average, looking for whole blocks pays."""


class _AlikeGroups:
    """Groups of one block size and one share of the tokens, all rings or none.

    Shapes: row_starts [n, num_rows]; widths, first_at, count_at [n, 1]; all int64
    """

    def __init__(self, groups: Sequence[int], metas: Sequence[GroupMeta], num_rows: int, is_ring: bool) -> None:
        self.meta, self.is_ring = metas[groups[0]], is_ring
        contiguous = list(groups) == list(range(groups[0], groups[0] + len(groups)))
        self.where: slice | list[int] = slice(groups[0], groups[0] + len(groups)) if contiguous else list(groups)
        columns = np.array([metas[g].as_row() for g in groups], dtype=np.int64).T[:, :, None]
        offsets, strides, self.widths, _, self.first_at, self.count_at = columns[:6]
        self.row_starts = offsets + strides * np.arange(num_rows)
        self.num_positions = int(self.widths.min()) * self.meta.span
        self.in_block = np.arange(self.meta.block_size, dtype=np.int64)

    def map_tokens(
        self, words: Int32Array, rows: Int64Array, positions: Int64Array, end: int, out: Int64Array | None = None
    ) -> Int64Array:
        """Return the slots `[n, T]` of tokens at `positions` [T], all below `end`, of `rows` [T]; in `out` if given."""
        meta = self.meta
        ordinals = positions // meta.span
        entries = self._entries(words, rows, ordinals, end)
        slots: Int64Array = np.multiply(entries, meta.block_size, out=out, dtype=np.int64)
        if meta.num_ranks == 1:
            slots += positions - ordinals * meta.block_size
            if np.count_nonzero(entries) < entries.size:
                slots[entries == NULL_BLOCK_ID] = PAD_SLOT_ID
        else:
            turns = (positions - ordinals * meta.span) // (meta.interleave * meta.num_ranks)
            slots += turns * meta.interleave + positions % meta.interleave
            owners = positions // meta.interleave % meta.num_ranks
            slots[(entries == NULL_BLOCK_ID) | (owners != meta.rank)] = PAD_SLOT_ID
        return slots

    def map_blocks(
        self, words: Int32Array, rows: Int64Array, computed: Int64Array, lengths: Int64Array, out: Int64Array
    ) -> bool:
        """Write the slots `[n, T]` of chunks `[R]`, unless some chunk has a part of a block or of another rank.

        Returns: whether it did.
        """
        size = self.meta.block_size
        if self.meta.num_ranks > 1 or (lengths % size).any() or (computed % size).any():
            return False
        counts = lengths // size
        ends = counts.cumsum()
        ordinals = (computed // size - ends + counts).repeat(counts)
        ordinals += np.arange(len(ordinals))
        entries = self._entries(words, rows.repeat(counts), ordinals, int((computed + lengths).max(initial=0)))
        blocks = out.reshape(len(out), len(ordinals), size)
        np.add((entries * np.int64(size))[:, :, None], self.in_block, out=blocks)
        if not entries.all():
            blocks[entries == NULL_BLOCK_ID] = PAD_SLOT_ID
        return True

    def _entries(self, words: Int32Array, rows: Int64Array, ordinals: Int64Array, end: int) -> Int32Array:
        """Return the entries `[n, T]` of ordinals `[T]`, of positions below `end`; 0 where they are not live."""
        address = self.row_starts.take(rows, axis=1)
        live: npt.NDArray[np.bool_] | None = None
        if self.is_ring:
            # The column of a dead ordinal may hold a live one.
            live = words.take(self.first_at + rows) <= ordinals
            live &= ordinals < words.take(self.count_at + rows)
            address += ordinals % self.widths
        elif end > self.num_positions:
            live = ordinals < self.widths
            address += np.where(live, ordinals, 0)
        else:
            address += ordinals
        entries: Int32Array = words.take(address)
        if live is not None:
            entries *= live
        return entries


class NumpyStep:
    """Maps one step's tokens, finds its states, writes its page indices from committed tables.

    Group and index metas are as in `step_tables`; `rings` says which groups' rows wrap. The compiled helper `native` of
    such tables does the same in one call.
    """

    def __init__(
        self,
        metas: Sequence[GroupMeta],
        indices: Sequence[IndexMeta],
        rings: Sequence[bool],
        num_rows: int,
        native: Tables | None = None,
    ) -> None:
        self._native = native
        self._index_rows = np.array([index.as_row() for index in indices], dtype=np.int64)
        self._metas, self._indices = list(metas), list(indices)
        alike: dict[tuple[int, ...], list[int]] = {}
        for group, (meta, is_ring) in enumerate(zip(metas, rings, strict=True)):
            if meta.block_size:
                key = (meta.block_size, meta.num_ranks, meta.rank, meta.interleave, int(is_ring))
                alike.setdefault(key, []).append(group)
        self._alike = [_AlikeGroups(groups, metas, num_rows, bool(key[-1])) for key, groups in alike.items()]
        self._states = [group for group, meta in enumerate(metas) if not meta.block_size]

    def run(self, words: Int32Array, rows: Int64Array, computed: Int64Array, num_tokens: int, out: StepArrays) -> None:
        """Write slots, states and page indices; the geometry in `out` is complete already.

        Shapes: words [num_words] int32; rows, computed [num_reqs] int64, those of the live batch positions
        """
        if self._native is not None:
            outs = out.slots, out.state_slots, out.index, out.rows
            if self._native.map_batch(words, self._index_rows, rows, computed, out.query_start_loc, *outs):
                return
        num_reqs = len(rows)
        out.slots[:, num_tokens:] = PAD_SLOT_ID
        for group in self._states:
            out.slots[group] = PAD_SLOT_ID
        self._map(words, rows, computed, num_tokens, out)
        for meta, index in zip(self._metas, self._indices, strict=True):
            if index.state_row >= 0:
                states = out.state_slots[index.state_row : index.state_row + meta.width]
                entries = words.take(_addresses(meta, rows, np.arange(meta.width)[:, None]))
                states[:, :num_reqs] = np.where(entries == NULL_BLOCK_ID, PAD_SLOT_ID, entries)
                states[:, num_reqs:] = PAD_SLOT_ID
            if index.table_at >= 0 or index.indptr_at >= 0:
                self._write_index(words, meta, index, rows, out)

    def _map(self, words: Int32Array, rows: Int64Array, computed: Int64Array, num_tokens: int, out: StepArrays) -> None:
        """Map whole blocks where every chunk is made of them, single tokens otherwise."""
        num_reqs, positions = len(rows), out.positions[:num_tokens]
        end = int(out.seq_lens[:num_reqs].max(initial=0))
        is_prefill = num_tokens >= _CHUNK_TOKENS * max(num_reqs, 1)
        token_rows = rows if num_tokens == num_reqs else None
        for groups in self._alike:
            where = groups.where
            if is_prefill and isinstance(where, slice):
                lengths = np.diff(out.query_start_loc[: num_reqs + 1])
                if groups.map_blocks(words, rows, computed, lengths, out.slots[where, :num_tokens]):
                    continue
            if token_rows is None:
                token_rows = out.token_rows[:num_tokens].astype(np.int64)
            if isinstance(where, slice):
                groups.map_tokens(words, token_rows, positions, end, out.slots[where, :num_tokens])
                continue
            for group, slots in zip(where, groups.map_tokens(words, token_rows, positions, end), strict=True):
                out.slots[group, :num_tokens] = slots

    def _write_index(
        self, words: Int32Array, meta: GroupMeta, index: IndexMeta, rows: Int64Array, out: StepArrays
    ) -> None:
        num_reqs, size = len(rows), len(out.rows)
        first = words.take(meta.first_offset + rows).astype(np.int64)
        count = words.take(meta.count_offset + rows).astype(np.int64)
        seq_lens = out.seq_lens[:num_reqs].astype(np.int64)
        num_tokens = local_lens(meta, seq_lens, first)
        if index.table_at >= 0:
            table = out.index[index.table_at :][: size * index.table_width].reshape(size, index.table_width)
            ordinals = first[:, None] + np.arange(index.table_width)
            entries = words.take(_addresses(meta, rows[:, None], ordinals))
            table[:num_reqs] = np.where(ordinals < count[:, None], entries, NULL_BLOCK_ID)
            table[num_reqs:] = NULL_BLOCK_ID
            _fill(out.index[index.first_at :][:size], first * meta.span, 0)
            _fill(out.index[index.len_at :][:size], num_tokens, index.pad_seq_len)
        if index.indptr_at >= 0:
            num_pages, last_page_lens = page_counts(meta, num_tokens, count - first)
            ends = num_pages.cumsum()
            total = int(ends[-1]) if num_reqs else 0
            out.index[index.indptr_at] = 0
            _fill(out.index[index.indptr_at + 1 :][:size], ends, total)
            ordinals = np.arange(total) + np.repeat(first - ends + num_pages, num_pages)
            pages = words.take(_addresses(meta, np.repeat(rows, num_pages), ordinals))
            out.index[index.indices_at :][: min(total, index.num_indices)] = pages[: index.num_indices]
            _fill(out.index[index.last_at :][:size], last_page_lens, 0)


def local_lens(meta: GroupMeta, seq_lens: Int64Array, first: Int64Array) -> Int64Array:
    """Return the tokens `[n]` that this rank holds of rows from their ordinals `first` on."""
    turn = meta.interleave * meta.num_ranks
    num_tokens = seq_lens // turn * meta.interleave - first * meta.block_size
    num_tokens += np.clip(seq_lens % turn - meta.rank * meta.interleave, 0, meta.interleave)
    lens: Int64Array = np.maximum(num_tokens, 0)
    return lens


def page_counts(meta: GroupMeta, num_tokens: Int64Array, num_held: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the blocks `[n]` that rows of `num_tokens` tokens hold for them, and the tokens `[n]` in the last ones.

    Rows hold `num_held` [n] blocks; the last one is full where they are too few, and empty is a row without any.
    """
    num_pages: Int64Array = np.minimum(-(-num_tokens // meta.block_size), num_held)
    last_page_lens = np.minimum(num_tokens - (num_pages - 1) * meta.block_size, meta.block_size)
    return num_pages, np.where(num_pages > 0, last_page_lens, 0)


def _addresses(meta: GroupMeta, rows: Int64Array, ordinals: Int64Array) -> Int64Array:
    """Return where the ordinals of rows are in `words`."""
    addresses: Int64Array = meta.table_offset + rows * meta.row_stride + ordinals % meta.width
    return addresses


def _fill(target: Int32Array, values: Int64Array, padding: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = padding
