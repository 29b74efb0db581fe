"""Triton kernel of the step; its contract and its grid are in `step_tables`.

No program waits for another: what this step changes is read from the staging buffer, everything else from the tables,
which this step does not change there.
"""

from __future__ import annotations

from dataclasses import fields

from hybridkv_kernels._row_tiles import find_row
from hybridkv_kernels._triton import constant, jit, tl
from hybridkv_kernels.constants import PAD_SLOT_ID
from hybridkv_kernels.group_meta import NUM_META_COLUMNS, GroupMeta
from hybridkv_kernels.step_layout import NUM_INDEX_COLUMNS, RECORD_WORDS, Header, IndexMeta, Record


def _column(row_type: type[GroupMeta | IndexMeta], name: str) -> int:
    return constant([field.name for field in fields(row_type)].index(name))


_PAD = constant(PAD_SLOT_ID)
_META_COLUMNS = constant(NUM_META_COLUMNS)
_INDEX_COLUMNS = constant(NUM_INDEX_COLUMNS)
_RECORD_WORDS = constant(RECORD_WORDS)

_NUM_REQS = constant(Header.NUM_REQS)
_AT_ROWS = constant(Header.AT_ROWS)
_AT_QUERY_STARTS = constant(Header.AT_QUERY_STARTS)
_AT_COMPUTED = constant(Header.AT_COMPUTED)
_AT_RECORD_OF = constant(Header.AT_RECORD_OF)
_AT_GROUP_STARTS = constant(Header.AT_GROUP_STARTS)
_AT_RECORDS = constant(Header.AT_RECORDS)

_ROW = constant(Record.ROW)
_LOW = constant(Record.LOW)
_NUM_WORDS = constant(Record.NUM_WORDS)
_NUM_PAYLOAD = constant(Record.NUM_PAYLOAD)
_AT_PAYLOAD = constant(Record.AT_PAYLOAD)
_FIRST = constant(Record.FIRST)
_COUNT = constant(Record.COUNT)

_TABLE_OFFSET = _column(GroupMeta, "table_offset")
_ROW_STRIDE = _column(GroupMeta, "row_stride")
_WIDTH = _column(GroupMeta, "width")
_BLOCK_SIZE = _column(GroupMeta, "block_size")
_FIRST_OFFSET = _column(GroupMeta, "first_offset")
_COUNT_OFFSET = _column(GroupMeta, "count_offset")
_NUM_RANKS = _column(GroupMeta, "num_ranks")
_RANK = _column(GroupMeta, "rank")
_INTERLEAVE = _column(GroupMeta, "interleave")

_TABLE_AT = _column(IndexMeta, "table_at")
_TABLE_WIDTH = _column(IndexMeta, "table_width")
_FIRST_AT = _column(IndexMeta, "first_at")
_LEN_AT = _column(IndexMeta, "len_at")
_INDPTR_AT = _column(IndexMeta, "indptr_at")
_INDICES_AT = _column(IndexMeta, "indices_at")
_NUM_INDICES = _column(IndexMeta, "num_indices")
_LAST_AT = _column(IndexMeta, "last_at")
_PAD_SEQ_LEN = _column(IndexMeta, "pad_seq_len")
_STATE_ROW = _column(IndexMeta, "state_row")


