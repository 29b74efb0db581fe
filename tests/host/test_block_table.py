"""Claims about the rows of one group: which column holds which ordinal, what changed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hybridkv.block_table import BlockTable
from hybridkv.plan import SlotMappingMode
from hybridkv.table_arrays import TableShape
from tests.host_paths import PATHS, using
from tests.models import apply_spans, copy_dirty
from tests.snapshots import snapshot

BOTH_HOST_PATHS = True


def i64(*values: int) -> np.ndarray:
    """An int64 array."""
    return np.array(values, dtype=np.int64)


def i32(*values: int) -> np.ndarray:
    """An int32 array."""
    return np.array(values, dtype=np.int32)


def filled() -> BlockTable:
    """Rows 0..3 of a ring 4 wide: ordinals 0..1, ordinals 3..6 (wrapped), nothing, ordinal 2."""
    table = BlockTable(4, 4, 4, SlotMappingMode.SLIDING_WINDOW)
    table.append_row(0, [11, 12])
    table.add_row(1, [23, 24, 25, 26], first_block=3)
    table.add_row(3, [42], first_block=2)
    table.arrays.take_dirty()
    return table


def test_rows_grow_at_the_tail() -> None:
    """Appended blocks take the next columns; `num_blocks_per_row` is the next ordinal; other rows read null."""
    table = BlockTable(2, 5, 16)
    table.append_row(1, [7, 3])
    table.append_row(1, np.array([9], dtype=np.uint64))
    table.append_row(1, [])
    assert table.entries[:, :5].tolist() == [[0, 0, 0, 0, 0], [7, 3, 9, 0, 0]]
    assert (table.first_block_per_row.tolist(), table.num_blocks_per_row.tolist()) == ([0, 0], [0, 3])
    assert table.row_block_ids(1).tolist() == [7, 3, 9]


def test_a_ring_wraps_where_the_head_was_dropped() -> None:
    """A ring of 4 holds ordinals 3..6 as columns 4 5 6 3, and refuses a fifth block until its head drops."""
    table = BlockTable(1, 4, 4, SlotMappingMode.SLIDING_WINDOW)
    table.append_row(0, [10, 11, 12, 13])
    assert table.drop_row_head(0, 3).tolist() == [10, 11, 12]
    assert table.entries.tolist() == [[0, 0, 0, 13] + [0] * 28]
    table.append_row(0, [14, 15, 16])
    assert table.entries[0, :4].tolist() == [14, 15, 16, 13]
    assert table.row_block_ids(0).tolist() == [13, 14, 15, 16]
    with pytest.raises(ValueError, match="row 0: would hold 5 blocks, it is 4 wide"):
        table.append_row(0, [17])
    assert table.drop_row_head(0, 4).tolist() == [13]
    table.append_row(0, [17])
    assert table.entries[0, :4].tolist() == [14, 15, 16, 17]


def test_dropping_all_blocks_keeps_the_next_ordinal() -> None:
    """A row whose every block is dropped goes on at the ordinal it had reached; dropping less again does nothing."""
    table = BlockTable(1, 2, 4, SlotMappingMode.SLIDING_WINDOW)
    table.append_row(0, [1, 2])
    assert table.drop_row_head(0, 2).tolist() == [1, 2]
    assert table.drop_row_head(0, 1).tolist() == []
    table.append_row(0, [5])
    assert (table.first_block_per_row[0], table.num_blocks_per_row[0]) == (2, 3)
    assert table.entries[0, :2].tolist() == [5, 0]


def test_add_row_replaces() -> None:
    """`add_row` forgets the row's old blocks, those beyond the new ones too, and may start at a later ordinal."""
    table = filled()
    table.add_row(1, [51, 52], first_block=5)
    assert table.entries[1, :4].tolist() == [0, 51, 52, 0]
    table.add_row(1, [])
    assert not table.entries[1].any()
    assert (table.first_block_per_row[1], table.num_blocks_per_row[1]) == (0, 0)


def test_move_row_leaves_no_trace_in_source_nor_target_tail() -> None:
    """Moving 2 blocks over 4 leaves 2: the target's old tail and the whole source read null."""
    table = filled()
    table.move_row(0, 1)
    assert table.entries[:, :4].tolist() == [[0, 0, 0, 0], [11, 12, 0, 0], [0, 0, 0, 0], [0, 0, 42, 0]]
    assert table.first_block_per_row.tolist() == [0, 0, 0, 2]
    assert table.num_blocks_per_row.tolist() == [0, 2, 0, 3]
    table.move_row(2, 3)
    assert not table.entries[2:].any()


