"""Rows of one KV cache group: which block holds which ordinal of which sequence.

A `BlockTable` shows one group of a `TableArrays`, which says how rows lie in memory and records what changed.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv.plan import SlotMappingMode
from hybridkv.table_arrays import TableArrays, TableShape
from hybridkv.units import INT32_MAX
from hybridkv_kernels.constants import NULL_BLOCK_ID


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
        ids = self.check_ids(block_ids)
        self.append_rows(self._one(row), np.array([len(ids)]), ids)

    def add_row(self, row: int, block_ids: ArrayLike, first_block: int = 0) -> None:
        """Replace a row's content: `block_ids` become ordinals `first_block, first_block + 1, ...`.

        Raises: as `append_row`; the table is unchanged then.
        """
        ids = self.check_ids(block_ids)
        pair = self._pair(row)
        if not 0 <= first_block <= INT32_MAX - len(ids):
            raise ValueError(f"first_block: got {first_block}, expected 0..{INT32_MAX - len(ids)}")
        first, counts = np.array([first_block]), np.array([len(ids)])
        self.arrays.check_fit(pair, first, first + counts)
        self.arrays.clear(pair)
        self.arrays.set_rows(pair, first, counts, ids)

    def clear_row(self, row: int) -> NDArray[np.int32]:
        """Empty a row; return the ids it held, first ordinal first."""
        return self.clear_rows(self._one(row))

    def drop_row_head(self, row: int, first_block: int) -> NDArray[np.int32]:
        """Forget the ordinals below `first_block`; return their ids."""
        return self.drop_rows_head(self._one(row), np.array([first_block]))

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

    def append_rows(self, rows: NDArray[np.int64], counts: NDArray[np.int64], block_ids: NDArray[np.int32]) -> None:
        """Append `counts[i]` of the concatenated `block_ids` to row `rows[i]`.

        Shapes: rows, counts [n] (rows distinct); block_ids [sum(counts)] int32
        Raises: ValueError if a row would hold more live blocks than it is wide; the table is unchanged then.
        """
        if len(block_ids) != counts.sum():
            raise ValueError(f"block_ids: got {len(block_ids)} ids, expected {counts.sum()}, the sum of counts")
        some = counts > 0  # also makes copies: what changed is remembered beyond the call
        self.arrays.append(self.arrays.pairs(self.group, rows[some]), counts[some], block_ids)

    def drop_rows_head(self, rows: NDArray[np.int64], first_blocks: NDArray[np.int64]) -> NDArray[np.int32]:
        """Forget in each row the ordinals below `first_blocks[i]`; return the ids, row by row.

        Raises: ValueError if a row has not so many ordinals; the table is unchanged then.
        """
        beyond = np.flatnonzero(first_blocks > self.num_blocks_per_row[rows])
        if beyond.size:
            row = rows[beyond[0]]
            raise ValueError(
                f"first_block: got {first_blocks[beyond[0]]} for row {row}, which has "
                f"{self.num_blocks_per_row[row]} ordinals"
            )
        return self.arrays.drop_head(self.arrays.pairs(self.group, rows), first_blocks)

    def clear_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Empty rows; return the ids they held, row by row, first ordinal first."""
        return self.arrays.clear(self.arrays.pairs(self.group, rows))

    def live_mask(self) -> NDArray[np.bool_]:
        """Return `[num_rows, stride]`: whether a column holds a live ordinal."""
        columns = np.arange(self.stride)
        first = self.first_block_per_row[:, None].astype(np.int64)
        distance = (columns - first) % self.width
        live: NDArray[np.bool_] = (distance < self.num_blocks_per_row[:, None] - first) & (columns < self.width)
        return live

    # Checks

    def check_drop(self, row: int, first_block: int) -> None:
        """Raise ValueError if a row has no ordinal `first_block` and none before it to drop."""
        count = self.num_blocks_per_row[self._one(row)[0]]
        if not 0 <= first_block <= count:
            raise ValueError(f"first_block: got {first_block} for row {row}, which has {count} ordinals")

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

    def _one(self, row: int) -> NDArray[np.int64]:
        if not 0 <= row < self.num_rows:
            raise ValueError(f"row: got {row}, expected 0..{self.num_rows - 1}")
        return np.array([row])

    def _pair(self, row: int) -> NDArray[np.int64]:
        return self.arrays.pairs(self.group, self._one(row))


def join_tables(tables: Sequence[BlockTable]) -> TableArrays:
    """Return the `TableArrays` of all these tables, one a group in this order.

    Tables that were not made together move into new arrays; they keep their content and stay usable.

    Raises: ValueError without a table or for tables of unequal rows.
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
    joined = TableArrays(arrays.num_rows, [table.shape for table in tables])
    rows = np.arange(arrays.num_rows)
    for group, table in enumerate(tables):
        first, counts = table.first_block_per_row.astype(np.int64), table.num_blocks_per_row.astype(np.int64)
        ids = table.arrays.live_ids(rows)
        table._show(joined, group)
        joined.set_rows(joined.pairs(group, rows), first, counts - first, ids)
    return joined
