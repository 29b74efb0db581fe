"""Triton kernel of the step; its contract and its grid are in `step_tables`.

No program waits for another: what this step changes is read from the staging buffer, everything else from the tables,
which this step does not change there.
"""

from __future__ import annotations

from hybridkv_kernels._row_tiles import find_row
from hybridkv_kernels._triton import jit, tl


@jit
def _apply_record(
    words_ptr: tl.tensor,
    meta: tl.tensor,
    staging_ptr: tl.tensor,
    group: tl.tensor,
    number: tl.tensor,
    RECORD_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the changed span and the live range of one record of a group, if it has so many."""
    starts = staging_ptr + tl.load(staging_ptr + 6) + group
    number += tl.load(starts)
    if number < tl.load(starts + 1):
        record = staging_ptr + tl.load(staging_ptr + 7) + number * RECORD_WORDS
        row = tl.load(record).to(tl.int64)
        low = tl.load(record + 1)
        num_words = tl.load(record + 2)
        num_payload = tl.load(record + 3)
        payload = staging_ptr + tl.load(record + 4)
        target = words_ptr + tl.load(meta) + row * tl.load(meta + 1) + low
        for begin in range(0, num_words, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            entry = tl.load(payload + column, mask=column < num_payload, other=0)
            tl.store(target + column, entry, mask=column < num_words)
        tl.store(words_ptr + tl.load(meta + 4) + row, tl.load(record + 5))
        tl.store(words_ptr + tl.load(meta + 5) + row, tl.load(record + 6))


@jit
def _record_of(
    staging_ptr: tl.tensor,
    group: tl.tensor,
    position: tl.tensor,
    num_reqs: tl.tensor,
    mask: tl.tensor,
    RECORD_WORDS: tl.constexpr,
) -> tl.tensor:
    """Return where the records of batch positions begin, -1 for none."""
    record_of = staging_ptr + tl.load(staging_ptr + 5) + group * num_reqs
    number = tl.load(record_of + position, mask=mask, other=-1)
    return tl.where(number >= 0, tl.load(staging_ptr + 7) + number * RECORD_WORDS, -1)


@jit
def _live_range(
    words_ptr: tl.tensor, meta: tl.tensor, staging_ptr: tl.tensor, row: tl.tensor, record: tl.tensor, mask: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first live ordinal of rows, and the one after the last."""
    changed = mask & (record >= 0)
    same = mask & (record < 0)
    record = tl.maximum(record, 0)
    first = tl.load(staging_ptr + record + 5, mask=changed, other=0)
    first += tl.load(words_ptr + tl.load(meta + 4) + row, mask=same, other=0)
    count = tl.load(staging_ptr + record + 6, mask=changed, other=0)
    count += tl.load(words_ptr + tl.load(meta + 5) + row, mask=same, other=0)
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
    low = tl.load(staging_ptr + record + 1, mask=changed, other=0)
    num_words = tl.load(staging_ptr + record + 2, mask=changed, other=0)
    num_payload = tl.load(staging_ptr + record + 3, mask=changed, other=0)
    payload = tl.load(staging_ptr + record + 4, mask=changed, other=0)
    place = column - low
    in_span = (place >= 0) & (place < num_words)
    entry = tl.load(staging_ptr + payload + place, mask=mask & in_span & (place < num_payload), other=0)
    begin = tl.load(meta) + row * tl.load(meta + 1)
    return entry + tl.load(words_ptr + begin + column, mask=mask & ~in_span, other=0)


@jit
def _local_len(meta: tl.tensor, seq_len: tl.tensor, first: tl.tensor) -> tl.tensor:
    """Return the tokens of this rank from ordinal `first` on."""
    interleave = tl.load(meta + 8)
    turn = interleave * tl.load(meta + 6)
    last_turn = seq_len % turn - tl.load(meta + 7) * interleave
    last_turn = tl.minimum(tl.maximum(last_turn, 0), interleave)
    return tl.maximum(seq_len // turn * interleave + last_turn - first * tl.load(meta + 3), 0)


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
    num_tokens_padded: tl.tensor,
    RECORD_WORDS: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write row, position and slot of one tile of one batch position's tokens; after the last one it is padding."""
    num_reqs = tl.load(staging_ptr)
    starts = staging_ptr + tl.load(staging_ptr + 3)
    index = find_row(starts, tile, num_reqs + 1, BLOCK)
    is_live = index < num_reqs
    begin = tl.load(starts + index)
    end = tl.load(starts + index + 1, mask=is_live, other=0)
    end = tl.where(is_live, end, num_tokens_padded)
    token = (tile - index) * BLOCK + tl.arange(0, BLOCK)
    in_tile = (token >= begin) & (token < end)
    row = tl.load(staging_ptr + tl.load(staging_ptr + 2) + index, mask=is_live, other=0).to(tl.int64)
    computed = tl.load(staging_ptr + tl.load(staging_ptr + 4) + index, mask=is_live, other=0)
    if HAS_EXTRA:
        computed += tl.load(extra_ptr + row, mask=is_live, other=0)
    # Bounds rather than scalar conditions, which the interpreter does not broadcast as booleans.
    live = in_tile & (token < tl.where(is_live, end, begin))
    # 0 for padding, so that nothing negative is divided: `//` truncates on a GPU.
    position = tl.where(live, computed.to(tl.int64) + token - begin, 0)
    if group == 0:
        tl.store(token_rows_ptr + token, tl.where(is_live, row, PAD).to(tl.int32), mask=in_tile)
        tl.store(positions_ptr + token, position, mask=in_tile)
    block_size = tl.load(meta + 3)
    has_slots = live & (token < tl.where(block_size > 0, end, begin))
    divisor = tl.maximum(block_size, 1)
    num_ranks = tl.load(meta + 6)
    interleave = tl.load(meta + 8)
    span = divisor * num_ranks
    ordinal = position // span
    offset = position % span // (interleave * num_ranks) * interleave + position % interleave
    has_slots = has_slots & (position // interleave % num_ranks == tl.load(meta + 7))
    record = _record_of(staging_ptr, group, index, num_reqs, is_live, RECORD_WORDS)
    first, count = _live_range(words_ptr, meta, staging_ptr, row, record, is_live)
    has_slots = has_slots & (ordinal >= first) & (ordinal < count)
    column = ordinal % tl.maximum(tl.load(meta + 2), 1)
    entry = _entries(words_ptr, meta, staging_ptr, row, record, column, has_slots)
    slot = tl.where(entry > 0, entry.to(tl.int64) * divisor + offset, PAD)
    tl.store(slots_ptr + token, slot, mask=in_tile)


@jit
def _seq_lens(
    staging_ptr: tl.tensor, extra_ptr: tl.tensor, index: tl.tensor, mask: tl.tensor, HAS_EXTRA: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return rows, tokens computed, tokens after this step of batch positions; 0 where the mask is false."""
    row = tl.load(staging_ptr + tl.load(staging_ptr + 2) + index, mask=mask, other=0).to(tl.int64)
    starts = staging_ptr + tl.load(staging_ptr + 3) + index
    query_len = tl.load(starts + 1, mask=mask, other=0) - tl.load(starts, mask=mask, other=0)
    computed = tl.load(staging_ptr + tl.load(staging_ptr + 4) + index, mask=mask, other=0)
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
    RECORD_WORDS: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the pages of all batch positions before `index`."""
    block_size = tl.load(meta + 3)
    total = index * 0
    for begin in range(0, index, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        mask = (other < index) & (other < num_reqs)
        row, _, seq_len = _seq_lens(staging_ptr, extra_ptr, other, mask, HAS_EXTRA)
        record = _record_of(staging_ptr, group, other, num_reqs, mask, RECORD_WORDS)
        first, _ = _live_range(words_ptr, meta, staging_ptr, row, record, mask)
        num_pages = (_local_len(meta, seq_len, first) + block_size - 1) // block_size
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
    RECORD_WORDS: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write one batch position's page indices of one group, one tile of columns."""
    num_reqs = tl.load(staging_ptr)
    is_live = index < num_reqs
    in_batch = index < num_reqs_padded
    row, _, seq_len = _seq_lens(staging_ptr, extra_ptr, index, is_live, HAS_EXTRA)
    record = _record_of(staging_ptr, group, index, num_reqs, is_live, RECORD_WORDS)
    first, count = _live_range(words_ptr, meta, staging_ptr, row, record, is_live)
    width = tl.maximum(tl.load(meta + 2), 1)
    place = column_tile * BLOCK + tl.arange(0, BLOCK)

    state_row = tl.load(index_meta + 9)
    if (state_row >= 0) & in_batch:
        entry = _entries(words_ptr, meta, staging_ptr, row, record, place, place < tl.where(is_live, width, 0))
        target = state_slots_ptr + (state_row + place) * num_reqs_padded + index
        tl.store(target, tl.where(entry > 0, entry.to(tl.int64), PAD), mask=place < width)

    table_at = tl.load(index_meta)
    indptr_at = tl.load(index_meta + 4)
    if (table_at >= 0) | (indptr_at >= 0):
        num_tokens = _local_len(meta, seq_len, first)
        ordinal = first + place
        entry = _entries(
            words_ptr, meta, staging_ptr, row, record, ordinal % width, ordinal < tl.where(is_live, count, 0)
        )
        if (table_at >= 0) & in_batch:
            table_width = tl.load(index_meta + 1)
            tl.store(index_ptr + table_at + index * table_width + place, entry, mask=place < table_width)
            if column_tile == 0:
                span = tl.load(meta + 3) * tl.load(meta + 6)
                tl.store(index_ptr + tl.load(index_meta + 2) + index, (first * span).to(tl.int32))
                local_len = tl.where(is_live, num_tokens, tl.load(index_meta + 8))
                tl.store(index_ptr + tl.load(index_meta + 3) + index, local_len.to(tl.int32))
        if indptr_at >= 0:
            block_size = tl.load(meta + 3)
            num_pages = tl.where(is_live, (num_tokens + block_size - 1) // block_size, 0)
            begin = _num_pages_before(
                words_ptr, meta, staging_ptr, extra_ptr, group, index, num_reqs, RECORD_WORDS, HAS_EXTRA, BLOCK
            )
            num_indices = tl.load(index_meta + 6)
            is_page = (place < num_pages) & (begin + place < num_indices)
            tl.store(index_ptr + tl.load(index_meta + 5) + begin + place, entry, mask=is_page)
            if column_tile == 0:
                tl.store(index_ptr + indptr_at + index, begin)
                if in_batch:
                    last = tl.where(num_pages > 0, num_tokens - (num_pages - 1) * block_size, 0)
                    tl.store(index_ptr + tl.load(index_meta + 7) + index, last.to(tl.int32))


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
    META_COLUMNS: tl.constexpr,
    INDEX_COLUMNS: tl.constexpr,
    RECORD_WORDS: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    PAD: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    group = tl.program_id(1)
    meta = group_meta_ptr + group * META_COLUMNS
    if program < num_rows:
        _apply_record(words_ptr, meta, staging_ptr, group, program, RECORD_WORDS, BLOCK)
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
            num_tokens_padded,
            RECORD_WORDS,
            HAS_EXTRA,
            PAD,
            BLOCK,
        )
    else:
        index = (program - num_rows - num_tiles) // COLUMN_TILES
        column_tile = (program - num_rows - num_tiles) % COLUMN_TILES
        if (group == 0) & (column_tile == 0):
            num_reqs = tl.load(staging_ptr)
            is_live = index < num_reqs
            row, computed, seq_len = _seq_lens(staging_ptr, extra_ptr, index, is_live, HAS_EXTRA)
            begin = tl.load(staging_ptr + tl.load(staging_ptr + 3) + tl.minimum(index, num_reqs))
            tl.store(query_start_ptr + index, begin)
            if index < num_reqs_padded:
                tl.store(rows_ptr + index, tl.where(is_live, row, PAD).to(tl.int32))
                tl.store(seq_lens_ptr + index, seq_len)
                tl.store(zero_start_ptr + index, is_live & (computed == 0))
        _index_row(
            words_ptr,
            meta,
            index_meta_ptr + group * INDEX_COLUMNS,
            staging_ptr,
            extra_ptr,
            state_slots_ptr,
            index_ptr,
            group,
            index,
            column_tile,
            num_reqs_padded,
            RECORD_WORDS,
            HAS_EXTRA,
            PAD,
            BLOCK,
        )