def test_swap_row_exchanges_rows_of_unlike_length() -> None:
    """Swapped rows keep their ordinals, wrapped or not; the shorter one's new row has no old tail."""
    table = filled()
    table.swap_row(1, 3)
    assert table.entries[:, :4].tolist() == [[11, 12, 0, 0], [0, 0, 42, 0], [0, 0, 0, 0], [24, 25, 26, 23]]
    assert table.row_block_ids(3).tolist() == [23, 24, 25, 26]
    table.swap_row(2, 3)
    assert (table.row_block_ids(2).tolist(), table.row_block_ids(3).tolist()) == ([23, 24, 25, 26], [])


def test_moving_or_swapping_a_row_with_itself_does_nothing() -> None:
    """A row moved onto itself, or swapped with itself, keeps its blocks and is not dirty."""
    table = filled()
    before = table.arrays.words.copy()
    table.move_row(1, 1)
    table.swap_row(1, 1)
    assert np.array_equal(table.arrays.words, before)
    assert table.arrays.take_dirty().pairs.size == 0


def test_clear_row_returns_what_it_held() -> None:
    """Clearing returns the ids by ordinal, not by column, and a second time returns none."""
    table = filled()
    assert table.clear_row(1).tolist() == [23, 24, 25, 26]
    assert table.clear_row(1).tolist() == []
    assert table.clear_rows(i64(3, 0)).tolist() == [42, 11, 12]
    assert not table.arrays.words.any()


def test_many_rows_at_once_equal_one_by_one() -> None:
    """Vectorised verbs over unordered rows do what the same verbs do row by row."""
    table = filled()
    table.append_rows(i64(3, 2, 0), i64(2, 0, 1), i32(43, 44, 13))
    assert table.entries[:, :4].tolist() == [[11, 12, 13, 0], [24, 25, 26, 23], [0, 0, 0, 0], [44, 0, 42, 43]]
    assert table.drop_rows_head(i64(1, 2, 3), i64(5, 0, 3)).tolist() == [23, 24, 42]
    assert table.entries[:, :4].tolist() == [[11, 12, 13, 0], [0, 25, 26, 0], [0, 0, 0, 0], [44, 0, 0, 43]]


@pytest.mark.parametrize(
    ("width", "block_size", "mode", "stride"),
    [
        (5, 16, SlotMappingMode.FULL, 8),
        (8, 16, SlotMappingMode.FULL, 8),
        (9, 16, SlotMappingMode.SLIDING_WINDOW, 16),
        (5, 256, SlotMappingMode.FULL, 8),
        (3, 1, SlotMappingMode.FULL, 128),
        (1, 1, SlotMappingMode.NONE, 4),
        (2, 24, SlotMappingMode.FULL, 6),
    ],
)
def test_rows_are_padded_to_128_tokens(width: int, block_size: int, mode: SlotMappingMode, stride: int) -> None:
    """The stride is padded, to 4 words at least, and the padding reads null; the modulus stays the width."""
    table = BlockTable(2, width, block_size, mode)
    assert (table.stride, table.entries.shape) == (stride, (2, stride))
    first = int(mode is SlotMappingMode.SLIDING_WINDOW)
    table.add_row(0, range(1, width + 1), first_block=first)
    wrapped = [width, *range(1, width)] if first else [*range(1, width + 1)]
    assert table.entries[0].tolist() == wrapped + [0] * (stride - width)
    assert table.nbytes == table.arrays.words.nbytes == 4 * 2 * (stride + 2)


@pytest.mark.parametrize("mode", [SlotMappingMode.FULL, SlotMappingMode.NONE])
def test_only_a_ring_wraps(mode: SlotMappingMode) -> None:
    """A full row or one of states refuses ordinals beyond its width, even where its head was dropped."""
    table = BlockTable(2, 4, 16, mode)
    table.append_row(1, [5, 6, 7])
    assert table.drop_row_head(1, 2).tolist() == [5, 6]
    table.append_row(1, [8])
    assert table.entries[1, :4].tolist() == [0, 0, 7, 8]
    before = snapshot(table)
    with pytest.raises(ValueError, match="row 1: would hold 5 blocks, it is 4 wide"):
        table.append_row(1, [9])
    with pytest.raises(ValueError, match="row 0: would hold 5 blocks, it is 4 wide"):
        table.add_row(0, [9, 10], first_block=3)
    assert snapshot(table) == before


