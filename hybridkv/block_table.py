"""Rows of one KV cache group: which block holds which ordinal of which sequence.

A `BlockTable` shows one group of a `TableArrays`, which says how rows lie in memory and records what changed.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv.plan import CachePlan, SlotMappingMode
from hybridkv.table_arrays import TableArrays, TableShape
from hybridkv.units import INT32_MAX, distinct_bounds, int_array
from hybridkv_kernels.constants import NULL_BLOCK_ID
from hybridkv_kernels.host import ids_of


class BlockTable:
    """Block ids of `num_rows` sequences in one group.

    Shapes:
        entries              [num_rows, stride] int32, a view; columns from `width` on are padding and read null
        first_block_per_row  [num_rows] int32, a view, the first live ordinal
        num_blocks_per_row   [num_rows] int32, a view, the ordinal after the last live one: the next to append
    Units: `block_size` in tokens; 1 for a group of states, whose entries are the state blocks themselves.
    """

    arrays: TableArrays
    group: int
    entries: NDArray[np.int32]
    first_block_per_row: NDArray[np.int32]
    num_blocks_per_row: NDArray[np.int32]

    def __init__(
        self, num_rows: int, width: int, block_size: int, mode: SlotMappingMode = SlotMappingMode.FULL
    ) -> None:
        self._show(TableArrays(num_rows, [TableShape(width, block_size, mode)]), 0)

    @classmethod
    def of_groups(cls, num_rows: int, shapes: Sequence[TableShape]) -> list["BlockTable"]:
        """Return the empty tables of several groups, which share one `TableArrays`.

        Raises: ValueError without a group or a row.
        """
        arrays = TableArrays(num_rows, shapes)
        tables = []
        for group in range(arrays.num_groups):
            table = cls.__new__(cls)
            table._show(arrays, group)
            tables.append(table)
        return tables

    def _show(self, arrays: TableArrays, group: int) -> None:
        """Become the table of one group of `arrays`."""
        self.arrays, self.group, self.shape = arrays, group, arrays.shapes[group]
        begin = int(arrays.offsets[group])
        entries = arrays.words[begin : begin + arrays.num_rows * self.stride]
        self.entries = entries.reshape(arrays.num_rows, self.stride)
        self.first_block_per_row, self.num_blocks_per_row = arrays.first[group], arrays.count[group]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.arrays.num_rows

    @property
    def width(self) -> int:
        """Columns of a row that hold blocks."""
        return self.shape.width

    @property
    def stride(self) -> int:
        """Words between two rows: the width, padded."""
        return self.shape.stride

    @property
    def block_size(self) -> int:
        """Tokens a block; of one rank, with context parallelism."""
        return self.shape.block_size

    @property
    def mode(self) -> SlotMappingMode:
        """How tokens map to slots."""
        return self.shape.mode

    @property
    def nbytes(self) -> int:
        """Bytes of entries and live ranges."""
        return self.entries.nbytes + self.first_block_per_row.nbytes + self.num_blocks_per_row.nbytes

    # Operations on one row

    def append_row(self, row: int, block_ids: ArrayLike) -> None:
        """Append blocks to a row's tail.

        Raises: ValueError for a row that does not exist, ids that are not blocks, or more live blocks than the row is
            wide; the table is unchanged then.
        """
        ids, pair = self.check_ids(block_ids), self._pair(row)
        if len(ids):
            self.arrays.append(pair, len(ids), ids)

    def add_row(self, row: int, block_ids: ArrayLike, first_block: int = 0) -> None:
        """Replace a row's content: `block_ids` become ordinals `first_block, first_block + 1, ...`.

        Raises: as `append_row`; the table is unchanged then.
        """
        ids = self.check_ids(block_ids)
        pair, first, counts = self._pair(row), int_array("first_block", [first_block]), np.array([len(ids)])
        if not 0 <= first[0] <= INT32_MAX - len(ids):
            raise ValueError(f"first_block: got {first_block}, expected 0..{INT32_MAX - len(ids)}")
        self.arrays.check_fit(pair, first, first + counts)
        self.arrays.clear(pair)
        self.arrays.set_rows(pair, first, counts, ids)

    def clear_row(self, row: int) -> NDArray[np.int32]:
        """Empty a row; return the ids it held, first ordinal first."""
        return self.arrays.clear(self._pair(row))

    def drop_row_head(self, row: int, first_block: int) -> NDArray[np.int32]:
        """Forget the ordinals below `first_block`; return their ids.

        Raises: ValueError if the row has not so many ordinals; the table is unchanged then.
        """
        return self.drop_rows_head([row], [first_block])

    def move_row(self, source: int, target: int) -> None:
        """Move a row's content; the target's old content is forgotten and the source reads null afterwards."""
        self.arrays.move(self._pair(source), self._pair(target))

    def swap_row(self, row_a: int, row_b: int) -> None:
        """Exchange the contents of two rows."""
        self.arrays.swap(self._pair(row_a), self._pair(row_b))

    def row_block_ids(self, row: int) -> NDArray[np.int32]:
        """Return a copy of a row's live block ids, first ordinal first."""
        return self.arrays.live_ids(self._pair(row))

    # Operations on many rows at once

    def append_rows(self, rows: ArrayLike, counts: ArrayLike, block_ids: NDArray[np.int32]) -> None:
        """Append `counts[i]` of the concatenated `block_ids` to row `rows[i]`.

        Shapes: rows, counts [n] (rows distinct); block_ids [sum(counts)] int32
        Raises: ValueError for rows, counts or ids that are not of this form, or more live blocks than a row is wide;
            the table is unchanged then.
        """
        native = self.arrays.native
        if native is not None and native.append_rows(self.group, rows, counts, block_ids):
            return
        pairs = self._pairs(rows)
        append_some(self.arrays, pairs, check_blocks(counts, (len(pairs),), block_ids), block_ids)

    def drop_rows_head(self, rows: ArrayLike, first_blocks: ArrayLike) -> NDArray[np.int32]:
        """Forget in each row the ordinals below `first_blocks[i]`; return the ids, row by row.

        Shapes: rows (distinct), first_blocks [n]
        Raises: ValueError for rows that do not exist or occur twice, lists of unequal length, or if a row has not so
            many ordinals; the table is unchanged then.
        """
        native = self.arrays.native
        held = None if native is None else native.drop_heads(self.group, rows, first_blocks)
        if held is not None:
            return ids_of(held)
        pairs, firsts = self._pairs(rows), int_array("first_blocks", first_blocks)
        if len(pairs) != len(firsts):
            raise ValueError(f"first_blocks: got {len(firsts)} ordinals for {len(pairs)} rows")
        check_drop(self.arrays, pairs, firsts)
        return self.arrays.drop_head(pairs, firsts)

    def clear_rows(self, rows: ArrayLike) -> NDArray[np.int32]:
        """Empty rows; return the ids they held, row by row, first ordinal first.

        Shapes: rows [n], distinct
        Raises: ValueError for a row that does not exist or occurs twice.
        """
        return self.arrays.clear(self._pairs(rows))

    def live_mask(self) -> NDArray[np.bool_]:
        """Return `[num_rows, stride]`: whether a column holds a live ordinal."""
        columns = np.arange(self.stride)
        first = self.first_block_per_row[:, None].astype(np.int64)
        distance = (columns - first) % self.width
        live: NDArray[np.bool_] = (distance < self.num_blocks_per_row[:, None] - first) & (columns < self.width)
        return live

    # Checks

    def check_ids(self, block_ids: ArrayLike) -> NDArray[np.int32]:
        """Return block ids as int32; raise ValueError unless they are a flat list of ids of at least 1."""
        ids = np.asarray(block_ids)
        if ids.size == 0:
            return np.empty(0, dtype=np.int32)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"block_ids: got {ids.dtype} of shape {ids.shape}, expected a flat list of integers")
        if ids.min() <= NULL_BLOCK_ID or ids.max() > INT32_MAX:
            raise ValueError(
                f"block_ids: got ids {ids.min()}..{ids.max()}, expected 1..{INT32_MAX}; 0 is the null block"
            )
        return ids.astype(np.int32, copy=False)

    def _pair(self, row: int) -> NDArray[np.int64]:
        return self._pairs([row])

    def _pairs(self, rows: ArrayLike) -> NDArray[np.int64]:
        return self.arrays.pairs(self.group, check_rows(rows, self.num_rows))


