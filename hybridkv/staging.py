"""One step's work packed for the device: see `hybridkv_kernels.step_layout` for the buffer."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hybridkv.change_log import DirtySpans
from hybridkv.plan import SlotMappingMode
from hybridkv.step_batch import StepBatch
from hybridkv.table_arrays import TableArrays
from hybridkv_kernels.step_layout import HEADER_WORDS, RECORD_WORDS, Header, Record

_MIN_PAYLOAD_WORDS = 4096


def staging_words(arrays: TableArrays, max_num_reqs: int, max_num_batched_tokens: int) -> int:
    """Return the words of a staging buffer: every row may change, and a full batch's new blocks fit."""
    new_blocks = 0
    for shape in arrays.shapes:
        if shape.mode is SlotMappingMode.NONE:  # a row's states come once, however many tokens it computes
            new_blocks += max_num_reqs * shape.width
        else:
            new_blocks += max_num_batched_tokens // shape.block_size + max_num_reqs
    num_pairs = arrays.num_groups * arrays.num_rows
    fixed = _fixed_words(arrays.num_groups, max_num_reqs)
    return fixed + RECORD_WORDS * num_pairs + max(_MIN_PAYLOAD_WORDS, new_blocks)


def rounds(spans: DirtySpans, capacity: int) -> Iterator[DirtySpans]:
    """Cut spans so that no part has more than `capacity` words of payload; most steps have one part."""
    ends = spans.num_payload.cumsum()
    starts = ends - spans.num_payload
    total = int(ends[-1]) if len(ends) else 0
    begin = 0
    while total - begin > capacity:
        stop = begin + capacity
        here = np.flatnonzero((starts < stop) & (ends > begin))
        skipped = np.maximum(begin - starts[here], 0)
        num_words = np.minimum(ends[here], stop) - starts[here] - skipped
        low = spans.low[here] + skipped
        yield DirtySpans(spans.pairs[here], low, num_words, num_words, spans.source[begin:stop])
        begin = stop
    skipped = np.clip(begin - starts, 0, spans.num_payload)
    yield replace(
        spans,
        low=spans.low + skipped,
        num_words=spans.num_words - skipped,
        num_payload=spans.num_payload - skipped,
        source=spans.source[begin:],
    )


def payload_capacity(arrays: TableArrays, max_num_reqs: int, num_staging_words: int) -> int:
    """Return how many words of payload fit a staging buffer in which every row has a record."""
    num_pairs = arrays.num_groups * arrays.num_rows
    return num_staging_words - _fixed_words(arrays.num_groups, max_num_reqs) - RECORD_WORDS * num_pairs


def pack(arrays: TableArrays, spans: DirtySpans, batch: StepBatch, out: NDArray[np.int32]) -> int:
    """Write one step's work into a staging buffer; return the words it takes.

    Shapes: out [num_staging_words] int32
    """
    num_groups, num_rows = arrays.num_groups, arrays.num_rows
    num_reqs, num_records = len(batch.rows), len(spans.pairs)
    at_query_starts = HEADER_WORDS + num_reqs
    at_computed = at_query_starts + num_reqs + 1
    at_record_of = at_computed + num_reqs
    at_group_starts = at_record_of + num_groups * num_reqs
    at_records = at_group_starts + num_groups + 1
    at_payload = at_records + RECORD_WORDS * num_records
    end = at_payload + len(spans.source)
    out[Header.NUM_REQS], out[Header.NUM_TOKENS] = num_reqs, batch.query_starts[-1]
    out[Header.AT_ROWS], out[Header.AT_QUERY_STARTS] = HEADER_WORDS, at_query_starts
    out[Header.AT_COMPUTED], out[Header.AT_RECORD_OF] = at_computed, at_record_of
    out[Header.AT_GROUP_STARTS], out[Header.AT_RECORDS] = at_group_starts, at_records
    out[HEADER_WORDS:at_query_starts] = batch.rows
    out[at_query_starts:at_computed] = batch.query_starts
    out[at_computed:at_record_of] = batch.computed
    number_of = np.full(num_groups * num_rows, -1, dtype=np.int32)
    number_of[spans.pairs] = np.arange(num_records)
    record_of = out[at_record_of:at_group_starts].reshape(num_groups, num_reqs)
    record_of[:] = number_of.reshape(num_groups, num_rows)[:, batch.rows]
    out[at_group_starts:at_records] = np.searchsorted(spans.pairs, np.arange(num_groups + 1) * num_rows)
    records = out[at_records:at_payload].reshape(num_records, RECORD_WORDS)
    records[:, Record.ROW] = spans.pairs % num_rows
    records[:, Record.LOW] = spans.low
    records[:, Record.NUM_WORDS] = spans.num_words
    records[:, Record.NUM_PAYLOAD] = spans.num_payload
    records[:, Record.AT_PAYLOAD] = at_payload + spans.num_payload.cumsum() - spans.num_payload
    records[:, Record.FIRST] = arrays.words[arrays.first_offset + spans.pairs]
    records[:, Record.COUNT] = arrays.words[arrays.count_offset + spans.pairs]
    out[at_payload:end] = arrays.words[spans.source]
    return end


def _fixed_words(num_groups: int, max_num_reqs: int) -> int:
    return HEADER_WORDS + 3 * max_num_reqs + 1 + num_groups * max_num_reqs + num_groups + 1