ERRORS: list[tuple[str, Callable[[BlockTable], object]]] = [
    ("row: got 4", lambda table: table.append_row(4, [1])),
    ("row: got -1", lambda table: table.add_row(-1, [1])),
    ("row: got 4", lambda table: table.clear_row(4)),
    ("row: got -1", lambda table: table.drop_row_head(-1, 1)),
    ("row: got 4", lambda table: table.move_row(0, 4)),
    ("row: got -1", lambda table: table.move_row(-1, 0)),
    ("row: got 4", lambda table: table.swap_row(0, 4)),
    ("row: got 4", lambda table: table.row_block_ids(4)),
    ("0 is the null block", lambda table: table.append_row(0, [5, 0])),
    ("block_ids: got ids -3..5", lambda table: table.add_row(0, [5, -3])),
    ("block_ids: got ids 2147483648", lambda table: table.append_row(0, [2**31])),
    ("block_ids: got float64", lambda table: table.append_row(0, [1.5])),
    ("block_ids: got bool", lambda table: table.append_row(0, [True])),
    ("expected a flat list", lambda table: table.append_row(0, [[1], [2]])),
    ("row 1: would hold 5 blocks", lambda table: table.append_row(1, [9])),
    ("row 0: would hold 5 blocks", lambda table: table.add_row(0, [1, 2, 3, 4, 5])),
    ("first_block: got -1", lambda table: table.add_row(0, [1], first_block=-1)),
    ("first_block: got 2147483647", lambda table: table.add_row(0, [1], first_block=2**31 - 1)),
    ("first_block: got 3 for row 0, which has 2", lambda table: table.drop_row_head(0, 3)),
    ("first_block: got 9 for row 0", lambda table: table.drop_rows_head(i64(1, 0), i64(4, 9))),
    ("row 1: would hold 5 blocks", lambda table: table.append_rows(i64(0, 1), i64(1, 1), i32(8, 9))),
    (r"shape \(1,\), expected int32 of shape \(2,\)", lambda table: table.append_rows(i64(0, 2), i64(1, 1), i32(8))),
    ("row 1: would hold 5 blocks", lambda table: table.append_rows(i64(1), i64(1), i32(9))),
    ("row: got -1", lambda table: table.swap_row(-1, 0)),
    ("first_block: got -1 for row 0", lambda table: table.drop_row_head(0, -1)),
    ("first_block: got float64", lambda table: table.add_row(0, [5, 6], 1.5)),
    ("rows: got float64", lambda table: table.append_row(0.5, [5])),
    ("first_blocks: got float64", lambda table: table.drop_row_head(0, 1.5)),
]


@pytest.mark.parametrize(("message", "call"), ERRORS, ids=[message for message, _ in ERRORS])
def test_a_refused_operation_changes_nothing(message: str, call: Callable[[BlockTable], object]) -> None:
    """Every wrong argument raises a `ValueError` that says it; words and dirty marks stay as they were."""
    table = filled()
    before = snapshot(table)
    with pytest.raises(ValueError, match=message):
        call(table)
    assert snapshot(table) == before
    assert table.arrays.take_dirty().pairs.size == 0


MANY_ERRORS: list[tuple[str, Callable[[BlockTable], object]]] = [
    ("row: got 4", lambda table: table.append_rows([0, 4], [1, 1], i32(8, 9))),
    ("row: got -1", lambda table: table.append_rows([-1], [1], i32(8))),
    ("distinct rows", lambda table: table.append_rows([2, 2], [1, 1], i32(8, 9))),
    ("counts: got -1", lambda table: table.append_rows([0, 2], [2, -1], i32(8))),
    (
        "counts: got 0..18446744073709551615",
        lambda table: table.append_rows([0, 2], np.array([0, 2**64 - 1], dtype=np.uint64), i32()),
    ),
    ("counts: got int64 of shape", lambda table: table.append_rows([0, 2], [1], i32(8))),
    ("got id 0, expected at least 1", lambda table: table.append_rows([0], [1], i32(0))),
    ("block_ids: got int64", lambda table: table.append_rows([0], [1], i64(2**32 + 5))),
    ("block_ids: got a list", lambda table: table.append_rows([0], [1], [5])),
    ("row: got 4", lambda table: table.drop_rows_head([4], [0])),
    ("distinct rows", lambda table: table.drop_rows_head([0, 0], [1, 2])),
    ("got 1 ordinals for 2 rows", lambda table: table.drop_rows_head([0, 1], [1])),
    ("first_block: got -1 for group 1 row 1", lambda table: table.drop_rows_head([0, 1], [1, -1])),
    ("row: got 4", lambda table: table.clear_rows([4])),
    ("row: got -1", lambda table: table.clear_rows([1, -1])),
    ("distinct rows", lambda table: table.clear_rows([1, 1])),
]


