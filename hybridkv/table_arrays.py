"""The rows of every group's block table as flat arrays, so that one numpy operation serves all groups.

A row of group g is a ring of `widths[g]` columns. Ordinal j lives in column `j % width`; the live ordinals of a row are
`[first, count)`, at most `width` of them, and every other column reads null:

    width 4, ordinals 3..6 live      column   0   1   2   3
                                     ordinal  4   5   6   3

A full-attention row is the same with a width that never wraps. One int32 array holds everything a device needs:

    words = | entries of group 0 [num_rows, stride] | ... | of group G-1 | first [G, num_rows] | count [G, num_rows] |

The host array is the authority. Where the compiled helper is, it does the whole of an operation or refuses, and then
numpy does the same or says what is wrong. Every operation logs what it wrote; `take_dirty` hands over one span a row
and group, into which repeated and overlapping operations fall together. The log is for one mirror, that of the last
`attach`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.change_log import Change, ChangeLog, DirtySpans, RectangleChange, WordChange
from hybridkv.plan import SlotMappingMode, row_stride
from hybridkv.units import INT32_MAX
from hybridkv_kernels.constants import NULL_BLOCK_ID
from hybridkv_kernels.group_meta import GroupMeta
from hybridkv_kernels.host import native_tables

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class TableShape:
    """One group's table: columns a row, tokens a block (1 for a group of states), how its tokens map to slots.

    With context parallelism a block's tokens are spread over `num_ranks` ranks in turns of `interleave` tokens.
    """

    width: int
    block_size: int
    mode: SlotMappingMode = SlotMappingMode.FULL
    num_ranks: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        for name, value in (("width", self.width), ("block_size", self.block_size)):
            if not 1 <= value <= INT32_MAX:
                raise ValueError(f"{name}: got {value}, expected 1..{INT32_MAX}")
        self.meta(0, 0, 0)

    @property
    def stride(self) -> int:
        """Words between two rows."""
        return row_stride(self.width, self.block_size, self.mode)

    def meta(self, table_offset: int, first_offset: int, count_offset: int) -> GroupMeta:
        """Return what a kernel needs to know of the group.

        Raises: ValueError for a rank outside its world or an interleave that does not divide the block.
        """
        is_state = self.mode is SlotMappingMode.NONE
        return GroupMeta(
            table_offset=table_offset,
            row_stride=self.stride,
            width=self.width,
            block_size=0 if is_state else self.block_size,
            first_offset=first_offset,
            count_offset=count_offset,
            num_ranks=1 if is_state else self.num_ranks,
            rank=0 if is_state else self.rank,
            interleave=1 if is_state else self.interleave,
        )


class TableArrays:
    """Rows of all groups, which `BlockTable`s show group by group.

    Operations take `pairs` [n] int64, distinct, each `group * num_rows + row`, and check nothing but the width.

    Shapes:
        words   [num_words] int32
        first   [num_groups, num_rows] int32, the first live ordinal; a view
        count   [num_groups, num_rows] int32, the ordinal after the last live one: the next to append; a view
        widths, strides, offsets  [num_groups] int64: columns a row, words a row, where a group's entries begin

    Attributes:
        consumer: what `attach` named last, None without a mirror.
        native: the compiled helper for these arrays, None without one.
    """

    def __init__(self, num_rows: int, shapes: Sequence[TableShape]) -> None:
        if not shapes or not 1 <= num_rows <= INT32_MAX:
            raise ValueError(f"tables: got {len(shapes)} of {num_rows} rows, expected at least 1 group and 1 row")
        self.num_rows, self.shapes = num_rows, tuple(shapes)
        self.widths = np.array([shape.width for shape in shapes], dtype=np.int64)
        self.strides = np.array([shape.stride for shape in shapes], dtype=np.int64)
        ends = np.cumsum(self.strides * num_rows)
        self.offsets = ends - self.strides * num_rows
        num_entries, num_pairs = int(ends[-1]), len(shapes) * num_rows
        self.words = np.zeros(num_entries + 2 * num_pairs, dtype=np.int32)
        self.first_offset, self.count_offset = num_entries, num_entries + num_pairs
        self.first = self.words[self.first_offset : self.count_offset].reshape(len(shapes), num_rows)
        self.count = self.words[self.count_offset :].reshape(len(shapes), num_rows)
        self._first, self._count = self.first.reshape(-1), self.count.reshape(-1)
        rows = np.arange(num_rows, dtype=np.int64)
        self._row_starts = (self.offsets[:, None] + self.strides[:, None] * rows).reshape(-1)
        self._pair_widths = np.repeat(self.widths, num_rows)
        self.is_ring = [shape.mode is SlotMappingMode.SLIDING_WINDOW for shape in shapes]
        self._pair_is_ring = np.repeat(self.is_ring, num_rows)
        self._all_pairs = np.arange(num_pairs).reshape(len(shapes), num_rows)
        self._narrowest = int(self.widths.min())
        self._alike = _alike_groups(self.shapes)
        self._views = self.views(self.words)
        self._log = ChangeLog(self._pair_widths)
        self.native = native_tables(self.words, self.group_metas, self.is_ring, self._log.span_arrays)
        self.consumer: object | None = None

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.shapes)

    @property
    def group_metas(self) -> list[GroupMeta]:
        """Return what kernels need to know of each group."""
        return [
            shape.meta(
                int(self.offsets[g]), self.first_offset + g * self.num_rows, self.count_offset + g * self.num_rows
            )
            for g, shape in enumerate(self.shapes)
        ]

    def attach(self, consumer: object) -> None:
        """Let a new mirror, which reads null, take what changes from now on: every row that is not empty is dirty."""
        self._log.clear()
        pairs = np.flatnonzero(self._count)
        if pairs.size:
            first = self._first[pairs].astype(np.int64)
            self._log.mark_run(pairs, first % self._pair_widths[pairs], self._count[pairs] - first)
        self.consumer = consumer

    def pairs(self, group: int, rows: Int64) -> Int64:
        """Return the pairs of one group's rows."""
        return rows + group * self.num_rows

    def views(self, words: Int32) -> list[Int32]:
        """Return the entries `[groups, num_rows, stride]` of each run of groups with equal rows, views of `words`."""
        views = []
        for groups in self._alike:
            begin, stride = int(self.offsets[groups.start]), int(self.strides[groups.start])
            shape = groups.stop - groups.start, self.num_rows, stride
            views.append(words[begin : begin + shape[0] * shape[1] * stride].reshape(shape))
        return views

    def append(self, pairs: Int64, counts: Int64 | int, block_ids: Int32) -> None:
        """Append `counts[i]` of the concatenated `block_ids` to each pair, or equally many.

        Raises: ValueError if a row would hold more live blocks than it is wide, or pass int32; nothing changes then.
        """
        start = self._count[pairs].astype(np.int64)
        end = start + counts
        column = start
        fits = not len(end) or int(end.max()) <= self._narrowest
        if not fits:
            self.check_fit(pairs, self._first[pairs], end)
            column = start % self._pair_widths[pairs]
        flat = _runs(self._row_starts[pairs] + column, counts) if fits else self._flat(pairs, start, counts)
        self.words[flat] = block_ids
        self._count[pairs] = end
        self._log.add(WordChange(pairs, column, counts, flat))

    def set_rows(self, pairs: Int64, first: Int64, counts: Int64, block_ids: Int32) -> None:
        """Make `counts[i]` of the concatenated `block_ids` the ordinals from `first[i]` on of empty rows."""
        self._first[pairs] = first
        self._count[pairs] = first
        self.append(pairs, counts, block_ids)

    def set_rows_alike(self, rows: Int64, num_blocks: int, block_ids: Int32) -> None:
        """Make `num_blocks` blocks a row, group by group, row by row, the ordinals from 0 on of empty rows."""
        ids = block_ids.reshape(self.num_groups, len(rows), num_blocks)
        for view, groups in enumerate(self._alike):
            self._views[view][:, rows, :num_blocks] = ids[groups]
            pairs = self._all_pairs[groups][:, rows].reshape(-1)
            self._log.add(RectangleChange(view, pairs, rows, num_blocks, np.full_like(pairs, num_blocks)))
        self.count[:, rows] = num_blocks

    def clear_rows(self, rows: Int64) -> Int32:
        """Empty rows in all groups; return the ids they held, group by group, row by row, first ordinal first."""
        count = self.count[:, rows]
        used = count.any(axis=0)
        if not used.all():
            rows, count = rows[used], count[:, used]
        first = self.first[:, rows]
        from_zero, parts = not first.any(), []
        for view, groups in enumerate(self._alike):
            most, entries = self._log_rectangle(view, rows, count[groups]), self._views[view]
            if from_zero and (count[groups] == most).all():
                parts.append(entries[:, rows, :most].reshape(-1))
            else:
                parts.append(self.live_ids(self._all_pairs[groups][:, rows].reshape(-1)))
            entries[:, rows, :most] = NULL_BLOCK_ID
        self.first[:, rows] = 0
        self.count[:, rows] = 0
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def move_rows(self, sources: Int64, targets: Int64) -> None:
        """Move rows of all groups, each into another one that is not moved itself; the source is empty afterwards."""
        count = self.count[:, sources]
        both = np.concatenate([sources, targets])
        for view, groups in enumerate(self._alike):
            entries = self._views[view]
            used = np.maximum(count[groups], self.count[groups][:, targets])
            most = self._log_rectangle(view, both, np.concatenate([count[groups], used], axis=1))
            # A ring's column depends on the ordinal alone, so entries keep theirs.
            entries[:, targets, :most] = entries[:, sources, :most]
            entries[:, sources, :most] = NULL_BLOCK_ID
        self.first[:, targets] = self.first[:, sources]
        self.count[:, targets] = count
        self.first[:, sources] = 0
        self.count[:, sources] = 0

    def drop_head(self, pairs: Int64, first: Int64) -> Int32:
        """Forget the ordinals below `first[i]`, none where it is no later than the first live one; return their ids."""
        start = self._first[pairs].astype(np.int64)
        changed = np.flatnonzero(first > start)
        if not changed.size:
            return np.empty(0, dtype=np.int32)
        pairs, first, start = pairs[changed], first[changed], start[changed]
        ids = self._take(pairs, start, first - start)
        self._first[pairs] = first
        return ids

    def clear(self, pairs: Int64) -> Int32:
        """Empty rows; return the ids they held, pair by pair, first ordinal first."""
        used = self._count[pairs] > 0
        if not used.all():
            pairs = pairs[used]
        start = self._first[pairs].astype(np.int64)
        ids = self._take(pairs, start, self._count[pairs] - start)
        self._first[pairs] = 0
        self._count[pairs] = 0
        return ids

    def move(self, sources: Int64, targets: Int64) -> None:
        """Move rows, each into another one of its group that is not moved itself; the source is empty afterwards."""
        kept = sources != targets
        if not kept.all():
            sources, targets = sources[kept], targets[kept]
        first = self._first[sources].astype(np.int64)
        counts = self._count[sources] - first
        self.clear(targets)
        self.set_rows(targets, first, counts, self.clear(sources))

    def swap(self, pairs_a: Int64, pairs_b: Int64) -> None:
        """Exchange rows with others of their groups; no row occurs twice, but one may be swapped with itself."""
        kept = pairs_a != pairs_b
        if not kept.all():
            pairs_a, pairs_b = pairs_a[kept], pairs_b[kept]
        first_a, first_b = self._first[pairs_a].astype(np.int64), self._first[pairs_b].astype(np.int64)
        counts_a, counts_b = self._count[pairs_a] - first_a, self._count[pairs_b] - first_b
        ids_a, ids_b = self.clear(pairs_a), self.clear(pairs_b)
        self.set_rows(pairs_a, first_b, counts_b, ids_b)
        self.set_rows(pairs_b, first_a, counts_a, ids_a)

    def live_ids(self, pairs: Int64) -> Int32:
        """Return a copy of the live block ids, pair by pair, first ordinal first."""
        start = self._first[pairs].astype(np.int64)
        ids: Int32 = self.words[self._flat(pairs, start, self._count[pairs] - start)]
        return ids

    def check_fit(self, pairs: Int64, first: NDArray[np.integer], end: Int64) -> None:
        """Raise ValueError if the ordinals `[first[i], end[i])` do not fit a row; only a ring has room for new ones
        where old ones were dropped.
        """
        widths = self._pair_widths[pairs]
        if (end <= widths).all():
            return
        num_columns = np.where(self._pair_is_ring[pairs], end - first, end)
        too_many = num_columns > widths
        if too_many.any():
            index = int(too_many.argmax())
            raise ValueError(
                f"{self.name_pair(pairs[index])}: would hold {num_columns[index]} blocks, it is {widths[index]} wide; "
                "drop blocks from its head first if it has a window, or plan for longer sequences"
            )
        if int(end.max()) > INT32_MAX:
            index = int(end.argmax())
            raise ValueError(
                f"{self.name_pair(pairs[index])}: would reach ordinal {end[index]}, expected {INT32_MAX} at most"
            )

    def name_pair(self, pair: np.int64) -> str:
        """Return how an error names a pair."""
        group, row = divmod(int(pair), self.num_rows)
        return f"row {row}" if self.num_groups == 1 else f"group {group} row {row}"

    def take_dirty(self) -> DirtySpans:
        """Return what changed since the last call, and forget it."""
        pairs, low, high = self._log.take_spans()
        # Past the live ordinals of a row that did not wrap there are only nulls, which need not travel.
        count = self._count[pairs]
        live_end = np.where(count <= self._pair_widths[pairs], np.minimum(count, high), high)
        num_payload = np.maximum(live_end, low) - low
        return DirtySpans(pairs, low, high - low, num_payload, _runs(self._row_starts[pairs] + low, num_payload))

    def mark_again(self, spans: DirtySpans) -> None:
        """Take spans back that could not travel."""
        self._log.mark(spans.pairs, spans.low, spans.low + spans.num_words)

    def copy_dirty(self, mirror: Int32, mirror_views: list[Int32]) -> int:
        """Bring another `words`, with its `views`, up to date on the host; return how many words that took.

        If it fails, what was to be copied stays dirty.
        """
        if self._log.is_empty:
            return 0
        if self.native is not None:
            self._log.collapse()
            num_words = self.native.copy_dirty(mirror)
            if num_words is not None:
                return num_words
        changes = self._log.take_changes()
        if not changes:
            pairs, low, high = self._log.take_spans()
            changes = [WordChange(pairs, low, high - low, _runs(self._row_starts[pairs] + low, high - low))]
        try:
            return self._copy_changes(changes, mirror, mirror_views)
        except BaseException:
            for change in changes:
                self._log.add(change)
            raise

    def _copy_changes(self, changes: Sequence[Change], mirror: Int32, mirror_views: list[Int32]) -> int:
        num_words = 0
        for change in changes:
            if isinstance(change, RectangleChange):
                columns = slice(0, change.num_columns)
                source = self._views[change.view][:, change.rows, columns]
                mirror_views[change.view][:, change.rows, columns] = source
                num_words += source.size
            else:
                mirror[change.flat] = self.words[change.flat]
                num_words += len(change.flat)
        # Live ranges lie together: copying all of them is less work than finding those that changed.
        mirror[self.first_offset :] = self.words[self.first_offset :]
        return num_words

    def _log_rectangle(self, view: int, rows: Int64, count: NDArray[np.int32]) -> int:
        """Log the columns that hold all blocks of rows of a view that reached ordinals `count`; return the most.

        Shapes: count [groups of the view, n]
        """
        pairs = self._all_pairs[self._alike[view]][:, rows].reshape(-1)
        high = np.minimum(count, self.shapes[self._alike[view].start].width).reshape(-1).astype(np.int64)
        most = int(high.max(initial=0))
        self._log.add(RectangleChange(view, pairs, rows, most, high))
        return most

    def _take(self, pairs: Int64, start: Int64, counts: Int64) -> Int32:
        flat = self._flat(pairs, start, counts)
        ids: Int32 = self.words[flat]
        self.words[flat] = NULL_BLOCK_ID
        self._log.add(WordChange(pairs, start % self._pair_widths[pairs], counts, flat))
        return ids

    def _flat(self, pairs: Int64, starts: Int64, counts: Int64 | int) -> Int64:
        """Return the indices into `words` of ordinals `[starts[i], starts[i] + counts[i])` of each pair."""
        if (starts + counts <= self._pair_widths[pairs]).all():
            return _runs(self._row_starts[pairs] + starts, counts)
        ordinals = _runs(starts, counts) % np.repeat(self._pair_widths[pairs], counts)
        ordinals += np.repeat(self._row_starts[pairs], counts)
        return ordinals


def _alike_groups(shapes: Sequence[TableShape]) -> list[slice]:
    """Return the runs of neighbouring groups whose rows are equally wide."""
    starts = [g for g in range(len(shapes)) if not g or _row_shape(shapes[g]) != _row_shape(shapes[g - 1])]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(shapes)], strict=True)]


def _row_shape(shape: TableShape) -> tuple[int, int]:
    return shape.width, shape.stride


def _runs(starts: Int64, counts: Int64 | int) -> Int64:
    """Return the integers `starts[i], starts[i] + 1, ...`, `counts[i]` of them, run after run; may be `starts`."""
    if isinstance(counts, int):
        return starts if counts == 1 else (starts[:, None] + np.arange(counts)).reshape(-1)
    ends = counts.cumsum()
    runs = np.repeat(starts - ends + counts, counts)
    runs += np.arange(len(runs))
    return runs
