"""Claims about the compiled helper: it does what numpy does, refuses what it does not know, and may be missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.block_table import BlockTable
from hybridkv.plan import SlotMappingMode
from hybridkv.row_operations import RowOperations
from hybridkv.step_batch import StepBatch
from hybridkv.table_arrays import TableArrays, TableShape
from hybridkv_kernels import host
from hybridkv_kernels.step_layout import NUM_INDEX_COLUMNS
from tests.host_paths import PATHS, using
from tests.models import copy_dirty

RING, NONE = SlotMappingMode.SLIDING_WINDOW, SlotMappingMode.NONE
NUM_ROWS = 6
SHAPES = (TableShape(6, 4), TableShape(6, 4), TableShape(3, 48, RING), TableShape(2, 1, NONE), TableShape(6, 4, RING))
Call: TypeAlias = Callable[[RowOperations], object]


def make(path: str) -> RowOperations:
    """Empty tables of `SHAPES`."""
    with using(path):
        tables = BlockTable.of_groups(NUM_ROWS, SHAPES)
    assert (tables[0].arrays.native is not None) == (path == "native")
    return RowOperations(tables, tables[0].arrays)


def spans(arrays: TableArrays) -> list[list[int]]:
    """What is dirty."""
    return [array.tolist() for array in vars(arrays.take_dirty()).values()]


def outcome(tables: RowOperations, call: Call) -> object:
    """What a call returns, or the text of its error."""
    try:
        result = call(tables)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(result, list):
        return [array.tolist() for array in result]
    return None if result is None else (result.dtype.str, result.tolist())


def random_call(rng: np.random.Generator) -> Call:
    """Draw an operation, now and then one that is refused."""
    dtype = rng.choice([np.int32, np.int64])
    order = rng.permutation(NUM_ROWS).astype(dtype)
    num = int(rng.integers(0, NUM_ROWS + 1))
    rows = order[:num]
    if rng.random() < 0.1:
        rows = rng.integers(-1, NUM_ROWS + 1, num).astype(dtype)
    counts = rng.integers(0, rng.integers(1, 4), (len(SHAPES), num)).astype(dtype)
    if rng.random() < 0.3:
        counts[:] = rng.integers(0, 3)
    ids = rng.integers(1 if rng.random() < 0.95 else 0, 2**31 - 1, counts.sum(), dtype=np.int32)
    group, half = int(rng.integers(len(SHAPES))), num // 2
    of_group = rng.integers(1, 500, counts[group].sum(), dtype=np.int32)
    firsts = rng.integers(0, 4, num).astype(dtype)
    row, other = rng.integers(0, NUM_ROWS, 2).tolist()
    starts = rng.integers(0, 3, len(SHAPES)).tolist()
    single = [rng.integers(1, 500, rng.integers(0, 3)).tolist() for _ in SHAPES]
    calls: list[Call] = [
        lambda tables: tables.append_rows(rows, counts, ids),
        lambda tables: tables.append_rows(rows, counts, ids),
        lambda tables: tables.add_rows(rows, counts, ids),
        lambda tables: tables.clear_rows(rows[:half]),
        lambda tables: tables.move_rows(rows[:half], rows[half : 2 * half]),
        lambda tables: tables.tables[group].append_rows(rows, counts[group], of_group),
        lambda tables: tables.tables[group].drop_rows_head(rows, firsts),
        lambda tables: tables.tables[group].drop_rows_head(
            order, np.minimum(tables.arrays.first[group, order] + 1, tables.arrays.count[group, order])
        ),
        lambda tables: tables.add_row(row, single, starts),
        lambda tables: tables.swap_row(row, other),
    ]
    return calls[int(rng.integers(len(calls)))]


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), by_spans=st.booleans())
def test_both_paths_tell_the_same_history(seed: int, by_spans: bool) -> None:
    """Words, returned ids, errors, spans and mirrors are equal after every operation of any history."""
    rng, pair = np.random.default_rng(seed), [make(path) for path in PATHS]
    mirrors = [np.zeros_like(tables.arrays.words) for tables in pair]
    for _ in range(25):
        call = random_call(rng)
        results = [outcome(tables, call) for tables in pair]
        assert results[0] == results[1]
        words = [tables.arrays.words for tables in pair]
        assert np.array_equal(*words)
        if rng.random() < 0.3 and by_spans:
            assert spans(pair[0].arrays) == spans(pair[1].arrays)
        elif rng.random() < 0.3:
            for tables, mirror in zip(pair, mirrors, strict=True):
                copy_dirty(tables.arrays, mirror)
                assert tables.arrays._log.is_empty
                assert by_spans or np.array_equal(mirror, tables.arrays.words)
            assert by_spans or np.array_equal(*mirrors)


def filled(path: str) -> RowOperations:
    """Tables whose rows 0..3 hold two blocks in every group, from ordinal 1 on in rings; nothing is dirty."""
    tables = make(path)
    for row in range(4):
        ids = [[10 * row + 1, 10 * row + 2] for _ in SHAPES]
        tables.add_row(row, ids, [int(shape.mode is RING) for shape in SHAPES])
    tables.arrays.take_dirty()
    return tables


def i32(*values: int) -> np.ndarray:
    """An int32 array."""
    return np.array(values, dtype=np.int32)


TWO, NO_COUNTS = np.array([0, 5]), np.zeros((5, 2), dtype=np.int64)
ONES, IDS = np.ones((5, 2), dtype=np.int64), np.arange(1, 11, dtype=np.int32)
SPARSE = np.array([[0, 1]] * 3 + [[0, 0], [0, 1]])
BAD: list[Call] = [
    lambda tables: tables.append_rows(np.array([0, 6]), SPARSE, i32(1, 2, 3, 4)),
    lambda tables: tables.append_rows(np.array([-1, 5]), SPARSE, i32(1, 2, 3, 4)),
    lambda tables: tables.append_rows(np.array([5, 5]), SPARSE, i32(1, 2, 3, 4)),
    lambda tables: tables.append_rows(np.array([2**40, 5]), SPARSE, i32(1, 2, 3, 4)),
    lambda tables: tables.append_rows(TWO, SPARSE[:4], i32(1, 2, 3)),
    lambda tables: tables.append_rows(TWO, SPARSE.T, i32(1, 2, 3, 4)),
    lambda tables: tables.append_rows(TWO, SPARSE.reshape(-1), i32(1, 2, 3, 4)),
    lambda tables: tables.append_rows(TWO, SPARSE - 1, i32()),
    lambda tables: tables.append_rows(TWO, SPARSE + 2**31, i32()),
    lambda tables: tables.append_rows(TWO, SPARSE + 2**62, i32()),
    lambda tables: tables.append_rows(TWO, SPARSE / 1, i32(1, 2, 3, 4)),
    lambda tables: tables.append_rows(TWO, SPARSE, i32(1, 2, 3)),
    lambda tables: tables.append_rows(TWO, SPARSE, i32(1, 2, 3, 4, 5)),
    lambda tables: tables.append_rows(TWO, SPARSE, i32(1, 2, 0, 4)),
    lambda tables: tables.append_rows(TWO, SPARSE, i32(1, 2, 3, -(2**31))),
    lambda tables: tables.append_rows(TWO, SPARSE, np.arange(1, 5)),
    lambda tables: tables.append_rows(TWO, SPARSE, [1, 2, 3, 4]),
    lambda tables: tables.append_rows(TWO, ONES, IDS),
    lambda tables: tables.append_rows(np.array([5.0, 1.0]), SPARSE, i32(1, 2, 3, 4)),
    lambda tables: tables.add_rows(TWO, ONES * 3, np.arange(1, 31, dtype=np.int32)),
    lambda tables: tables.add_rows(TWO, ONES, IDS - 1),
    lambda tables: tables.add_rows(np.array([1, 1]), ONES, IDS),
    lambda tables: tables.clear_rows(np.array([1, 6])),
    lambda tables: tables.clear_rows(np.array([1, 2, 1])),
    lambda tables: tables.clear_rows(np.array([[1]])),
    lambda tables: tables.clear_rows(np.array(1)),
    lambda tables: tables.move_rows(np.array([1, 2]), np.array([4, 1])),
    lambda tables: tables.move_rows(np.array([1, 2]), np.array([4])),
    lambda tables: tables.move_rows(np.array([1, 2]), np.array([4, 6])),
    lambda tables: tables.tables[2].drop_rows_head(np.array([0, 1]), np.array([2, 4])),
    lambda tables: tables.tables[2].drop_rows_head(np.array([0, 1]), np.array([2, -1])),
    lambda tables: tables.tables[2].drop_rows_head(np.array([0, 0]), np.array([2, 3])),
    lambda tables: tables.tables[2].drop_rows_head(np.array([0, 6]), np.array([2, 3])),
    lambda tables: tables.tables[2].drop_rows_head(np.array([0, 1]), np.array([2])),
    lambda tables: tables.tables[2].append_rows(np.array([0, 1]), np.array([1, 2]), i32(5, 6, 7)),
    lambda tables: tables.tables[0].append_rows(np.array([0, 1]), np.array([[1, 1]]), i32(5, 6)),
]


@pytest.mark.parametrize("call", BAD, ids=[f"{idx}" for idx in range(len(BAD))])
def test_what_the_helper_refuses_numpy_refuses_with_its_text(call: Call) -> None:
    """A wrong argument raises the same error on both paths and leaves words and dirty marks as they were."""
    texts = []
    for path in PATHS:
        tables = filled(path)
        before = tables.arrays.words.copy()
        texts.append(outcome(tables, call))
        assert np.array_equal(tables.arrays.words, before)
        assert not tables.arrays.take_dirty().pairs.size
    assert texts[0] == texts[1]
    assert str(texts[0]).startswith("ValueError: ")


ODD: list[Call] = [
    lambda tables: tables.append_rows([0, 5], SPARSE.tolist(), i32(1, 2, 3, 4)),
    lambda tables: tables.append_rows(TWO.astype(np.uint64), SPARSE.astype(np.int8), i32(1, 2, 3, 4)),
    lambda tables: tables.append_rows(TWO.astype(">i8"), SPARSE.astype(">i4"), i32(1, 2, 3, 4)),
    lambda tables: tables.append_rows(np.array([0, 9, 5, 9])[::2], SPARSE, i32(1, 9, 2, 9, 3, 9, 4, 9)[::2]),
    lambda tables: tables.append_rows(TWO, np.asfortranarray(SPARSE), i32(1, 2, 3, 4)),
    lambda tables: tables.append_rows(TWO, SPARSE, tables.arrays.words[:2].repeat(2) + 1),
    lambda tables: tables.append_rows(tables.arrays.first[2, 3:5], SPARSE, i32(1, 2, 3, 4)),
    lambda tables: tables.append_rows(tables.arrays.count[0, 2:3], SPARSE[[0, 0, 0, 3, 0], 1:], i32(1, 2, 3, 4)),
    lambda tables: tables.clear_rows(tables.arrays.count[0, 2:3]),
    lambda tables: tables.move_rows(tables.arrays.first[2, 3:4], tables.arrays.count[0, 4:5]),
    lambda tables: tables.tables[2].drop_rows_head(np.arange(6), tables.arrays.count[2]),
    lambda tables: tables.tables[0].append_rows(tables.arrays.count[0, 3:5], i32(1, 1), i32(7, 8)),
    lambda tables: tables.add_rows(np.frombuffer(b"?" + TWO.tobytes(), np.int64, 2, 1), ONES, IDS),
]


@pytest.mark.parametrize("call", ODD, ids=[f"{idx}" for idx in range(len(ODD))])
def test_arrays_of_an_unusual_form_do_what_they_do_in_numpy(call: Call) -> None:
    """Lists, other dtypes, byte orders and strides, unaligned arrays and views of the tables themselves: no matter."""
    native, numpy = (filled(path) for path in PATHS)
    got, expected = outcome(native, call), outcome(numpy, call)
    assert got == expected
    assert not str(got).startswith("ValueError")
    assert np.array_equal(native.arrays.words, numpy.arrays.words)
    assert spans(native.arrays) == spans(numpy.arrays)


def test_the_helper_does_the_usual_calls_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of int32 or int64 take no numpy operation of the tables, of a batch or of a host mirror."""
    tables = filled("native")

    def fail(*_args: object) -> None:
        raise AssertionError("numpy did it")

    for name in ("append", "set_rows", "set_rows_alike", "clear_rows", "move_rows", "drop_head", "_copy_changes"):
        monkeypatch.setattr(TableArrays, name, fail)
    for name in (
        "hybridkv.step_batch.int_array",
        "hybridkv.row_operations.check_rows",
        "hybridkv.block_table.check_rows",
    ):
        monkeypatch.setattr(name, fail)
    mirror = np.zeros_like(tables.arrays.words)
    for dtype in (np.int32, np.int64):
        rows, counts = TWO.astype(dtype), ONES.astype(dtype)
        tables.clear_rows(rows)
        tables.append_rows(rows, counts, IDS)
        tables.tables[2].append_rows(rows, counts[0], IDS[:2])
        assert tables.tables[2].drop_rows_head(rows, counts[0]).tolist() == [5, 6]
        tables.move_rows(rows, np.array([3, 4], dtype=dtype))
        tables.add_rows(rows, counts, IDS)
        assert copy_dirty(tables.arrays, mirror) > 0
        StepBatch.of(rows, counts[0], counts[1], tables.arrays.native)