@pytest.mark.parametrize(("message", "call"), MANY_ERRORS, ids=[f"{idx}" for idx in range(len(MANY_ERRORS))])
def test_an_operation_on_many_rows_cannot_reach_another_group(
    message: str, call: Callable[[BlockTable], object]
) -> None:
    """Rows out of range or twice, negative counts and ids that are no blocks raise; no group of the array changes."""
    ring = SlotMappingMode.SLIDING_WINDOW
    tables = BlockTable.of_groups(4, [TableShape(4, 4, ring), TableShape(4, 4, ring), TableShape(4, 4, ring)])
    for table in tables:
        table.append_row(0, [11, 12])
        table.add_row(1, [23, 24], first_block=3)
    arrays = tables[0].arrays
    arrays.take_dirty()
    before = arrays.words.copy()
    with pytest.raises(ValueError, match=message):
        call(tables[1])
    assert np.array_equal(arrays.words, before)
    assert arrays.take_dirty().pairs.size == 0


def test_ordinals_end_at_int32() -> None:
    """A ring goes on to the last ordinal that int32 holds and refuses the next, whatever room it has."""
    table = BlockTable(1, 4, 4, SlotMappingMode.SLIDING_WINDOW)
    table.add_row(0, [7], first_block=2**31 - 3)
    table.append_row(0, [8])
    assert table.num_blocks_per_row.tolist() == [2**31 - 1]
    before = snapshot(table)
    with pytest.raises(ValueError, match="row 0: would reach ordinal 2147483648"):
        table.append_row(0, [9])
    assert snapshot(table) == before


@pytest.mark.parametrize("sizes", [(0, 4, 4), (4, 0, 4), (4, 4, 0), (4, 4, -1), (2**31, 4, 4)])
def test_a_table_needs_positive_sizes(sizes: tuple[int, int, int]) -> None:
    """Rows, width and block size of less than 1, or beyond int32, raise."""
    with pytest.raises(ValueError, match=r"expected (1\.\.2147483647|at least 1 group and 1 row)"):
        BlockTable(*sizes)


