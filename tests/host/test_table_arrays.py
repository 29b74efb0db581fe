"""Claims about the rows of all groups in one array: where they lie, what operations on many rows do and refuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hybridkv.block_table import BlockTable, join_tables
from hybridkv.plan import SlotMappingMode
from hybridkv.row_operations import RowOperations
from hybridkv.table_arrays import TableArrays, TableShape
from tests.host_paths import PATHS, using
from tests.models import apply_spans, copy_dirty
from tests.snapshots import snapshot

FULL, RING, NONE = SlotMappingMode.FULL, SlotMappingMode.SLIDING_WINDOW, SlotMappingMode.NONE
BOTH_HOST_PATHS = True
NUM_ROWS = 5
SHAPES = (
    TableShape(6, 4),
    TableShape(6, 4),
    TableShape(3, 48, RING),
    TableShape(2, 1, NONE),
    TableShape(6, 4, RING),
    TableShape(3, 48, RING),
)
"""Neighbours of equal rows, a ring as wide as a full group, equal rings that are no neighbours, states."""


def i32(*values: int) -> np.ndarray:
    """An int32 array."""
    return np.array(values, dtype=np.int32)


def make(num_groups: int = len(SHAPES)) -> RowOperations:
    """Empty tables of the first `num_groups` of `SHAPES`."""
    tables = BlockTable.of_groups(NUM_ROWS, SHAPES[:num_groups])
    return RowOperations(tables, tables[0].arrays)


def make_three() -> RowOperations:
    """Tables of a full group, another one and a ring: rows 0..2 hold two blocks, the ring's rows ordinals 4 and 5."""
    tables = make(3)
    for row in range(3):
        tables.add_row(row, [[10 * row + 1, 10 * row + 2]] * 3, [0, 0, 4])
    tables.arrays.take_dirty()
    return tables


def rows_of(tables: RowOperations) -> list[list[tuple[int, list[int]]]]:
    """The first live ordinal and the blocks of every row of every group."""
    return [
        [(int(table.first_block_per_row[row]), table.row_block_ids(row).tolist()) for row in range(table.num_rows)]
        for table in tables.tables
    ]


def test_words_hold_all_entries_then_all_live_ranges() -> None:
    """Groups' entries follow each other, then every first live ordinal, then every next one; tables are views."""
    tables = BlockTable.of_groups(2, [TableShape(5, 16), TableShape(1, 1, NONE)])
    arrays = tables[0].arrays
    assert (arrays.num_groups, arrays.first_offset, len(arrays.words)) == (2, 2 * 8 + 2 * 4, 24 + 2 * 4)
    tables[0].append_row(1, [7, 8])
    tables[1].append_row(0, [9])
    tables[0].drop_row_head(1, 1)
    assert arrays.words[:24].tolist() == [0] * 8 + [0, 8] + [0] * 6 + [9] + [0] * 7
    assert arrays.words[24:].tolist() == [0, 1, 0, 0, 0, 2, 1, 0]
    for table in tables:
        for view in (table.entries, table.first_block_per_row, table.num_blocks_per_row):
            assert np.shares_memory(view, arrays.words)
    assert sum(table.nbytes for table in tables) == arrays.words.nbytes


def test_group_metas_say_where_a_kernel_finds_what_tables_show() -> None:
    """Read through its `GroupMeta` every row of every group has the entries and live ranges that the table shows."""
    tables = make_three()
    words = tables.arrays.words.tolist()
    for table, meta in zip(tables.tables, tables.arrays.group_metas, strict=True):
        assert (meta.width, meta.row_stride, meta.block_size) == (table.width, table.stride, table.block_size)
        for row in range(NUM_ROWS):
            live = meta.live_ordinals(words, row)
            assert [meta.entry(words, row, ordinal) for ordinal in live] == table.row_block_ids(row).tolist()
    assert make().arrays.group_metas[3].block_size == 0


@pytest.mark.parametrize(
    ("message", "shape"),
    [
        ("width: got 0", lambda: TableShape(0, 4)),
        ("block_size: got 0", lambda: TableShape(4, 0)),
        (r"width: got 2147483648, expected 1\.\.2147483647", lambda: TableShape(2**31, 4)),
        ("rank", lambda: TableShape(4, 4, FULL, num_ranks=2, rank=2)),
        ("num_ranks", lambda: TableShape(4, 4, FULL, num_ranks=0)),
        ("interleave", lambda: TableShape(4, 4, FULL, num_ranks=2, interleave=3)),
    ],
)
def test_shapes_that_no_kernel_can_read_are_refused(message: str, shape: Callable[[], TableShape]) -> None:
    """Sizes out of range, a rank outside its world and an interleave that cuts a block raise a `ValueError`."""
    with pytest.raises(ValueError, match=message):
        shape()