BATCHES = [
    ([0, 5], [1, 1], [7, 0]),
    ([5, 0], [3, 4], [2, 9]),
    ([5, 5], [1, 1], [0, 0]),
    ([-1], [1], [0]),
    ([6], [1], [0]),
    ([1], [0], [0]),
    ([1], [1], [-1]),
    ([1], [2**31], [0]),
    ([1], [1], [2**31 - 1]),
    ([1, 2], [2**31 - 1, 1], [0, 0]),
    ([1, 2], [1], [0, 0]),
    ([], [], []),
]


@pytest.mark.parametrize("columns", BATCHES, ids=[f"{idx}" for idx in range(len(BATCHES))])
def test_a_batch_is_checked_alike(columns: tuple[list[int], ...]) -> None:
    """Both paths make the same batch or refuse it with the same text."""
    arrays, native, found = [np.array(column, dtype=np.int64) for column in columns], filled("native").arrays.native, []
    for helper in (native, None):
        try:
            batch = StepBatch.of(*arrays, helper)
            found.append({name: np.asarray(value).tolist() for name, value in vars(batch).items()})
        except ValueError as error:
            found.append({"error": str(error)})
    assert found[0] == found[1]


def test_the_helper_reads_and_writes_nothing_beyond_its_arguments() -> None:
    """Whatever its arguments, a method refuses those that do not fit together; tables and outputs stay as they were."""
    tables, rng = filled("native"), np.random.default_rng(0)
    native, num_words, num_done = tables.arrays.native, len(tables.arrays.words), 0
    assert native is not None
    mirror = tables.arrays.words.copy()
    for _ in range(3000):
        n, r, t = rng.integers(0, 5, 3)
        rows = rng.integers(-1, NUM_ROWS + 1, n)
        starts = np.sort(rng.integers(0, 6, n + 1)) if rng.random() < 0.8 else rng.integers(-2, 6, n + 1)
        computed = rng.integers(-1, 30, n)
        metas = np.full((len(SHAPES), NUM_INDEX_COLUMNS), -1)
        metas[rng.integers(0, 5)] = rng.integers(-1, 12, NUM_INDEX_COLUMNS)
        outs = np.full((5, t), 99), np.full((2, r), 99), np.full(30, 99, np.int32)
        before = [out.copy() for out in outs]
        words = mirror[: num_words - int(rng.random() < 0.05)]
        done = native.map_batch(words, metas, rows, computed, starts.astype(np.int32), *outs, np.zeros(r, np.int32))
        num_done += bool(done)
        assert done or all(np.array_equal(*each) for each in zip(outs, before, strict=True))
        sizes = [r, r + 1, r, r, t, t]
        sizes[rng.integers(6)] += int(rng.random() < 0.2)
        dtypes = [np.int32, np.int32, np.int32, np.bool_, np.int32, np.int64]
        geometry = [np.ones(size, dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
        done = native.write_geometry(rows, starts, computed, *geometry)
        num_done += bool(done)
        assert done or all(out.all() for out in geometry)
    assert num_done > 100
    assert np.array_equal(mirror, tables.arrays.words)
    for name in dir(native):
        if not name.startswith("_"):
            for arguments in ((), (None,) * 3, (1.5,) * 4, ("x",) * 9):
                assert getattr(native, name)(*arguments) is None


def test_a_mirror_that_does_not_fit_is_left_alone() -> None:
    """A mirror of another size or one that is not to be written is refused and stays dirty."""
    tables = filled("native")
    tables.clear_rows(np.array([1]))
    native, mirror = tables.arrays.native, np.zeros_like(tables.arrays.words)
    assert native is not None
    assert native.copy_dirty(mirror[:-1]) is None
    mirror.flags.writeable = False
    assert native.copy_dirty(mirror) is None
    assert tables.arrays.take_dirty().pairs.tolist() == [1, 7, 13, 19, 25]


def test_the_environment_turns_the_helper_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables made under `HYBRIDKV_NATIVE=0` work in numpy, and so they do where the helper was not built."""
    assert host.VARIABLE == "HYBRIDKV_NATIVE"
    monkeypatch.setenv("HYBRIDKV_NATIVE", "0")
    assert BlockTable(2, 4, 4).arrays.native is None
    monkeypatch.delenv("HYBRIDKV_NATIVE")
    assert (BlockTable(2, 4, 4).arrays.native is not None) == host.is_built()
    monkeypatch.setitem(sys.modules, "hybridkv_kernels._host", None)
    assert not host.is_built()
    table = BlockTable(2, 4, 4)
    assert table.arrays.native is None
    table.append_rows(np.array([1]), np.array([1]), i32(7))
    assert table.row_block_ids(1).tolist() == [7]


def test_tables_the_helper_does_not_know_stay_numpys() -> None:
    """A block that spans more positions than int32 holds over all ranks has no helper."""
    with using("native"):
        assert BlockTable.of_groups(2, [TableShape(4, 2**30, num_ranks=4)])[0].arrays.native is None