def check_rows(rows: ArrayLike, num_rows: int) -> NDArray[np.int64]:
    """Return rows of a table of `num_rows` as a new array.

    Raises: ValueError for rows that are no flat list of integers, do not exist or occur twice.
    """
    row_ids = int_array("rows", rows)
    bounds = distinct_bounds(row_ids)
    if bounds is None:
        raise ValueError(f"rows: got {row_ids.tolist()}, expected distinct rows")
    if bounds[0] < 0 or bounds[1] >= num_rows:
        wrong = row_ids[(row_ids < 0) | (row_ids >= num_rows)][0]
        raise ValueError(f"row: got {wrong}, expected 0..{num_rows - 1}")
    return row_ids


def check_blocks(counts: ArrayLike, expected: tuple[int, ...], block_ids: NDArray[np.int32]) -> NDArray[np.int64] | int:
    """Return how many of the concatenated `block_ids` each row takes, as a flat array or one number for all.

    Raises: ValueError unless counts are integers of the `expected` shape and the ids as many, int32 and at least 1.
    """
    table = np.asarray(counts)
    if table.shape != expected or table.dtype.kind not in "iu":
        raise ValueError(f"counts: got {table.dtype} of shape {table.shape}, expected integers of shape {expected}")
    fewest, most = (int(table.min()), int(table.max())) if table.size else (0, 0)
    if fewest < 0 or most > INT32_MAX:
        raise ValueError(f"counts: got {fewest}..{most}, expected 0..{INT32_MAX}")
    total = most * table.size if most == fewest else int(table.sum())
    if not isinstance(block_ids, np.ndarray):
        raise ValueError(f"block_ids: got a {type(block_ids).__name__}, expected an int32 array of shape ({total},)")
    if block_ids.dtype != np.int32 or block_ids.shape != (total,):
        raise ValueError(
            f"block_ids: got {block_ids.dtype} of shape {block_ids.shape}, expected int32 of shape ({total},), the "
            "sum of counts"
        )
    if total and block_ids.min() <= NULL_BLOCK_ID:
        raise ValueError(f"block_ids: got id {block_ids.min()}, expected at least 1; 0 is the null block")
    return most if most == fewest else table.astype(np.int64).reshape(-1)