def test_tables_made_one_by_one_are_joined_with_what_they_hold() -> None:
    """Joining moves the rows of single tables into one array, which they show from then on; all of it is dirty."""
    singles = [BlockTable(2, 4, 16), BlockTable(2, 3, 4, RING)]
    singles[0].append_row(1, [5, 6])
    singles[1].add_row(0, [7, 8, 9], 5)
    joined = RowOperations(singles, join_tables(singles))
    assert rows_of(joined) == [[(0, []), (0, [5, 6])], [(5, [7, 8, 9]), (0, [])]]
    assert all(table.arrays is joined.arrays for table in singles)
    joined.append_row(1, [[4], [3]])
    assert joined.arrays.live_ids(np.array([1, 3])).tolist() == [5, 6, 4, 3]
    mirror = np.zeros_like(joined.arrays.words)
    apply_spans(joined.arrays, joined.arrays.take_dirty(), mirror)
    assert np.array_equal(mirror, joined.arrays.words)
    assert join_tables(singles) is joined.arrays


def test_tables_that_share_rows_are_joined_whole_or_not_at_all() -> None:
    """Some tables of a plan, those of a plan in another order, or one table twice raise; no table changes."""
    shared, single = BlockTable.of_groups(2, [TableShape(4, 16)] * 2), BlockTable(2, 4, 16)
    arrays = shared[0].arrays
    for tables in ([shared[0]], shared[::-1], [single, shared[0]], [single, single]):
        with pytest.raises(ValueError, match="expected all of a plan's or single ones"):
            join_tables(tables)
    assert (shared[0].arrays, shared[1].arrays, single.arrays.num_groups) == (arrays, arrays, 1)
    with pytest.raises(ValueError, match="expected at least 1 group and 1 row"):
        TableArrays(2, [])


def test_tables_with_a_mirror_are_not_joined_away() -> None:
    """A table whose changes go to a mirror stays where it is: joining it with another raises, and neither moves."""
    wrapped, single = BlockTable(2, 4, 16), BlockTable(2, 4, 16)
    arrays = wrapped.arrays, single.arrays
    wrapped.arrays.attach(object())
    with pytest.raises(ValueError, match="expected tables without a device mirror"):
        join_tables([single, wrapped])
    assert (wrapped.arrays, single.arrays) == arrays
    assert join_tables([wrapped]) is wrapped.arrays


