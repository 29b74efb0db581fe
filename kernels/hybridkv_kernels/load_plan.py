"""Copies that gather a token range of every row into a contiguous buffer of its own.

    tokens of a row    |...dead...| block 7 | block 8 | block 3 |..beyond seq_len..|        4 tokens a block
    range [6, 22)             | - - | a a a a | b b b b | c c c - - - |
    plan (source, begin, end, destination)   (-1, 0, 2, 0), (7, 0, 8, 2), (3, 0, 3, 10), (-1, 0, 3, 13)

Contract
    segments[i, k] = (source, begin, end, destination): tokens [begin, end) counted from the first slot of block
                     `source`, across the blocks that follow it in memory, go to places [destination, destination +
                     end - begin) of the buffer; source -1 stands for zeros, its begin is 0
                   = (-1, 0, 0, 0) from the last segment on
    counts[i]      = number of segments of the row, also where that is more than max_segments: the list is cut, the
                     count is not

    The segments cover [a, b) = ranges[i] in order, without gap or overlap. One that copies is as long as block ids rise
    by one. Tokens that are not in use (`group_rows`) or lie in a null block are zeros; those after the last ordinal in
    use or after seq_len are one segment. Ordinals are walked in order, so a ring that wrapped needs no care. A padding
    row has no segments.

Shapes
    batch     GroupRows over [R] batch positions, not sharded by context parallelism: there a range is no run of slots
    ranges    [R, 2]                int32   a, b in tokens; not read for padding
    segments  [R, max_segments, 4]  int32   contiguous; every element is written
    counts    [R]                   int32

Invariants
    P1..P3 of `group_rows`
    I1  0 <= a <= b
    I2  no row has more than max_segments segments (cdiv(b - a, block_size) + 3 always suffice)

Grid: (R,); a program walks its range in tiles.
"""

from __future__ import annotations

import torch

from hybridkv_kernels._checks import expect, expect_one_device, expect_tensor
from hybridkv_kernels._segments import running_max, store_marked
from hybridkv_kernels._triton import Launch, jit, tl
from hybridkv_kernels.constants import NULL_BLOCK_ID, PAD_SLOT_ID
from hybridkv_kernels.group_rows import (
    GroupRows,
    check_group_rows,
    gather_entries,
    load_entries,
    load_rows,
    used_ordinals,
)

__all__ = ["ZERO_SOURCE", "check_load_plan", "load_plan", "load_plan_reference", "load_plan_torch", "prepare_load_plan"]

ZERO_SOURCE = -1
"""Source of a segment that is zeros."""
_SEGMENT_WORDS = 4
_BLOCK_ORDINALS = 512


def _check_shapes(batch: GroupRows, ranges: torch.Tensor, segments: torch.Tensor, counts: torch.Tensor) -> None:
    num_rows = batch.num_rows
    expect_tensor("ranges", ranges, torch.int32, (num_rows, 2))
    expect_tensor("segments", segments, torch.int32, (num_rows, None, _SEGMENT_WORDS))
    expect_tensor("counts", counts, torch.int32, (num_rows,))
    named = (("words", batch.words), ("ranges", ranges), ("segments", segments), ("counts", counts))
    for name, tensor in named:
        expect(tensor.is_contiguous(), f"{name}.stride()", "contiguous", tensor.stride())
    expect_one_device(named)
    expected = "1 (a range is no run of slots where ranks share a sequence; plan each rank's own tokens)"
    expect(batch.meta.num_ranks == 1, "group_meta.num_ranks", expected, batch.meta.num_ranks)


def _list_segments(batch: GroupRows, ranges: torch.Tensor) -> list[list[list[int]]]:
    """Return the segments of every batch position, token by token."""
    words, meta = batch.words.tolist(), batch.meta
    found = []
    for row, seq_len, (a, b) in zip(batch.rows.tolist(), batch.seq_lens.tolist(), ranges.tolist(), strict=True):
        segments: list[list[int]] = []
        found.append(segments)
        live = meta.live_ordinals(words, row)
        stop = max(a, min(seq_len, live.stop * meta.span))
        if stop <= live.start * meta.span:
            stop = a  # nothing is in use: all of the range follows the last token
        previous = PAD_SLOT_ID
        for position in range(a, b) if row >= 0 else ():
            slot = meta.slot(words, row, position) if position < stop else PAD_SLOT_ID
            is_zero = slot == PAD_SLOT_ID
            goes_on = previous == PAD_SLOT_ID if is_zero else previous != PAD_SLOT_ID and slot == previous + 1
            if not segments or not goes_on or position == stop:
                source, begin = (ZERO_SOURCE, 0) if is_zero else divmod(slot, meta.block_size)
                segments.append([source, begin, begin, position - a])
            segments[-1][2] += 1
            previous = slot
    return found


