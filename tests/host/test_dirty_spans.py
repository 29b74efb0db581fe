"""Claims about what is dirty: one span a row and group, which holds all that changed and little else."""

from __future__ import annotations

import numpy as np
import pytest

from hybridkv.block_table import BlockTable
from hybridkv.change_log import DirtySpans
from hybridkv.plan import SlotMappingMode
from hybridkv.row_operations import RowOperations
from hybridkv.table_arrays import TableArrays, TableShape
from tests.models import apply_spans, copy_dirty
from tests.snapshots import snapshot

RING = SlotMappingMode.SLIDING_WINDOW
BOTH_HOST_PATHS = True


def i64(*values: int) -> np.ndarray:
    """An int64 array."""
    return np.array(values, dtype=np.int64)


def i32(*values: int) -> np.ndarray:
    """An int32 array."""
    return np.array(values, dtype=np.int32)


def joined() -> tuple[TableArrays, list[BlockTable]]:
    """Three rows of a full group 6 wide and of a ring 3 wide, in one array."""
    tables = BlockTable.of_groups(3, [TableShape(6, 4), TableShape(3, 2, RING)])
    return tables[0].arrays, tables


def spans_of(table: BlockTable) -> list[tuple[int, int, int, int]]:
    """Take what is dirty: (row, low, words, of which payload) of each span."""
    spans = table.arrays.take_dirty()
    columns = spans.pairs, spans.low, spans.num_words, spans.num_payload
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_row_is_dirty_once_and_only_where_it_changed() -> None:
    """Touching columns often reports one span a row, ascending; the next call reports only what changed since."""
    table = BlockTable(3, 8, 32)
    table.append_row(2, [9])
    for block_id in (5, 6):
        table.add_row(1, [block_id])
    assert spans_of(table) == [(1, 0, 1, 1), (2, 0, 1, 1)]
    assert spans_of(table) == []
    table.append_row(2, [3])
    table.append_row(2, [4, 7])
    assert spans_of(table) == [(2, 1, 3, 3)]
    table.drop_row_head(2, 1)
    table.append_row(2, [8])
    assert spans_of(table) == [(2, 0, 5, 5)]


def test_a_span_names_its_payload() -> None:
    """A span's source are the words of its columns, span by span."""
    table = BlockTable(2, 4, 32)
    table.append_row(1, [5, 6])
    table.append_row(0, [7])
    spans = table.arrays.take_dirty()
    assert isinstance(spans, DirtySpans)
    assert spans.source.tolist() == [0, 4, 5]
    assert table.arrays.words[spans.source].tolist() == [7, 5, 6]


def test_nulls_past_the_live_end_do_not_travel() -> None:
    """Of a row that became shorter the new blocks travel and the nulls behind them are counted only."""
    table = BlockTable(2, 8, 32)
    table.append_row(0, range(1, 9))
    table.append_row(1, [20])
    table.arrays.take_dirty()
    table.add_row(0, [11, 12, 13])
    table.clear_row(1)
    assert spans_of(table) == [(0, 0, 8, 3), (1, 0, 1, 0)]


def test_the_payload_reaches_to_the_live_end_whatever_was_dropped() -> None:
    """Where the head is dropped the nulls before the live ordinals travel, and so do all of the live ones."""
    arrays, tables = joined()
    tables[0].append_row(1, [5, 6, 7])
    tables[0].drop_row_head(1, 2)
    tables[1].add_row(2, [8], 1)
    tables[1].add_row(0, [9], 5)
    spans = arrays.take_dirty()
    assert (spans.pairs.tolist(), spans.low.tolist()) == ([1, 3, 5], [0, 2, 1])
    assert (spans.num_words.tolist(), spans.num_payload.tolist()) == ([3, 1, 1], [3, 1, 1])
    assert arrays.words[spans.source].tolist() == [0, 0, 7, 9, 8]


@pytest.mark.parametrize("num_changes", [0, 1, 200])
def test_what_changed_long_ago_arrives_with_the_next_copy(num_changes: int) -> None:
    """A row that changed before many changes of another one is copied with them, to a host mirror and by spans."""
    arrays, tables = joined()
    mirrors = [np.zeros_like(arrays.words) for _ in range(2)]
    for by_spans, mirror in enumerate(mirrors):
        tables[0].add_row(0, [7 + by_spans, 8])
        for _ in range(num_changes):
            tables[1].add_row(1, [5, 6], 2)
            tables[1].drop_row_head(1, 4)
        tables[1].append_row(2, [9])
        if by_spans:
            mirror[:] = mirrors[0]
            apply_spans(arrays, arrays.take_dirty(), mirror)
        else:
            copy_dirty(arrays, mirror)
        assert np.array_equal(mirror, arrays.words)


def test_a_span_that_wraps_takes_the_whole_row() -> None:
    """In a ring, blocks on both sides of the seam make the row one span, all of which travels."""
    table = BlockTable(1, 6, 32, RING)
    table.append_row(0, range(1, 6))
    table.drop_row_head(0, 4)
    table.arrays.take_dirty()
    table.append_row(0, [6])
    assert spans_of(table) == [(0, 5, 1, 1)]
    table.append_row(0, [7, 8])
    assert spans_of(table) == [(0, 0, 2, 2)]
    table.drop_row_head(0, 7)
    assert spans_of(table) == [(0, 0, 6, 6)]