def check_drop(arrays: TableArrays, pairs: NDArray[np.int64], first: NDArray[np.int64]) -> None:
    """Raise ValueError if a pair has no ordinal `first[i]` and is not about to append it."""
    count = arrays.count.reshape(-1)[pairs]
    wrong = (first < 0) | (first > count)
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(
            f"first_block: got {first[index]} for {arrays.name_pair(pairs[index])}, which has {count[index]} ordinals"
        )


def append_some(
    arrays: TableArrays, pairs: NDArray[np.int64], counts: NDArray[np.int64] | int, ids: NDArray[np.int32]
) -> None:
    """Append to the pairs that get any block."""
    if not isinstance(counts, int) and not counts.all():
        pairs, counts = pairs[counts > 0], counts[counts > 0]
    if len(ids):
        arrays.append(pairs, counts, ids)


def join_tables(tables: Sequence[BlockTable]) -> TableArrays:
    """Return the `TableArrays` of all these tables, one a group in this order.

    Tables that were not made together move into new arrays; they keep their content and stay usable.

    Raises: ValueError without a table, for tables of unequal rows, or for one that has a mirror of its own.
    """
    if not tables or len({table.num_rows for table in tables}) != 1:
        raise ValueError(f"tables: got {[t.num_rows for t in tables]} rows, expected at least one table, equal rows")
    arrays = tables[0].arrays
    if arrays.num_groups == len(tables) and all(t.arrays is arrays and t.group == g for g, t in enumerate(tables)):
        return arrays
    if len({id(table) for table in tables}) != len(tables) or any(table.arrays.num_groups != 1 for table in tables):
        raise ValueError(
            "tables: got tables that share their rows with others, expected all of a plan's or single ones"
        )
    if any(table.arrays.consumer is not None for table in tables):
        raise ValueError("tables: got one that is wrapped alone already, expected tables without a device mirror")
    joined = TableArrays(arrays.num_rows, [table.shape for table in tables])
    rows = np.arange(arrays.num_rows)
    for group, table in enumerate(tables):
        first, counts = table.first_block_per_row.astype(np.int64), table.num_blocks_per_row.astype(np.int64)
        ids = table.arrays.live_ids(rows)
        table._show(joined, group)
        joined.set_rows(joined.pairs(group, rows), first, counts - first, ids)
    return joined


def make_block_tables(plan: CachePlan) -> list[BlockTable]:
    """Return an empty block table for each group of a plan."""
    shapes = [TableShape(group.table_width, group.block_size, group.mode) for group in plan.groups]
    return BlockTable.of_groups(plan.limits.max_num_seqs, shapes)
