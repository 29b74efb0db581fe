"""Claims about one step's work on its way to the device: what is packed, that cutting it up changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.block_table import BlockTable
from hybridkv.change_log import DirtySpans
from hybridkv.plan import SlotMappingMode
from hybridkv.row_operations import RowOperations
from hybridkv.staging import pack, payload_capacity, rounds, staging_words
from hybridkv.step_batch import StepBatch
from hybridkv.table_arrays import TableArrays, TableShape
from hybridkv_kernels.step_layout import HEADER_WORDS, RECORD_WORDS, Header, IndexMeta, Record
from hybridkv_kernels.step_reference import StepArrays, step_reference

FULL, RING, NONE = SlotMappingMode.FULL, SlotMappingMode.SLIDING_WINDOW, SlotMappingMode.NONE
NUM_ROWS, NUM_TOKENS = 3, 8
SHAPES = (TableShape(6, 4), TableShape(3, 2, RING), TableShape(2, 1, NONE))
NOTHING = StepBatch.of([], [], [])


def make() -> RowOperations:
    """Empty tables of a full group, a ring and states."""
    tables = BlockTable.of_groups(NUM_ROWS, SHAPES)
    return RowOperations(tables, tables[0].arrays)


def outputs(num_reqs: int, num_tokens: int) -> StepArrays:
    """Outputs of a step, filled with what no step writes."""
    return StepArrays(
        rows=np.full(num_reqs, 77, dtype=np.int32),
        query_start_loc=np.full(num_reqs + 1, 77, dtype=np.int32),
        seq_lens=np.full(num_reqs, 77, dtype=np.int32),
        zero_start=np.ones(num_reqs, dtype=np.bool_),
        token_rows=np.full(num_tokens, 77, dtype=np.int32),
        positions=np.full(num_tokens, 77, dtype=np.int64),
        slots=np.full((len(SHAPES), num_tokens), 77, dtype=np.int64),
        state_slots=np.full((2, num_reqs), 77, dtype=np.int64),
        index=np.empty(0, dtype=np.int32),
    )


def run_round(arrays: TableArrays, spans: DirtySpans, batch: StepBatch, mirror: np.ndarray, out: StepArrays) -> int:
    """Pack one round into a poisoned buffer and run the reference on it; return the words packed."""
    staging = np.full(staging_words(arrays, NUM_ROWS, NUM_TOKENS), -9, dtype=np.int32)
    num_words = pack(arrays, spans, batch, staging)
    assert (staging[num_words:] == -9).all()
    group_meta = np.array([meta.as_row() for meta in arrays.group_metas])
    index_meta = np.array([IndexMeta(state_row=0 if shape.mode is NONE else -1).as_row() for shape in SHAPES])
    step_reference(mirror, group_meta, index_meta, staging[:num_words], None, out=out)
    return num_words


def random_history(rng: np.random.Generator, tables: RowOperations, num_operations: int) -> None:
    """Change rows at random; what is refused changes nothing."""
    for _ in range(num_operations):
        row, other = rng.integers(0, NUM_ROWS, 2).tolist()
        ids = [rng.integers(1, 500, rng.integers(0, shape.width + 1)) for shape in SHAPES]
        try:
            match rng.choice(["append", "add", "clear", "swap", "drop"]):
                case "append":
                    tables.append_row(row, ids)
                case "add":
                    tables.add_row(row, ids, [0, int(rng.integers(0, 5)), 0])
                case "clear":
                    tables.clear_row(row)
                case "swap":
                    tables.swap_row(row, other)
                case "drop":
                    tables.drop_row_head(row, [0, int(tables.num_blocks_per_row[1, row]), 0])
        except ValueError:
            continue


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), capacity=st.integers(1, 40))
def test_rounds_one_after_another_equal_one_round(seed: int, capacity: int) -> None:
    """Work cut up for a buffer of any capacity gives the tables and the outputs that it gives in one piece."""
    rng, tables = np.random.default_rng(seed), make()
    mirrors = [np.zeros_like(tables.arrays.words) for _ in range(2)]
    for _ in range(3):
        random_history(rng, tables, 6)
        rows = rng.permutation(NUM_ROWS)[: rng.integers(0, NUM_ROWS + 1)]
        batch = StepBatch.of(rows, rng.integers(1, 3, len(rows)), rng.integers(0, 12, len(rows)))
        spans = tables.arrays.take_dirty()
        whole, cut = outputs(NUM_ROWS, NUM_TOKENS), outputs(NUM_ROWS, NUM_TOKENS)
        run_round(tables.arrays, spans, batch, mirrors[0], whole)
        *first_parts, last_part = rounds(spans, capacity)
        for part in first_parts:
            assert len(part.source) == capacity
            run_round(tables.arrays, part, NOTHING, mirrors[1], outputs(0, 0))
        run_round(tables.arrays, last_part, batch, mirrors[1], cut)
        assert np.array_equal(mirrors[0], tables.arrays.words)
        assert np.array_equal(mirrors[1], tables.arrays.words)
        for name, expected in vars(whole).items():
            assert np.array_equal(getattr(cut, name), expected), name


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), capacity=st.integers(1, 40))
def test_rounds_are_few_and_carry_each_word_once(seed: int, capacity: int) -> None:
    """There are as many rounds as full buffers take, one at least; their payloads are the whole's, in order."""
    tables = make()
    random_history(np.random.default_rng(seed), tables, 8)
    spans = tables.arrays.take_dirty()
    parts = list(rounds(spans, capacity))
    assert len(parts) == max(1, -(-len(spans.source) // capacity))
    assert np.concatenate([part.source for part in parts]).tolist() == spans.source.tolist()
    assert sum(int(part.num_words.sum()) for part in parts) == spans.num_words.sum()
    for part in parts:
        assert part.num_payload.sum() == len(part.source) <= capacity
        assert (np.diff(part.pairs) > 0).all()
    assert parts[-1].pairs.tolist() == spans.pairs.tolist()


def test_work_that_fits_is_not_cut() -> None:
    """A payload of exactly the capacity is one round; a word more makes two, a row of no words none."""
    tables = make()
    tables.append_row(0, [[1, 2, 3], [4], [5]])
    spans = tables.arrays.take_dirty()
    assert [len(list(rounds(spans, capacity))) for capacity in (5, 4, 3, 1)] == [1, 2, 2, 5]
    tables.clear_row(0)
    assert len(list(rounds(tables.arrays.take_dirty(), 1))) == 1
    assert len(list(rounds(tables.arrays.take_dirty(), 1))) == 1


def test_the_packed_words_of_a_small_step() -> None:
    """Two rows of a batch and a third row beside it: header, rows, starts, lengths, records, payload, word by word."""
    tables = make()
    tables.append_row(2, [[7, 8], [], [9, 6]])
    tables.append_row(0, [[], [5], []])
    tables.drop_row_head(0, [0, 1, 0])
    staging = np.full(200, -9, dtype=np.int32)
    arrays = tables.arrays
    num_words = pack(arrays, arrays.take_dirty(), StepBatch.of([2, 1], [3, 1], [4, 0]), staging)
    rows_at, starts_at, computed_at, record_of_at, groups_at, records_at = (
        int(staging[place])
        for place in (
            Header.AT_ROWS,
            Header.AT_QUERY_STARTS,
            Header.AT_COMPUTED,
            Header.AT_RECORD_OF,
            Header.AT_GROUP_STARTS,
            Header.AT_RECORDS,
        )
    )
    assert staging[[Header.NUM_REQS, Header.NUM_TOKENS]].tolist() == [2, 4]
    assert staging[rows_at:][:2].tolist() == [2, 1]
    assert staging[starts_at:][:3].tolist() == [0, 3, 4]
    assert staging[computed_at:][:2].tolist() == [4, 0]
    records = staging[records_at:][: 3 * RECORD_WORDS].reshape(3, RECORD_WORDS)
    assert records[:, Record.ROW].tolist() == [2, 0, 2]
    assert staging[groups_at:][:4].tolist() == [0, 1, 2, 3]
    assert staging[record_of_at:][:6].tolist() == [0, -1, -1, -1, 2, -1]
    assert records[:, [Record.LOW, Record.NUM_WORDS, Record.NUM_PAYLOAD]].tolist() == [[0, 2, 2], [0, 1, 1], [0, 2, 2]]
    assert records[:, [Record.FIRST, Record.COUNT]].tolist() == [[0, 2], [1, 1], [0, 2]]
    payloads = [staging[record[Record.AT_PAYLOAD] :][: record[Record.NUM_PAYLOAD]].tolist() for record in records]
    assert payloads == [[7, 8], [0], [9, 6]]
    assert num_words == HEADER_WORDS + 2 + 3 + 2 + 3 * 2 + 4 + 3 * RECORD_WORDS + 5
    assert (staging[num_words:] == -9).all()


@pytest.mark.parametrize("max_tokens", [1, 8, 100_000])
def test_the_largest_step_fits_its_buffer(max_tokens: int) -> None:
    """With every row dirty, a full batch and as much payload as the capacity says the buffer is full to the word.

    The payload has room for the new blocks of a full batch, one more a row, and every row's states.
    """
    tables = make()
    arrays = tables.arrays
    for row in range(NUM_ROWS):
        tables.append_row(row, [range(1, shape.width + 1) for shape in SHAPES])
    size = staging_words(arrays, NUM_ROWS, max_tokens)
    batch = StepBatch.of(range(NUM_ROWS), [1] * NUM_ROWS, [0] * NUM_ROWS)
    spans = arrays.take_dirty()
    assert len(spans.pairs) == len(SHAPES) * NUM_ROWS
    num_words = pack(arrays, spans, batch, np.zeros(size, dtype=np.int32))
    capacity = payload_capacity(arrays, NUM_ROWS, size)
    assert num_words + capacity - len(spans.source) == size
    assert capacity == max(4096, max_tokens // 4 + max_tokens // 2 + 2 * NUM_ROWS + 2 * NUM_ROWS)