def test_heads_dropped_from_rings_that_wrapped_are_dirty_where_they_were() -> None:
    """One block dropped from each of several wrapped rows marks that block's column, in every row."""
    table = BlockTable(3, 5, 32, RING)
    for row, first in enumerate((1, 2, 9)):
        table.add_row(row, [10, 11, 12, 13, 14], first)
    table.arrays.take_dirty()
    table.drop_rows_head(i64(0, 1, 2), i64(2, 3, 10))
    assert spans_of(table) == [(0, 1, 1, 1), (1, 2, 1, 1), (2, 4, 1, 1)]


def test_dirty_marks_are_bounded_when_nobody_takes_them() -> None:
    """A table that nobody commits remembers no more after many changes than after some, and one span a row."""
    table = BlockTable(2, 4, 32)
    sizes = []
    for _ in range(300):
        table.append_rows(i64(0, 1), i64(4, 4), np.arange(1, 9, dtype=np.int32))
        table.clear_rows(i64(0, 1))
        sizes.append(len(repr(snapshot(table.arrays))))
    assert max(sizes[150:]) <= max(sizes[:150])
    assert spans_of(table) == [(0, 0, 4, 0), (1, 0, 4, 0)]


def test_operations_on_nothing_leave_no_marks() -> None:
    """Clearing no rows or empty ones, appending no blocks and dropping no ordinals make nothing dirty."""
    table = BlockTable(2, 4, 4, RING)
    table.add_row(1, [5, 6], 3)
    table.arrays.take_dirty()
    table.clear_rows(i64())
    table.clear_rows(i64(0))
    table.clear_row(0)
    table.append_row(0, [])
    table.append_rows(i64(0, 1), i64(0, 0), i32())
    table.drop_row_head(1, 3)
    assert spans_of(table) == []
    arrays, tables = joined()
    rows = RowOperations(tables, arrays)
    rows.append_row(1, [[], []])
    rows.append_rows([0, 1], np.zeros((2, 2), dtype=np.int64), i32())
    assert rows.clear_rows([0, 2]).tolist() == []
    assert arrays.take_dirty().pairs.size == 0
    tables[1].append_row(2, [5])
    arrays.take_dirty()
    assert rows.clear_rows([0, 2]).tolist() == [5]
    assert arrays.take_dirty().pairs.tolist() == [2, 5]


def test_a_new_mirror_gets_every_row_that_is_not_empty() -> None:
    """After `attach` all rows with blocks or a live range are dirty, wrapped and emptied ones too, and no others."""
    arrays, tables = joined()
    tables[0].add_row(0, [5, 6], 1)
    tables[0].add_row(2, [7])
    tables[1].add_row(0, [8, 9], 5)
    tables[1].add_row(1, [], 4)
    arrays.take_dirty()
    tables[0].clear_row(2)
    consumer = object()
    arrays.attach(consumer)
    assert arrays.consumer is consumer
    assert spans_of(tables[0]) == [(0, 1, 2, 2), (3, 0, 3, 3), (4, 0, 0, 0)]
    mirror = np.zeros_like(arrays.words)
    arrays.attach(consumer)
    copy_dirty(arrays, mirror)
    assert np.array_equal(mirror, arrays.words)


@pytest.mark.parametrize("num_changes", [1, 200])
def test_spans_taken_back_are_dirty_again(num_changes: int) -> None:
    """Spans that could not travel come again, together with what changed since."""
    arrays, tables = joined()
    for _ in range(num_changes):
        tables[0].add_row(1, [5, 6])
    tables[1].add_row(0, [7, 8], 3)
    tables[1].drop_row_head(0, 5)
    spans = arrays.take_dirty()
    arrays.mark_again(spans)
    again = arrays.take_dirty()
    for name in ("pairs", "low", "num_words", "num_payload", "source"):
        assert getattr(again, name).tolist() == getattr(spans, name).tolist()
    arrays.mark_again(again)
    tables[0].append_row(1, [9])
    mirror = np.zeros_like(arrays.words)
    apply_spans(arrays, arrays.take_dirty(), mirror)
    assert np.array_equal(mirror, arrays.words)
    assert not arrays.take_dirty().pairs.size


@pytest.mark.parametrize("num_changes", [1, 200])
def test_a_host_copy_that_fails_loses_nothing(num_changes: int) -> None:
    """What a failed copy to a host mirror should have brought comes with the next one."""
    arrays, tables = joined()
    for _ in range(num_changes):
        tables[0].add_row(1, [5, 6])
    mirror = np.zeros_like(arrays.words)
    mirror.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copy_dirty(arrays, mirror)
    tables[1].add_row(0, [7, 8], 3)
    mirror.flags.writeable = True
    copy_dirty(arrays, mirror)
    assert np.array_equal(mirror, arrays.words)


def test_what_is_dirty_does_not_hang_on_the_callers_arrays() -> None:
    """Arrays that a caller uses again between an operation and the commit do not change what travels."""
    arrays, tables = joined()
    rows, counts, ids = i64(1, 2), i64(3, 1), i32(4, 5, 6, 7)
    tables[0].append_rows(rows, counts, ids)
    rows[:], counts[:], ids[:] = 0, 0, 0
    firsts, dropped = i64(1), i64(1)
    tables[0].drop_rows_head(dropped, firsts)
    firsts[:], dropped[:] = 0, 0
    mirror = np.zeros_like(arrays.words)
    apply_spans(arrays, arrays.take_dirty(), mirror)
    assert np.array_equal(mirror, arrays.words)
    assert tables[0].row_block_ids(1).tolist() == [5, 6]
