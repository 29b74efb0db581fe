"""Rows of one KV cache group: which block holds which ordinal of which sequence.

A row is a ring of `width` columns. Ordinal j lives in column `j % width`; the live ordinals of a row are
`[first_block_per_row, num_blocks_per_row)`, at most `width` of them, and every other column reads null:

    width 4, ordinals 3..6 live      column   0   1   2   3
                                     ordinal  4   5   6   3

A full-attention row is the same with a width that never wraps. One int32 array holds everything a device needs:

    words = | entries [num_rows, stride] | first_block_per_row [num_rows] | num_blocks_per_row [num_rows] |

The host array is the authority. Every operation records the words it changed; `take_dirty` hands them over.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv.plan import SlotMappingMode, row_stride
from hybridkv.units import INT32_MAX
from hybridkv_kernels.constants import NULL_BLOCK_ID


class BlockTable:
    """Block ids of `num_rows` sequences in one group.

    Shapes:
        entries              [num_rows, stride] int32, a view; columns from `width` on are padding and read null
        first_block_per_row  [num_rows] int32, the first live ordinal
        num_blocks_per_row   [num_rows] int32, the ordinal after the last live one: the next to append
    Units: `block_size` in tokens; 1 for a group of states, whose entries are the state blocks themselves.
    """

    def __init__(
        self, num_rows: int, width: int, block_size: int, mode: SlotMappingMode = SlotMappingMode.FULL
    ) -> None:
        for name, value in (("num_rows", num_rows), ("width", width), ("block_size", block_size)):
            if not 1 <= value <= INT32_MAX:
                raise ValueError(f"{name}: got {value}, expected 1..{INT32_MAX}")
        self.num_rows, self.width, self.block_size, self.mode = num_rows, width, block_size, mode
        self.stride = row_stride(width, block_size, mode)
        self.words = np.zeros(num_rows * (self.stride + 2), dtype=np.int32)
        self.first_offset = num_rows * self.stride
        self.count_offset = self.first_offset + num_rows
        self.entries = self.words[: self.first_offset].reshape(num_rows, self.stride)
        self.first_block_per_row = self.words[self.first_offset : self.count_offset]
        self.num_blocks_per_row = self.words[self.count_offset :]
        self._dirty: list[NDArray[np.int64]] = []
        self._num_dirty = 0

    # Operations on one row

    def append_row(self, row: int, block_ids: ArrayLike) -> None:
        """Append blocks to a row's tail.

        Raises: ValueError for a row that does not exist, ids that are not blocks, or more live blocks than the row is
            wide; the table is unchanged then.
        """
        ids = self.check_ids(block_ids)
        self.append_rows(np.array([self._check_row(row)]), np.array([len(ids)]), ids)

    def add_row(self, row: int, block_ids: ArrayLike, first_block: int = 0) -> None:
        """Replace a row's content: `block_ids` become ordinals `first_block, first_block + 1, ...`.

        Raises: as `append_row`; the table is unchanged then.
        """
        ids = self.check_ids(block_ids)
        self.check_fill(row, len(ids))
        if not 0 <= first_block <= INT32_MAX - len(ids):
            raise ValueError(f"first_block: got {first_block}, expected 0..{INT32_MAX - len(ids)}")
        self.clear_row(row)
        self._set_live(row, first_block, ids)

    def clear_row(self, row: int) -> NDArray[np.int32]:
        """Empty a row; return the ids it held, first ordinal first."""
        return self.clear_rows(np.array([self._check_row(row)]))

    def drop_row_head(self, row: int, first_block: int) -> NDArray[np.int32]:
        """Forget the ordinals below `first_block`; return their ids."""
        return self.drop_rows_head(np.array([self._check_row(row)]), np.array([first_block]))

    def move_row(self, source: int, target: int) -> None:
        """Move a row's content; the target's old content is forgotten and the source reads null afterwards."""
        source, target = self._check_row(source), self._check_row(target)
        if source == target:
            return
        first, ids = int(self.first_block_per_row[source]), self.row_block_ids(source)
        self.clear_rows(np.array([source, target]))
        self._set_live(target, first, ids)

    def swap_row(self, row_a: int, row_b: int) -> None:
        """Exchange the contents of two rows."""
        row_a, row_b = self._check_row(row_a), self._check_row(row_b)
        if row_a == row_b:
            return
        first_a, ids_a = int(self.first_block_per_row[row_a]), self.row_block_ids(row_a)
        first_b, ids_b = int(self.first_block_per_row[row_b]), self.row_block_ids(row_b)
        self.clear_rows(np.array([row_a, row_b]))
        self._set_live(row_a, first_b, ids_b)
        self._set_live(row_b, first_a, ids_a)

    def row_block_ids(self, row: int) -> NDArray[np.int32]:
        """Return a copy of a row's live block ids, first ordinal first."""
        row = self._check_row(row)
        ordinals = np.arange(self.first_block_per_row[row], self.num_blocks_per_row[row])
        ids: NDArray[np.int32] = self.entries[row, ordinals % self.width]
        return ids

    # Operations on many rows at once

    def append_rows(self, rows: NDArray[np.int64], counts: NDArray[np.int64], block_ids: NDArray[np.int32]) -> None:
        """Append `counts[i]` of the concatenated `block_ids` to row `rows[i]`.

        Shapes: rows, counts [n] (rows distinct); block_ids [sum(counts)] int32
        Raises: ValueError if a row would hold more live blocks than it is wide; the table is unchanged then.
        """
        if len(block_ids) != counts.sum():
            raise ValueError(f"block_ids: got {len(block_ids)} ids, expected {counts.sum()}, the sum of counts")
        self._check_width(rows, self.num_blocks_per_row[rows] - self.first_block_per_row[rows] + counts)
        if len(block_ids) == 0:
            return
        flat = self._flat_columns(rows, self.num_blocks_per_row[rows].astype(np.int64), counts)
        self.words[flat] = block_ids
        self.num_blocks_per_row[rows] += counts.astype(np.int32)
        self.mark_dirty(flat)
        self.mark_dirty(self.count_offset + rows[counts > 0])

    def drop_rows_head(self, rows: NDArray[np.int64], first_blocks: NDArray[np.int64]) -> NDArray[np.int32]:
        """Forget in each row the ordinals below `first_blocks[i]`; return the ids, row by row.

        Raises: ValueError if a row has not so many ordinals; the table is unchanged then.
        """
        first = self.first_block_per_row[rows].astype(np.int64)
        counts = np.maximum(first_blocks - first, 0)
        if not counts.any():
            return np.empty(0, dtype=np.int32)
        beyond = np.flatnonzero(first_blocks > self.num_blocks_per_row[rows])
        if beyond.size:
            row = rows[beyond[0]]
            raise ValueError(
                f"first_block: got {first_blocks[beyond[0]]} for row {row}, which has "
                f"{self.num_blocks_per_row[row]} ordinals"
            )
        changed = counts > 0
        flat = self._flat_columns(rows, first, counts)
        ids = self.words[flat]
        self.words[flat] = NULL_BLOCK_ID
        self.first_block_per_row[rows[changed]] = first_blocks[changed]
        self.mark_dirty(flat)
        self.mark_dirty(self.first_offset + rows[changed])
        return ids

    def clear_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Empty rows; return the ids they held, row by row, first ordinal first."""
        first = self.first_block_per_row[rows].astype(np.int64)
        flat = self._flat_columns(rows, first, self.num_blocks_per_row[rows] - first)
        ids = self.words[flat]
        self.words[flat] = NULL_BLOCK_ID
        self.first_block_per_row[rows] = 0
        self.num_blocks_per_row[rows] = 0
        for changed in (flat, self.first_offset + rows, self.count_offset + rows):
            self.mark_dirty(changed)
        return ids

    def take_dirty(self) -> NDArray[np.int64]:
        """Return the distinct indices into `words` that changed since the last call, ascending; forget them."""
        dirty = np.unique(np.concatenate(self._dirty)) if self._dirty else np.empty(0, dtype=np.int64)
        self._dirty, self._num_dirty = [], 0
        return dirty

    def live_mask(self) -> NDArray[np.bool_]:
        """Return `[num_rows, stride]`: whether a column holds a live ordinal."""
        columns = np.arange(self.stride)
        first = self.first_block_per_row[:, None].astype(np.int64)
        distance = (columns - first) % self.width
        live: NDArray[np.bool_] = (distance < self.num_blocks_per_row[:, None] - first) & (columns < self.width)
        return live

    def _set_live(self, row: int, first_block: int, ids: NDArray[np.int32]) -> None:
        rows = np.array([row])
        self.first_block_per_row[row] = self.num_blocks_per_row[row] = first_block
        self.mark_dirty(self.first_offset + rows)
        self.mark_dirty(self.count_offset + rows)
        self.append_rows(rows, np.array([len(ids)]), ids)

    def _flat_columns(
        self, rows: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the indices into `words` of ordinals `[starts[i], starts[i] + counts[i])` of each row."""
        ends = np.cumsum(counts)
        ordinals = np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
        flat: NDArray[np.int64] = np.repeat(rows.astype(np.int64) * self.stride, counts) + ordinals % self.width
        return flat

    def mark_dirty(self, flat: NDArray[np.int64]) -> None:
        """Record that the words at these indices changed."""
        if len(flat) == 0:
            return
        self._dirty.append(flat)
        self._num_dirty += len(flat)
        if self._num_dirty > 2 * len(self.words):
            self._dirty = [np.unique(np.concatenate(self._dirty))]
            self._num_dirty = len(self._dirty[0])

    def _check_row(self, row: int) -> int:
        if not 0 <= row < self.num_rows:
            raise ValueError(f"row: got {row}, expected 0..{self.num_rows - 1}")
        return row

    def check_append(self, row: int, count: int) -> None:
        """Raise ValueError if a row cannot take `count` more blocks."""
        rows = np.array([self._check_row(row)])
        self._check_width(rows, self.num_blocks_per_row[rows] - self.first_block_per_row[rows] + count)

    def check_drop(self, row: int, first_block: int) -> None:
        """Raise ValueError if a row has no ordinal `first_block` and none before it to drop."""
        count = self.num_blocks_per_row[self._check_row(row)]
        if not 0 <= first_block <= count:
            raise ValueError(f"first_block: got {first_block} for row {row}, which has {count} ordinals")

    def check_fill(self, row: int, count: int) -> None:
        """Raise ValueError if a row cannot hold `count` blocks."""
        self._check_width(np.array([self._check_row(row)]), np.array([count]))

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
        return ids.astype(np.int32)

    def _check_width(self, rows: NDArray[np.int64], num_live: NDArray[np.int64]) -> None:
        too_wide = np.flatnonzero(num_live > self.width)
        if too_wide.size:
            raise ValueError(
                f"row {rows[too_wide[0]]}: would hold {num_live[too_wide[0]]} blocks, it is {self.width} wide; "
                "drop blocks from its head first or plan for longer sequences"
            )