COUNTS = np.array([[1, 1]] * 3)
HUGE = np.array([[2**64 - 1, 1]] * 3, dtype=np.uint64)
REFUSED: list[tuple[str, Callable[[RowOperations], object]]] = [
    ("row: got 5", lambda tables: tables.append_rows([0, 5], COUNTS, i32(*range(1, 7)))),
    ("row: got -1", lambda tables: tables.add_rows([0, -1], COUNTS, i32(*range(1, 7)))),
    ("row: got 9", lambda tables: tables.clear_rows([0, 9])),
    ("row: got 5", lambda tables: tables.move_rows([0, 1], [3, 5])),
    ("row: got -1", lambda tables: tables.move_rows([-1], [3])),
    ("expected distinct rows", lambda tables: tables.append_rows([1, 1], COUNTS, i32(*range(1, 7)))),
    ("expected distinct rows", lambda tables: tables.add_rows([4, 4], COUNTS, i32(*range(1, 7)))),
    ("expected distinct rows", lambda tables: tables.clear_rows([2, 0, 2])),
    ("expected distinct rows", lambda tables: tables.move_rows([0, 1], [3, 3])),
    ("expected distinct rows", lambda tables: tables.move_rows([0, 1], [1, 3])),
    ("got 1 rows for 2 sources", lambda tables: tables.move_rows([0, 1], [3])),
    ("sources: got float64", lambda tables: tables.move_rows([0.5], [3])),
    ("rows: got int64 of shape", lambda tables: tables.clear_rows([[0]])),
    (r"counts: got int64 of shape \(2, 2\)", lambda tables: tables.append_rows([0, 1], COUNTS[:2], i32(1, 2, 3, 4))),
    ("counts: got float64", lambda tables: tables.append_rows([0, 1], COUNTS / 1, i32(*range(1, 7)))),
    ("counts: got -1", lambda tables: tables.append_rows([0, 1], [[1, 1], [-1, 1], [0, 0]], i32(1, 2))),
    ("the sum of counts", lambda tables: tables.append_rows([0, 1], COUNTS, i32(1, 2, 3, 4, 5))),
    ("the sum of counts", lambda tables: tables.add_rows([0, 1], COUNTS, i32(*range(1, 8)))),
    ("block_ids: got int64", lambda tables: tables.add_rows([0, 1], COUNTS, np.arange(1, 7))),
    ("block_ids: got a list, expected an int32 array", lambda tables: tables.add_rows([0, 1], COUNTS, [*range(1, 7)])),
    ("counts: got 1..18446744073709551615", lambda tables: tables.append_rows([0, 1], HUGE, i32(1))),
    ("0 is the null block", lambda tables: tables.append_rows([0, 1], COUNTS, i32(1, 2, 3, 4, 5, 0))),
    ("got id -4, expected at least 1", lambda tables: tables.add_rows([0, 1], COUNTS, i32(1, 2, 3, 4, -4, 6))),
    ("group 2 row 1: would hold 4 blocks", lambda tables: tables.append_rows([1], [[1], [1], [2]], i32(1, 2, 3, 4))),
    ("group 1 row 0: would hold 7 blocks", lambda tables: tables.append_rows([0], [[0], [5], [0]], i32(1, 2, 3, 4, 5))),
    ("group 2 row 4: would hold 4 blocks", lambda tables: tables.add_rows([4], [[0], [0], [4]], i32(1, 2, 3, 4))),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[f"{idx}" for idx in range(len(REFUSED))])
def test_a_refused_operation_on_many_rows_changes_no_group(
    message: str, call: Callable[[RowOperations], object]
) -> None:
    """Every wrong argument raises a `ValueError` that says it; no row of any group changes and nothing is dirty."""
    tables = make_three()
    before = snapshot(tables)
    with pytest.raises(ValueError, match=message):
        call(tables)
    assert snapshot(tables) == before
    assert tables.arrays.take_dirty().pairs.size == 0


def test_operations_on_no_rows_do_nothing() -> None:
    """Empty lists of rows and counts of 0 are fine, change nothing and make no column dirty."""
    tables = make_three()
    before = rows_of(tables)
    none, no_counts = np.empty(0, dtype=np.int32), np.empty((3, 0), dtype=np.int64)
    tables.append_rows([], no_counts, none)
    tables.add_rows([], no_counts, none)
    tables.move_rows([], [])
    assert tables.clear_rows([]).tolist() == []
    tables.append_rows([1, 2], np.zeros((3, 2), dtype=np.int64), none)
    assert rows_of(tables) == before
    assert not tables.arrays.take_dirty().num_words.any()


def test_moving_many_rows_takes_them_all_from_where_they_were() -> None:
    """Rows move group by group with their ordinals; targets forget what they held, sources read null."""
    tables = make_three()
    tables.add_row(4, [[91] * 5, [92], [93, 94, 95]], [0, 0, 7])
    tables.move_rows([2, 1], [4, 3])
    moved = [(0, []), (0, [])]
    for group, first in enumerate((0, 0, 4)):
        assert rows_of(tables)[group] == [(first, [1, 2]), *moved, (first, [11, 12]), (first, [21, 22])]
    for table in tables.tables:
        assert not table.entries[1:3].any()
        assert not table.entries[~table.live_mask()].any()


Model = list[list[tuple[int, list[int]]]]


