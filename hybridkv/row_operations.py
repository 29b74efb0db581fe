"""Row operations on the tables of all groups at once: atomic, and a few numpy operations whatever their number."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv.block_table import BlockTable, append_some, check_blocks, check_drop, check_rows
from hybridkv.table_arrays import TableArrays
from hybridkv.units import INT32_MAX, int_array
from hybridkv_kernels.host import ids_of


class RowOperations:
    """Rows of all groups.

    Operations on one row take one list of block ids per group. Operations on many rows take `counts[g, i]` blocks of
    row `rows[i]` in group g, all in one int32 array: group by group, row by row. If one group refuses, none changes.
    """

    def __init__(self, tables: Sequence[BlockTable], arrays: TableArrays) -> None:
        self.tables, self.arrays = list(tables), arrays
        self._group_starts = np.arange(arrays.num_groups, dtype=np.int64)[:, None] * arrays.num_rows

    @property
    def num_groups(self) -> int:
        """Number of KV cache groups."""
        return len(self.tables)

    @property
    def num_blocks_per_row(self) -> NDArray[np.int32]:
        """Return `[num_groups, num_rows]`, a copy: the next ordinal to append to each row of each group."""
        return self.arrays.count.copy()

    @property
    def first_block_per_row(self) -> NDArray[np.int32]:
        """Return `[num_groups, num_rows]`, a copy: the first live ordinal of each row of each group."""
        return self.arrays.first.copy()

    # One row

    def append_row(self, row: int, block_ids: Sequence[ArrayLike]) -> None:
        """Append each group's blocks to a row.

        Raises: ValueError as `BlockTable.append_row`, or for a wrong number of lists; no group changes then.
        """
        counts, ids = self._check_lists(block_ids)
        append_some(self.arrays, self._pairs([row]), counts, ids)

    def add_row(self, row: int, block_ids: Sequence[ArrayLike], first_blocks: Sequence[int] | None = None) -> None:
        """Replace a row in every group; group g's blocks become ordinals `first_blocks[g], ...` (0 by default).

        Raises: ValueError as `BlockTable.add_row`, or for a wrong number of lists; no group changes then.
        """
        starts = np.zeros(self.num_groups, dtype=np.int64)
        if first_blocks is not None:
            starts = int_array("first_blocks", first_blocks)
        if len(starts) != self.num_groups or starts.min() < 0:
            raise ValueError(f"first_blocks: got {starts.tolist()}, expected {self.num_groups} ordinals of at least 0")
        counts, ids = self._check_lists(block_ids)
        if (starts > INT32_MAX - counts).any():
            raise ValueError(f"first_blocks: got {starts.max()}, expected ordinals of at most {INT32_MAX}")
        pairs = self._pairs([row])
        self.arrays.check_fit(pairs, starts, starts + counts)
        self.arrays.clear(pairs)
        self.arrays.set_rows(pairs, starts, counts, ids)

    def clear_row(self, row: int) -> list[NDArray[np.int32]]:
        """Empty a row in every group; return per group the ids it held."""
        rows = self._rows([row])
        held = (self.arrays.count - self.arrays.first)[:, row]
        return np.split(self.arrays.clear_rows(rows), held.cumsum()[:-1])

    def drop_row_head(self, row: int, first_blocks: Sequence[int]) -> list[NDArray[np.int32]]:
        """Forget in each group the ordinals below `first_blocks[g]`; return the ids by group.

        Raises: ValueError if a group's row has not so many ordinals; no group changes then.
        """
        pairs, firsts = self._pairs([row]), int_array("first_blocks", first_blocks)
        if len(firsts) != self.num_groups:
            raise ValueError(f"first_blocks: got {len(firsts)} ordinals, expected {self.num_groups}")
        check_drop(self.arrays, pairs, firsts)
        num_dropped = np.maximum(firsts - self.arrays.first[:, row], 0)
        return np.split(self.arrays.drop_head(pairs, firsts), num_dropped.cumsum()[:-1])

    def move_row(self, source: int, target: int) -> None:
        """Move a row in every group; the source reads null afterwards."""
        from_rows, to_rows = self._rows([source]), self._rows([target])
        if source != target:
            self.arrays.move_rows(from_rows, to_rows)

    def swap_row(self, row_a: int, row_b: int) -> None:
        """Exchange two rows in every group."""
        self.arrays.swap(self._pairs([row_a]), self._pairs([row_b]))

    # Many rows

    def append_rows(self, rows: ArrayLike, counts: ArrayLike, block_ids: NDArray[np.int32]) -> None:
        """Append blocks to many rows.

        Shapes: rows [n], distinct; counts [num_groups, n]; block_ids [sum(counts)] int32
        Raises: ValueError for rows, counts or ids that are not of this form, or more blocks than a row is wide.
        """
        native = self.arrays.native
        if native is not None and native.append_rows(-1, rows, counts, block_ids):
            return
        pairs = self._pairs(rows)
        append_some(self.arrays, pairs, self._check_blocks(pairs, counts, block_ids), block_ids)

    def add_rows(self, rows: ArrayLike, counts: ArrayLike, block_ids: NDArray[np.int32]) -> None:
        """Replace many rows; their blocks become the ordinals from 0 on.

        Shapes, raises: as `append_rows`
        """
        native = self.arrays.native
        if native is not None and native.add_rows(rows, counts, block_ids):
            return
        row_ids = self._rows(rows)
        pairs = self._pairs_of(row_ids)
        flat_counts = self._check_blocks(pairs, counts, block_ids)
        zeros = np.zeros_like(pairs)
        self.arrays.check_fit(pairs, zeros, zeros + flat_counts)
        if self.arrays.count[:, row_ids].any():
            self.arrays.clear_rows(row_ids)
        if isinstance(flat_counts, int):
            self.arrays.set_rows_alike(row_ids, flat_counts, block_ids)
        else:
            self.arrays.set_rows(pairs, zeros, flat_counts, block_ids)

    def clear_rows(self, rows: ArrayLike) -> NDArray[np.int32]:
        """Empty many rows; return the ids they held, group by group, row by row.

        Shapes: rows [n], distinct
        Raises: ValueError for a row that does not exist or occurs twice.
        """
        native = self.arrays.native
        held = None if native is None else native.clear_rows(rows)
        return self.arrays.clear_rows(self._rows(rows)) if held is None else ids_of(held)

    def move_rows(self, sources: ArrayLike, targets: ArrayLike) -> None:
        """Move many rows, each into one that is not moved itself.

        Shapes: sources, targets [n], all distinct
        Raises: ValueError for rows that do not exist or occur twice, or lists of unequal length.
        """
        native = self.arrays.native
        if native is not None and native.move_rows(sources, targets):
            return
        from_rows, to_rows = int_array("sources", sources), int_array("targets", targets)
        if len(from_rows) != len(to_rows):
            raise ValueError(f"targets: got {len(to_rows)} rows for {len(from_rows)} sources")
        self._rows(np.concatenate([from_rows, to_rows]))
        self.arrays.move_rows(from_rows, to_rows)

    def _pairs(self, rows: ArrayLike) -> NDArray[np.int64]:
        """Return the pairs of some rows in all groups, group by group."""
        return self._pairs_of(self._rows(rows))

    def _pairs_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return (self._group_starts + rows).reshape(-1)

    def _rows(self, rows: ArrayLike) -> NDArray[np.int64]:
        return check_rows(rows, self.arrays.num_rows)

    def _check_blocks(
        self, pairs: NDArray[np.int64], counts: ArrayLike, block_ids: NDArray[np.int32]
    ) -> NDArray[np.int64] | int:
        return check_blocks(counts, (self.num_groups, len(pairs) // self.num_groups), block_ids)

    def _check_lists(self, block_ids: Sequence[ArrayLike]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        if len(block_ids) != self.num_groups:
            raise ValueError(f"block_ids: got lists for {len(block_ids)} groups, expected {self.num_groups}")
        ids = [table.check_ids(of_group) for table, of_group in zip(self.tables, block_ids, strict=True)]
        return np.array([len(of_group) for of_group in ids], dtype=np.int64), np.concatenate(ids)