@jit
def _apply_record(
    words_ptr: tl.tensor,
    meta: tl.tensor,
    staging_ptr: tl.tensor,
    group: tl.tensor,
    number: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the changed span and the live range of one record of a group, if it has so many."""
    starts = staging_ptr + tl.load(staging_ptr + _AT_GROUP_STARTS) + group
    number += tl.load(starts)
    if number < tl.load(starts + 1):
        record = staging_ptr + tl.load(staging_ptr + _AT_RECORDS) + number * _RECORD_WORDS
        row = tl.load(record + _ROW).to(tl.int64)
        low = tl.load(record + _LOW)
        num_words = tl.load(record + _NUM_WORDS)
        num_payload = tl.load(record + _NUM_PAYLOAD)
        payload = staging_ptr + tl.load(record + _AT_PAYLOAD)
        target = words_ptr + tl.load(meta + _TABLE_OFFSET) + row * tl.load(meta + _ROW_STRIDE) + low
        for begin in range(0, num_words, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            entry = tl.load(payload + column, mask=column < num_payload, other=0)
            tl.store(target + column, entry, mask=column < num_words)
        tl.store(words_ptr + tl.load(meta + _FIRST_OFFSET) + row, tl.load(record + _FIRST))
        tl.store(words_ptr + tl.load(meta + _COUNT_OFFSET) + row, tl.load(record + _COUNT))


@jit
def _live_reqs(staging_ptr: tl.tensor, num_reqs_padded: tl.tensor) -> tl.tensor:
    """Return the live batch positions of the staged step that this launch has room for."""
    return tl.minimum(tl.load(staging_ptr + _NUM_REQS), num_reqs_padded)


@jit
def _record_of(staging_ptr: tl.tensor, group: tl.tensor, position: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Return where the records of batch positions begin, -1 for none."""
    record_of = staging_ptr + tl.load(staging_ptr + _AT_RECORD_OF) + group * tl.load(staging_ptr + _NUM_REQS)
    number = tl.load(record_of + position, mask=mask, other=-1)
    return tl.where(number >= 0, tl.load(staging_ptr + _AT_RECORDS) + number * _RECORD_WORDS, -1)


@jit
def _live_range(
    words_ptr: tl.tensor, meta: tl.tensor, staging_ptr: tl.tensor, row: tl.tensor, record: tl.tensor, mask: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first live ordinal of rows, and the one after the last."""
    changed = mask & (record >= 0)
    same = mask & (record < 0)
    record = tl.maximum(record, 0)
    first = tl.load(staging_ptr + record + _FIRST, mask=changed, other=0)
    first += tl.load(words_ptr + tl.load(meta + _FIRST_OFFSET) + row, mask=same, other=0)
    count = tl.load(staging_ptr + record + _COUNT, mask=changed, other=0)
    count += tl.load(words_ptr + tl.load(meta + _COUNT_OFFSET) + row, mask=same, other=0)
    return first, count


@jit
def _entries(
    words_ptr: tl.tensor,
    meta: tl.tensor,
    staging_ptr: tl.tensor,
    row: tl.tensor,
    record: tl.tensor,
    column: tl.tensor,
    mask: tl.tensor,
) -> tl.tensor:
    """Return what columns `[N]` of one row hold after this step; 0 where the mask is false."""
    changed = record >= 0
    record = tl.maximum(record, 0)
    low = tl.load(staging_ptr + record + _LOW, mask=changed, other=0)
    num_words = tl.load(staging_ptr + record + _NUM_WORDS, mask=changed, other=0)
    num_payload = tl.load(staging_ptr + record + _NUM_PAYLOAD, mask=changed, other=0)
    payload = tl.load(staging_ptr + record + _AT_PAYLOAD, mask=changed, other=0)
    place = column - low
    in_span = (place >= 0) & (place < num_words)
    entry = tl.load(staging_ptr + payload + place, mask=mask & in_span & (place < num_payload), other=0)
    begin = tl.load(meta + _TABLE_OFFSET) + row * tl.load(meta + _ROW_STRIDE)
    return entry + tl.load(words_ptr + begin + column, mask=mask & ~in_span, other=0)


@jit
def _local_len(meta: tl.tensor, seq_len: tl.tensor, first: tl.tensor) -> tl.tensor:
    """Return the tokens of this rank from ordinal `first` on."""
    interleave = tl.load(meta + _INTERLEAVE)
    turn = interleave * tl.load(meta + _NUM_RANKS)
    last_turn = seq_len % turn - tl.load(meta + _RANK) * interleave
    last_turn = tl.minimum(tl.maximum(last_turn, 0), interleave)
    return tl.maximum(seq_len // turn * interleave + last_turn - first * tl.load(meta + _BLOCK_SIZE), 0)


@jit
def _num_pages(meta: tl.tensor, num_tokens: tl.tensor, first: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Return the blocks that rows hold for their tokens of this rank."""
    block_size = tl.load(meta + _BLOCK_SIZE)
    return tl.minimum((num_tokens + block_size - 1) // block_size, count - first)


@jit
def _map_tile(
    words_ptr: tl.tensor,
    meta: tl.tensor,
    staging_ptr: tl.tensor,
    extra_ptr: tl.tensor,
    token_rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    group: tl.tensor,
    tile: tl.tensor,
    num_reqs_padded: tl.tensor,
    num_tokens_padded: tl.tensor,
    HAS_EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write row, position and slot of one tile of one batch position's tokens; after the last one it is padding."""
    num_reqs = _live_reqs(staging_ptr, num_reqs_padded)
    starts = staging_ptr + tl.load(staging_ptr + _AT_QUERY_STARTS)
    index = find_row(starts, tile, num_reqs + 1, BLOCK)
    is_live = index < num_reqs
    begin = tl.load(starts + index)
    end = tl.load(starts + index + 1, mask=is_live, other=0)
    end = tl.where(is_live, tl.minimum(end, num_tokens_padded), num_tokens_padded)
    token = (tile - index) * BLOCK + tl.arange(0, BLOCK)
    in_tile = (token >= begin) & (token < end)
    row = tl.load(staging_ptr + tl.load(staging_ptr + _AT_ROWS) + index, mask=is_live, other=0).to(tl.int64)
    computed = tl.load(staging_ptr + tl.load(staging_ptr + _AT_COMPUTED) + index, mask=is_live, other=0)
    if HAS_EXTRA:
        computed += tl.load(extra_ptr + row, mask=is_live, other=0)
    # Bounds rather than scalar conditions, which the interpreter does not broadcast as booleans.
    live = in_tile & (token < tl.where(is_live, end, begin))
    # 0 for padding, so that nothing negative is divided: `//` truncates on a GPU.
    position = tl.where(live, computed.to(tl.int64) + token - begin, 0)
    if group == 0:
        tl.store(token_rows_ptr + token, tl.where(is_live, row, _PAD).to(tl.int32), mask=in_tile)
        tl.store(positions_ptr + token, position, mask=in_tile)
    block_size = tl.load(meta + _BLOCK_SIZE)
    has_slots = live & (token < tl.where(block_size > 0, end, begin))
    divisor = tl.maximum(block_size, 1)
    num_ranks = tl.load(meta + _NUM_RANKS)
    interleave = tl.load(meta + _INTERLEAVE)
    span = divisor * num_ranks
    ordinal = position // span
    offset = position % span // (interleave * num_ranks) * interleave + position % interleave
    has_slots = has_slots & (position // interleave % num_ranks == tl.load(meta + _RANK))
    record = _record_of(staging_ptr, group, index, is_live)
    first, count = _live_range(words_ptr, meta, staging_ptr, row, record, is_live)
    has_slots = has_slots & (ordinal >= first) & (ordinal < count)
    column = ordinal % tl.maximum(tl.load(meta + _WIDTH), 1)
    entry = _entries(words_ptr, meta, staging_ptr, row, record, column, has_slots)
    slot = tl.where(entry > 0, entry.to(tl.int64) * divisor + offset, _PAD)
    tl.store(slots_ptr + token, slot, mask=in_tile)


@jit
def _seq_lens(
    staging_ptr: tl.tensor, extra_ptr: tl.tensor, index: tl.tensor, mask: tl.tensor, HAS_EXTRA: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return rows, tokens computed, tokens after this step of batch positions; 0 where the mask is false."""
    row = tl.load(staging_ptr + tl.load(staging_ptr + _AT_ROWS) + index, mask=mask, other=0).to(tl.int64)
    starts = staging_ptr + tl.load(staging_ptr + _AT_QUERY_STARTS) + index
    query_len = tl.load(starts + 1, mask=mask, other=0) - tl.load(starts, mask=mask, other=0)
    computed = tl.load(staging_ptr + tl.load(staging_ptr + _AT_COMPUTED) + index, mask=mask, other=0)
    if HAS_EXTRA:
        computed += tl.load(extra_ptr + row, mask=mask, other=0)
    return row, computed, computed + query_len


@jit
def _num_pages_before(
    words_ptr: tl.tensor,
    meta: tl.tensor,
    staging_ptr: tl.tensor,
    extra_ptr: tl.tensor,
    group: tl.tensor,
    index: tl.tensor,
    num_reqs: tl.tensor,
    HAS_EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the pages of all batch positions before `index`."""
    total = index * 0
    for begin in range(0, index, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        mask = (other < index) & (other < num_reqs)
        row, _, seq_len = _seq_lens(staging_ptr, extra_ptr, other, mask, HAS_EXTRA)
        record = _record_of(staging_ptr, group, other, mask)
        first, count = _live_range(words_ptr, meta, staging_ptr, row, record, mask)
        num_pages = _num_pages(meta, _local_len(meta, seq_len, first), first, count)
        total += tl.sum(tl.where(mask, num_pages, 0)).to(tl.int32)
    return total


@jit
def _index_row(
    words_ptr: tl.tensor,
    meta: tl.tensor,
    index_meta: tl.tensor,
    staging_ptr: tl.tensor,
    extra_ptr: tl.tensor,
    state_slots_ptr: tl.tensor,
    index_ptr: tl.tensor,
    group: tl.tensor,
    index: tl.tensor,
    column_tile: tl.tensor,
    num_reqs_padded: tl.tensor,
    HAS_EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write one batch position's page indices of one group, one tile of columns."""
    num_reqs = _live_reqs(staging_ptr, num_reqs_padded)
    is_live = index < num_reqs
    in_batch = index < num_reqs_padded
    row, _, seq_len = _seq_lens(staging_ptr, extra_ptr, index, is_live, HAS_EXTRA)
    record = _record_of(staging_ptr, group, index, is_live)
    first, count = _live_range(words_ptr, meta, staging_ptr, row, record, is_live)
    width = tl.maximum(tl.load(meta + _WIDTH), 1)
    place = column_tile * BLOCK + tl.arange(0, BLOCK)

    state_row = tl.load(index_meta + _STATE_ROW)
    if (state_row >= 0) & in_batch:
        entry = _entries(words_ptr, meta, staging_ptr, row, record, place, place < tl.where(is_live, width, 0))
        target = state_slots_ptr + (state_row + place) * num_reqs_padded + index
        tl.store(target, tl.where(entry > 0, entry.to(tl.int64), _PAD), mask=place < width)

    table_at = tl.load(index_meta + _TABLE_AT)
    indptr_at = tl.load(index_meta + _INDPTR_AT)
    if (table_at >= 0) | (indptr_at >= 0):
        num_tokens = _local_len(meta, seq_len, first)
        ordinal = first + place
        entry = _entries(
            words_ptr, meta, staging_ptr, row, record, ordinal % width, ordinal < tl.where(is_live, count, 0)
        )
        if (table_at >= 0) & in_batch:
            table_width = tl.load(index_meta + _TABLE_WIDTH)
            tl.store(index_ptr + table_at + index * table_width + place, entry, mask=place < table_width)
            if column_tile == 0:
                span = tl.load(meta + _BLOCK_SIZE) * tl.load(meta + _NUM_RANKS)
                tl.store(index_ptr + tl.load(index_meta + _FIRST_AT) + index, (first * span).to(tl.int32))
                local_len = tl.where(is_live, num_tokens, tl.load(index_meta + _PAD_SEQ_LEN))
                tl.store(index_ptr + tl.load(index_meta + _LEN_AT) + index, local_len.to(tl.int32))
        if indptr_at >= 0:
            block_size = tl.load(meta + _BLOCK_SIZE)
            num_pages = tl.where(is_live, _num_pages(meta, num_tokens, first, count), 0)
            begin = _num_pages_before(words_ptr, meta, staging_ptr, extra_ptr, group, index, num_reqs, HAS_EXTRA, BLOCK)
            num_indices = tl.load(index_meta + _NUM_INDICES)
            is_page = (place < num_pages) & (begin + place < num_indices)
            tl.store(index_ptr + tl.load(index_meta + _INDICES_AT) + begin + place, entry, mask=is_page)
            if column_tile == 0:
                tl.store(index_ptr + indptr_at + index, begin)
                if in_batch:
                    last = tl.minimum(num_tokens - (num_pages - 1) * block_size, block_size)
                    last = tl.where(num_pages > 0, last, 0)
                    tl.store(index_ptr + tl.load(index_meta + _LAST_AT) + index, last.to(tl.int32))


@jit
def step_kernel(
    words_ptr: tl.tensor,  # [num_words] int32
    group_meta_ptr: tl.tensor,  # [G, 9] int64
    index_meta_ptr: tl.tensor,  # [G, 10] int64
    staging_ptr: tl.tensor,  # [staging words] int32
    extra_ptr: tl.tensor,  # [num_rows] int32
    rows_ptr: tl.tensor,  # [R] int32
    query_start_ptr: tl.tensor,  # [R + 1] int32
    seq_lens_ptr: tl.tensor,  # [R] int32
    zero_start_ptr: tl.tensor,  # [R] bool
    token_rows_ptr: tl.tensor,  # [T] int32
    positions_ptr: tl.tensor,  # [T] int64
    slots_ptr: tl.tensor,  # [G, T] int64
    state_slots_ptr: tl.tensor,  # [S, R] int64
    index_ptr: tl.tensor,  # [index words] int32
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    num_reqs_padded: tl.tensor,
    num_tokens_padded: tl.tensor,
    stride_slots: tl.tensor,
    HAS_EXTRA: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    group = tl.program_id(1)
    meta = group_meta_ptr + group * _META_COLUMNS
    if program < num_rows:
        _apply_record(words_ptr, meta, staging_ptr, group, program, BLOCK)
    elif program < num_rows + num_tiles:
        slots = slots_ptr + group.to(tl.int64) * stride_slots
        _map_tile(
            words_ptr,
            meta,
            staging_ptr,
            extra_ptr,
            token_rows_ptr,
            positions_ptr,
            slots,
            group,
            program - num_rows,
            num_reqs_padded,
            num_tokens_padded,
            HAS_EXTRA,
            BLOCK,
        )
    else:
        index = (program - num_rows - num_tiles) // COLUMN_TILES
        column_tile = (program - num_rows - num_tiles) % COLUMN_TILES
        if (group == 0) & (column_tile == 0):
            num_reqs = _live_reqs(staging_ptr, num_reqs_padded)
            is_live = index < num_reqs
            row, computed, seq_len = _seq_lens(staging_ptr, extra_ptr, index, is_live, HAS_EXTRA)
            begin = tl.load(staging_ptr + tl.load(staging_ptr + _AT_QUERY_STARTS) + tl.minimum(index, num_reqs))
            tl.store(query_start_ptr + index, tl.minimum(begin, num_tokens_padded))
            if index < num_reqs_padded:
                tl.store(rows_ptr + index, tl.where(is_live, row, _PAD).to(tl.int32))
                tl.store(seq_lens_ptr + index, seq_len)
                tl.store(zero_start_ptr + index, is_live & (computed == 0))
        _index_row(
            words_ptr,
            meta,
            index_meta_ptr + group * _INDEX_COLUMNS,
            staging_ptr,
            extra_ptr,
            state_slots_ptr,
            index_ptr,
            group,
            index,
            column_tile,
            num_reqs_padded,
            HAS_EXTRA,
            BLOCK,
        )