class BulkMachine(RuleBasedStateMachine):
    """Operations on many rows at once beside the same ones row by row, and a mirror."""

    @initialize(path=st.sampled_from(PATHS), dtype=st.sampled_from([np.int32, np.int64]))
    def start(self, path: str, dtype: type[np.signedinteger]) -> None:
        with using(path):
            self.bulk, self.single = make(), make()
        self.dtype = dtype
        self.mirror = np.zeros_like(self.bulk.arrays.words)
        self.next_id = 1

    def ids(self, counts: np.ndarray) -> np.ndarray:
        """Block ids never used before, for counts by group and row."""
        self.next_id += int(counts.sum())
        return np.arange(self.next_id - counts.sum(), self.next_id, dtype=np.int32)

    def lists(self, counts: np.ndarray, block_ids: np.ndarray) -> list[list[np.ndarray]]:
        """Ids by group and row, those of a row of `counts`."""
        parts = np.split(block_ids, counts.reshape(-1).cumsum()[:-1]) if counts.size else []
        num_rows = counts.shape[1]
        return [parts[group * num_rows : (group + 1) * num_rows] for group in range(len(counts))]

    @rule(data=st.data(), rows=st.permutations(range(NUM_ROWS)), is_new=st.booleans(), is_alike=st.booleans())
    def append_or_add(self, data: st.DataObject, rows: list[int], is_new: bool, is_alike: bool) -> None:
        rows = rows[: data.draw(st.integers(0, NUM_ROWS))]
        most = 2 if is_new or is_alike else 3
        counts = np.full((len(SHAPES), len(rows)), data.draw(st.integers(0, most)), dtype=np.int64)
        if not is_alike:
            counts += (
                np.array(data.draw(st.lists(st.integers(0, 1), min_size=counts.size, max_size=counts.size)))[
                    : counts.size
                ]
                .reshape(counts.shape)
                .astype(np.int64)
            )
        block_ids = self.ids(counts)
        operation = self.bulk.add_rows if is_new else self.bulk.append_rows
        before = snapshot(self.single)
        try:
            for i, row in enumerate(rows):
                of_row = [of_group[i] for of_group in self.lists(counts, block_ids)]
                (self.single.add_row if is_new else self.single.append_row)(row, of_row)
        except ValueError:
            self.restore(before)
            state = snapshot(self.bulk)
            with pytest.raises(ValueError, match="would hold"):
                operation(self.array(rows), counts.astype(self.dtype), block_ids)
            assert snapshot(self.bulk) == state
        else:
            operation(self.array(rows), counts.astype(self.dtype), block_ids)

    def array(self, rows: list[int]) -> np.ndarray:
        """Rows as an array, which the compiled helper takes."""
        return np.array(rows, dtype=self.dtype)

    def restore(self, before: object) -> None:
        """Give the row-by-row tables the words that they had."""
        words = before["arrays"]["words"][2]  # type: ignore[index]
        self.single.arrays.words[:] = words

    @rule(rows=st.permutations(range(NUM_ROWS)), count=st.integers(0, NUM_ROWS))
    def clear(self, rows: list[int], count: int) -> None:
        held = [self.single.clear_row(row) for row in rows[:count]]
        expected = [int(block_id) for group in range(len(SHAPES)) for of_row in held for block_id in of_row[group]]
        assert self.bulk.clear_rows(self.array(rows[:count])).tolist() == expected

    @rule(rows=st.permutations(range(NUM_ROWS)), count=st.integers(0, NUM_ROWS // 2))
    def move(self, rows: list[int], count: int) -> None:
        sources, targets = rows[:count], rows[count : 2 * count]
        self.bulk.move_rows(self.array(sources), self.array(targets))
        for source, target in zip(sources, targets, strict=True):
            for table in self.single.tables:
                table.move_row(source, target)

    @rule(row=st.integers(0, NUM_ROWS - 1), data=st.data())
    def drop(self, row: int, data: st.DataObject) -> None:
        live = zip(self.bulk.first_block_per_row[:, row], self.bulk.num_blocks_per_row[:, row], strict=True)
        heads = [data.draw(st.integers(int(first), int(count))) for first, count in live]
        dropped = self.bulk.drop_row_head(row, heads)
        for table, head, ids in zip(self.single.tables, heads, dropped, strict=True):
            assert table.drop_row_head(row, head).tolist() == ids.tolist()

    @rule(rows=st.permutations(range(NUM_ROWS)))
    def swap(self, rows: list[int]) -> None:
        self.bulk.swap_row(*rows[:2])
        for table in self.single.tables:
            table.swap_row(*rows[:2])

    @rule(by_spans=st.booleans())
    def commit(self, by_spans: bool) -> None:
        arrays = self.bulk.arrays
        if by_spans:
            apply_spans(arrays, arrays.take_dirty(), self.mirror)
        else:
            copy_dirty(arrays, self.mirror)
        assert np.array_equal(self.mirror, arrays.words)

    @invariant()
    def both_are_equal(self) -> None:
        assert np.array_equal(self.bulk.arrays.words, self.single.arrays.words)
        for table in self.bulk.tables:
            assert not table.entries[~table.live_mask()].any()


TestBulkMachine = BulkMachine.TestCase
TestBulkMachine.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