class TableMachine(RuleBasedStateMachine):
    """A table beside a dict of rows, and a mirror that only dirty words reach."""

    @initialize(
        width=st.integers(1, 6),
        block_size=st.sampled_from([1, 4, 48, 200]),
        mode=st.sampled_from([SlotMappingMode.SLIDING_WINDOW, *SlotMappingMode]),
        path=st.sampled_from(PATHS),
    )
    def start(self, width: int, block_size: int, mode: SlotMappingMode, path: str) -> None:
        self.width, self.is_ring = width, mode is SlotMappingMode.SLIDING_WINDOW
        with using(path):
            self.table = BlockTable(3, width, block_size, mode)
        self.model: dict[int, tuple[int, list[int]]] = dict.fromkeys(range(3), (0, []))
        self.mirror = np.zeros_like(self.table.arrays.words)
        self.next_id = 1

    def ids(self, count: int) -> list[int]:
        """Block ids never used before."""
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    def columns(self, first: int, num_live: int) -> int:
        """Columns that a row with these ordinals takes: only a ring reuses those of a dropped head."""
        return num_live if self.is_ring else first + num_live

    @rule(row=st.integers(0, 2), count=st.integers(0, 7))
    def append(self, row: int, count: int) -> None:
        first, held = self.model[row]
        ids = self.ids(count)
        needed = self.columns(first, len(held) + count)
        if needed > self.width:
            with pytest.raises(ValueError, match=f"row {row}: would hold {needed} blocks"):
                self.table.append_row(row, ids)
        else:
            self.table.append_row(row, ids)
            self.model[row] = (first, held + ids)

    @rule(rows=st.permutations(range(3)), counts=st.lists(st.integers(0, 3), min_size=1, max_size=3))
    def append_many(self, rows: list[int], counts: list[int]) -> None:
        rows = rows[: len(counts)]
        ids = [self.ids(count) for count in counts]
        args = i64(*rows), i64(*counts), i32(*(block_id for new in ids for block_id in new))
        lengths = [self.model[row][0] for row in rows], [len(self.model[row][1]) for row in rows]
        needed = [self.columns(first, held + count) for first, held, count in zip(*lengths, counts, strict=True)]
        if max(needed) > self.width:
            with pytest.raises(ValueError, match="would hold"):
                self.table.append_rows(*args)
        else:
            self.table.append_rows(*args)
            for row, new in zip(rows, ids, strict=True):
                self.model[row] = (self.model[row][0], self.model[row][1] + new)

    @rule(row=st.integers(0, 2), count=st.integers(0, 7), first=st.integers(0, 4) | st.integers(0, 20))
    def add(self, row: int, count: int, first: int) -> None:
        ids = self.ids(count)
        needed = self.columns(first, count)
        if needed > self.width:
            with pytest.raises(ValueError, match=f"row {row}: would hold {needed} blocks"):
                self.table.add_row(row, ids, first)
        else:
            self.table.add_row(row, ids, first)
            self.model[row] = (first, ids)

    @rule(rows=st.permutations(range(3)), firsts=st.lists(st.integers(-1, 25), min_size=1, max_size=3))
    def drop_heads(self, rows: list[int], firsts: list[int]) -> None:
        rows = rows[: len(firsts)]
        ends = [self.model[row][0] + len(self.model[row][1]) for row in rows]
        if any(not 0 <= first <= end for first, end in zip(firsts, ends, strict=True)):
            with pytest.raises(ValueError, match="first_block: got"):
                self.table.drop_rows_head(i64(*rows), i64(*firsts))
            return
        dropped = []
        for row, new_first in zip(rows, firsts, strict=True):
            first, held = self.model[row]
            count = max(0, new_first - first)
            dropped += held[:count]
            self.model[row] = (first + count, held[count:])
        assert self.table.drop_rows_head(i64(*rows), i64(*firsts)).tolist() == dropped

    @rule(row=st.integers(0, 2), count=st.integers(0, 6))
    def drop_head(self, row: int, count: int) -> None:
        first, held = self.model[row]
        count = min(count, len(held))
        assert self.table.drop_row_head(row, first + count).tolist() == held[:count]
        self.model[row] = (first + count, held[count:])

    @rule(rows=st.permutations(range(3)), count=st.integers(0, 3))
    def clear(self, rows: list[int], count: int) -> None:
        held = [block_id for row in rows[:count] for block_id in self.model[row][1]]
        assert self.table.clear_rows(i64(*rows[:count])).tolist() == held
        self.model |= dict.fromkeys(rows[:count], (0, []))

    @rule(source=st.integers(0, 2), destination=st.integers(0, 2))
    def move(self, source: int, destination: int) -> None:
        self.table.move_row(source, destination)
        if source != destination:
            self.model[destination], self.model[source] = self.model[source], (0, [])

    @rule(row_a=st.integers(0, 2), row_b=st.integers(0, 2))
    def swap(self, row_a: int, row_b: int) -> None:
        self.table.swap_row(row_a, row_b)
        self.model[row_a], self.model[row_b] = self.model[row_b], self.model[row_a]

    @rule()
    def commit_spans(self) -> None:
        arrays = self.table.arrays
        spans = arrays.take_dirty()
        assert (np.diff(spans.pairs) > 0).all()
        assert (spans.low >= 0).all()
        assert (spans.low + spans.num_words <= self.width).all()
        assert ((spans.num_payload >= 0) & (spans.num_payload <= spans.num_words)).all()
        apply_spans(arrays, spans, self.mirror)
        assert np.array_equal(self.mirror, arrays.words)
        assert arrays.take_dirty().pairs.size == 0

    @rule()
    def copy_dirty(self) -> None:
        arrays = self.table.arrays
        copy_dirty(arrays, self.mirror)
        assert np.array_equal(self.mirror, arrays.words)
        assert copy_dirty(arrays, self.mirror) == 0

    @invariant()
    def rows_are_the_models(self) -> None:
        expected = np.zeros_like(self.table.entries)
        live = np.zeros(expected.shape, dtype=bool)
        for row, (first, held) in self.model.items():
            for idx, block_id in enumerate(held):
                expected[row, (first + idx) % self.width] = block_id
                live[row, (first + idx) % self.width] = True
            assert self.table.row_block_ids(row).tolist() == held
            assert self.table.first_block_per_row[row] == first
            assert self.table.num_blocks_per_row[row] == first + len(held)
        assert np.array_equal(self.table.entries, expected)
        assert np.array_equal(self.table.live_mask(), live)


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
