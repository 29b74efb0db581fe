"""The step as a loop that a reader checks by eye; its contract is in `step_tables`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hybridkv_kernels.constants import NULL_BLOCK_ID, PAD_SLOT_ID
from hybridkv_kernels.group_meta import GroupMeta
from hybridkv_kernels.step_layout import RECORD_WORDS, Header, IndexMeta, Record

__all__ = ["StepArrays", "step_reference"]

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepArrays:
    """The outputs of a step as numpy arrays; shapes and dtypes as in the contract."""

    rows: Int32Array
    query_start_loc: Int32Array
    seq_lens: Int32Array
    zero_start: npt.NDArray[np.bool_]
    token_rows: Int32Array
    positions: Int64Array
    slots: Int64Array
    state_slots: Int64Array
    index: Int32Array


@dataclass(frozen=True)
class _Request:
    """One live batch position: its row, its tokens, the tokens computed before them."""

    row: int
    begin: int
    end: int
    computed: int

    @property
    def seq_len(self) -> int:
        return self.computed + self.end - self.begin


def step_reference(
    words: Int32Array,
    group_meta: Int64Array,
    index_meta: Int64Array,
    staging: Int32Array,
    extra_tokens: Int32Array | None,
    *,
    out: StepArrays,
) -> None:
    """Apply the records to `words`, then derive every output token by token and row by row.

    Shapes, dtypes: as in `step_tables`, numpy arrays; `words` and `out` are overwritten.
    """
    groups = [GroupMeta.from_row(row) for row in group_meta.tolist()]
    indices = [IndexMeta(*row) for row in index_meta.tolist()]
    for group, meta in enumerate(groups):
        _apply_records(words, staging, group, meta)
    requests = _requests(staging, extra_tokens)
    _write_geometry(requests, out)
    live = words.tolist()
    for group, (meta, index) in enumerate(zip(groups, indices, strict=True)):
        out.slots[group] = PAD_SLOT_ID
        for request in requests:
            for token in range(request.begin, request.end):
                position = request.computed + token - request.begin
                out.slots[group, token] = meta.slot(live, request.row, position)
        if index.state_row >= 0:
            _write_states(live, meta, index, requests, out)
        if index.table_at >= 0:
            _write_table(live, meta, index, requests, out)
        if index.indptr_at >= 0:
            _write_csr(live, meta, index, requests, out)


def _apply_records(words: Int32Array, staging: Int32Array, group: int, meta: GroupMeta) -> None:
    at_records, starts = staging[Header.AT_RECORDS], staging[Header.AT_GROUP_STARTS]
    for number in range(staging[starts + group], staging[starts + group + 1]):
        record = staging[at_records + number * RECORD_WORDS :][:RECORD_WORDS].tolist()
        row, low, num_payload = record[Record.ROW], record[Record.LOW], record[Record.NUM_PAYLOAD]
        begin = meta.table_offset + row * meta.row_stride + low
        words[begin : begin + record[Record.NUM_WORDS]] = NULL_BLOCK_ID
        words[begin : begin + num_payload] = staging[record[Record.AT_PAYLOAD] :][:num_payload]
        words[meta.first_offset + row], words[meta.count_offset + row] = record[Record.FIRST], record[Record.COUNT]


def _requests(staging: Int32Array, extra_tokens: Int32Array | None) -> list[_Request]:
    num_reqs = int(staging[Header.NUM_REQS])
    rows = staging[staging[Header.AT_ROWS] :][:num_reqs].tolist()
    starts = staging[staging[Header.AT_QUERY_STARTS] :][: num_reqs + 1].tolist()
    computed = staging[staging[Header.AT_COMPUTED] :][:num_reqs].tolist()
    extra = [0 if extra_tokens is None else int(extra_tokens[row]) for row in rows]
    return [_Request(rows[i], starts[i], starts[i + 1], computed[i] + extra[i]) for i in range(num_reqs)]


def _write_geometry(requests: Sequence[_Request], out: StepArrays) -> None:
    out.rows[:], out.seq_lens[:], out.zero_start[:] = PAD_SLOT_ID, 0, False
    out.token_rows[:], out.positions[:] = PAD_SLOT_ID, 0
    out.query_start_loc[:] = requests[-1].end if requests else 0
    for i, request in enumerate(requests):
        out.rows[i], out.seq_lens[i] = request.row, request.seq_len
        out.query_start_loc[i] = request.begin
        out.zero_start[i] = request.computed == 0
        out.token_rows[request.begin : request.end] = request.row
        out.positions[request.begin : request.end] = np.arange(request.computed, request.seq_len)


def _write_states(
    words: list[int], meta: GroupMeta, index: IndexMeta, requests: Sequence[_Request], out: StepArrays
) -> None:
    """States: column c of every row is a state's slot."""
    out.state_slots[index.state_row : index.state_row + meta.width] = PAD_SLOT_ID
    for i, request in enumerate(requests):
        for column in range(meta.width):
            entry = words[meta.table_offset + request.row * meta.row_stride + column]
            out.state_slots[index.state_row + column, i] = PAD_SLOT_ID if entry == NULL_BLOCK_ID else entry


def _local_len(meta: GroupMeta, request: _Request, first: int) -> int:
    """Tokens of this rank from the first live ordinal on."""
    turn = meta.interleave * meta.num_ranks
    last_turn = min(max(request.seq_len % turn - meta.rank * meta.interleave, 0), meta.interleave)
    return max(request.seq_len // turn * meta.interleave + last_turn - first * meta.block_size, 0)


def _write_table(
    words: list[int], meta: GroupMeta, index: IndexMeta, requests: Sequence[_Request], out: StepArrays
) -> None:
    num_reqs = len(out.rows)
    out.index[index.table_at :][: num_reqs * index.table_width] = NULL_BLOCK_ID
    out.index[index.first_at :][:num_reqs] = 0
    out.index[index.len_at :][:num_reqs] = index.pad_seq_len
    for i, request in enumerate(requests):
        first = words[meta.first_offset + request.row]
        for column in range(index.table_width):
            where = index.table_at + i * index.table_width + column
            out.index[where] = meta.entry(words, request.row, first + column)
        out.index[index.first_at + i] = first * meta.span
        out.index[index.len_at + i] = _local_len(meta, request, first)


def _write_csr(
    words: list[int], meta: GroupMeta, index: IndexMeta, requests: Sequence[_Request], out: StepArrays
) -> None:
    out.index[index.last_at :][: len(out.rows)] = 0
    total = 0
    for i, request in enumerate(requests):
        live = meta.live_ordinals(words, request.row)
        num_tokens = _local_len(meta, request, live.start)
        num_pages = min(-(-num_tokens // meta.block_size), len(live))
        out.index[index.indptr_at + i] = total
        for page in range(num_pages):
            if total + page < index.num_indices:
                out.index[index.indices_at + total + page] = meta.entry(words, request.row, live.start + page)
        total += num_pages
        last_page_len = min(num_tokens - (num_pages - 1) * meta.block_size, meta.block_size)
        out.index[index.last_at + i] = last_page_len if num_pages else 0
    out.index[index.indptr_at + len(requests) :][: len(out.rows) + 1 - len(requests)] = total