def check_load_plan(batch: GroupRows, ranges: torch.Tensor, *, segments: torch.Tensor, counts: torch.Tensor) -> None:
    """Check the invariants; syncs, for tests and debugging.

    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(batch, ranges, segments, counts)
    check_group_rows(batch)
    for row, (a, b) in zip(batch.rows.tolist(), ranges.tolist(), strict=True):
        expect(row < 0 or 0 <= a <= b, f"row {row}: range", "0 <= a <= b", (a, b))
    max_segments = segments.shape[1]
    for row, listed in zip(batch.rows.tolist(), _list_segments(batch, ranges), strict=True):
        expect(len(listed) <= max_segments, f"row {row}: segments", f"<= {max_segments} (max_segments)", len(listed))


def load_plan_reference(
    batch: GroupRows, ranges: torch.Tensor, *, segments: torch.Tensor, counts: torch.Tensor
) -> None:
    """Plan token by token.

    Shapes, dtypes: as in the module's contract.
    """
    segments[:] = torch.tensor([ZERO_SOURCE, 0, 0, 0], dtype=torch.int32)
    for index, listed in enumerate(_list_segments(batch, ranges)):
        counts[index] = len(listed)
        for k, segment in enumerate(listed[: segments.shape[1]]):
            segments[index, k] = torch.tensor(segment, dtype=torch.int32)


def load_plan_torch(batch: GroupRows, ranges: torch.Tensor, *, segments: torch.Tensor, counts: torch.Tensor) -> None:
    """Plan with torch operations; syncs off the CPU, since temporaries follow the longest range.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype or device, for a group sharded by context parallelism.
    """
    _check_shapes(batch, ranges, segments, counts)
    segments[:] = torch.tensor([ZERO_SOURCE, 0, 0, 0], dtype=torch.int32, device=segments.device)
    counts.fill_(0)
    if batch.num_rows == 0:
        return
    size, used = batch.meta.block_size, used_ordinals(batch)
    a, b = ranges.long().masked_fill((batch.rows < 0)[:, None], 0).unbind(1)
    stop = torch.minimum(torch.minimum(used.seq_len, used.end * size), b)
    stop = torch.where(stop > torch.maximum(used.first * size, a), stop, a)
    begin_ordinal = a // size
    end_ordinal = torch.where(stop > a, (stop + size - 1) // size, begin_ordinal)
    steps = torch.arange(int((end_ordinal - begin_ordinal).max()), device=ranges.device)
    ordinals = begin_ordinal[:, None] + steps  # [R, J]
    entries = gather_entries(batch, used, ordinals)
    is_held, is_walked = entries != NULL_BLOCK_ID, ordinals < end_ordinal[:, None]
    follows = torch.where(is_held[:, :-1], entries[:, 1:] == entries[:, :-1] + 1, ~is_held[:, 1:])
    is_start, is_end = is_walked.clone(), is_walked.clone()
    is_start[:, 1:] &= ~follows
    is_end[:, :-1] &= ~(follows & is_walked[:, 1:])
    segment = is_start.cumsum(1) - 1
    start = torch.where(is_start, ordinals, begin_ordinal[:, None]).cummax(1).values * size
    from_token = torch.maximum(start, a[:, None])
    end = torch.minimum((ordinals + 1) * size, stop[:, None]) - torch.where(is_held, start, from_token)
    fields = (entries.masked_fill(~is_held, ZERO_SOURCE), torch.where(is_held, from_token - start, 0))
    for word, values, is_marked in (
        (0, fields[0], is_start),
        (1, fields[1], is_start),
        (2, end, is_end),
        (3, from_token - a[:, None], is_start),
    ):
        store_marked(segments[:, :, word], segment, is_marked, values)
    num_walked, has_tail = is_start.sum(1), stop < b
    store_marked(segments[:, :, 2], num_walked[:, None], has_tail[:, None], (b - stop)[:, None])
    store_marked(segments[:, :, 3], num_walked[:, None], has_tail[:, None], (stop - a)[:, None])
    counts.copy_(num_walked + has_tail)


@jit
def _load_plan_kernel(
    words_ptr: tl.tensor,  # [num_words] int32
    rows_ptr: tl.tensor,  # [R] int32
    seq_lens_ptr: tl.tensor,  # [R] int32
    table_offset: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    first_offset: tl.tensor,
    count_offset: tl.tensor,
    size: tl.tensor,  # block size
    ranges_ptr: tl.tensor,  # [R, 2] int32
    segments_ptr: tl.tensor,  # [R, max_segments, 4] int32
    counts_ptr: tl.tensor,  # [R] int32
    num_rows: tl.tensor,
    max_segments: tl.tensor,
    NULL_BLOCK: tl.constexpr,
    ZERO: tl.constexpr,
    SEGMENT_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    row, first, end, seq_len = load_rows(
        words_ptr, rows_ptr, seq_lens_ptr, first_offset, count_offset, size, index, index < num_rows
    )
    is_row = tl.load(rows_ptr + index) >= 0
    a = tl.load(ranges_ptr + index * 2, mask=is_row, other=0).to(tl.int64)
    b = tl.load(ranges_ptr + index * 2 + 1, mask=is_row, other=0).to(tl.int64)
    stop = tl.minimum(tl.minimum(seq_len, end * size), b)
    stop = tl.where(stop > tl.maximum(first * size, a), stop, a)
    begin_ordinal = a // size
    end_ordinal = tl.where(stop > a, (stop + size - 1) // size, begin_ordinal)
    row_segments = segments_ptr + index * max_segments * SEGMENT_WORDS
    steps = tl.arange(0, BLOCK).to(tl.int64)
    num_segments = tl.full((), 0, tl.int64)
    segment_start = begin_ordinal
    for tile in range(begin_ordinal, end_ordinal, BLOCK):
        ordinal = tile + steps
        entry = load_entries(words_ptr, table_offset, row_stride, width, row, first, end, ordinal, NULL_BLOCK)
        before = load_entries(words_ptr, table_offset, row_stride, width, row, first, end, ordinal - 1, NULL_BLOCK)
        after = load_entries(words_ptr, table_offset, row_stride, width, row, first, end, ordinal + 1, NULL_BLOCK)
        is_held = entry != NULL_BLOCK
        is_walked = ordinal < end_ordinal
        # Zeros follow zeros, block id x + 1 follows x.
        follows = tl.where(is_held, (before != NULL_BLOCK) & (entry == before + 1), before == NULL_BLOCK)
        is_followed = tl.where(is_held, after == entry + 1, after == NULL_BLOCK)
        is_start = is_walked & ((ordinal == begin_ordinal) | (follows == 0))
        is_end = is_walked & ((ordinal == end_ordinal - 1) | (is_followed == 0))
        segment = num_segments + tl.cumsum(is_start.to(tl.int64), 0) - 1
        start_ordinal = running_max(tl.where(is_start, ordinal, segment_start))
        start = start_ordinal * size
        from_token = tl.maximum(start, a)
        place = row_segments + segment * SEGMENT_WORDS
        fits = segment < max_segments
        origin = tl.where(is_held, start, from_token)
        end_token = tl.minimum((ordinal + 1) * size, stop)
        tl.store(place, tl.where(is_held, entry, ZERO).to(tl.int32), mask=is_start & fits)
        tl.store(place + 1, (from_token - origin).to(tl.int32), mask=is_start & fits)
        tl.store(place + 2, (end_token - origin).to(tl.int32), mask=is_end & fits)
        tl.store(place + 3, (from_token - a).to(tl.int32), mask=is_start & fits)
        num_segments += tl.sum(is_start.to(tl.int64), 0)
        segment_start = tl.max(start_ordinal, 0)
    num_walked = num_segments
    num_segments += (stop < b).to(tl.int64)
    tl.store(counts_ptr + index, num_segments.to(tl.int32))
    for tile in range(num_walked, max_segments, BLOCK):
        # The zeros after the last token, then the segments that the row does not use.
        segment = tile + steps
        is_tail = segment < num_segments
        place = row_segments + segment * SEGMENT_WORDS
        fits = segment < max_segments
        tl.store(place, tl.full((BLOCK,), ZERO, tl.int32), mask=fits)
        tl.store(place + 1, tl.zeros((BLOCK,), tl.int32), mask=fits)
        tl.store(place + 2, tl.where(is_tail, b - stop, 0).to(tl.int32), mask=fits)
        tl.store(place + 3, tl.where(is_tail, stop - a, 0).to(tl.int32), mask=fits)


def prepare_load_plan(
    batch: GroupRows, ranges: torch.Tensor, *, segments: torch.Tensor, counts: torch.Tensor
) -> Launch:
    """Check shapes, dtypes, strides without a sync, then return the launch that `load_plan` runs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(batch, ranges, segments, counts)
    return Launch(
        name="load_plan",
        kernel=_load_plan_kernel,
        grid=(batch.num_rows, 1, 1),
        args=(*batch.kernel_args, ranges, segments, counts, batch.num_rows, segments.shape[1]),
        options={
            "NULL_BLOCK": NULL_BLOCK_ID,
            "ZERO": ZERO_SOURCE,
            "SEGMENT_WORDS": _SEGMENT_WORDS,
            "BLOCK": _BLOCK_ORDINALS,
            "num_warps": 4,
        },
    )


def load_plan(batch: GroupRows, ranges: torch.Tensor, *, segments: torch.Tensor, counts: torch.Tensor) -> None:
    """Write the load plan of every row with one kernel launch; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device, for a group sharded by context parallelism;
        ImportError without triton.
    """
    prepare_load_plan(batch, ranges, segments=segments, counts=counts).run()
