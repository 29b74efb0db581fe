"""What changed in the tables of all groups since the device last saw them.

Operations in numpy log what they wrote: single words, or a rectangle of rows and columns of alike groups. A host mirror
copies the log as it is. For a device the log falls together into one span of columns a row and group, whatever happened
there. The compiled helper works on the spans alone, which are arrays that both know.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridkv.units import INT32_MAX

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_MAX_CHANGES = 64


@dataclass(frozen=True)
class DirtySpans:
    """What changed, one span a row and group, by group and row.

    Shapes (n spans):
        pairs        [n] int64, `group * num_rows + row`
        low          [n] int64, first changed column
        num_words    [n] int64, columns from `low` on; the last `num_words - num_payload` of them read null
        num_payload  [n] int64
        source       [sum(num_payload)] int64, indices into `words` of the payload, span by span
    """

    pairs: Int64
    low: Int64
    num_words: Int64
    num_payload: Int64
    source: Int64

    @classmethod
    def none(cls) -> "DirtySpans":
        """Return no spans."""
        return cls(*(np.empty(0, dtype=np.int64) for _ in range(5)))


class WordChange(NamedTuple):
    """Some pairs' columns `[column[i], column[i] + counts[i])`, past the width round the ring: the words `flat`."""

    pairs: Int64
    column: Int64
    counts: Int64 | int
    flat: Int64


class RectangleChange(NamedTuple):
    """Columns `[0, high[i])` of some rows of all groups of a view, `num_columns` at most."""

    view: int
    pairs: Int64
    rows: Int64
    num_columns: int
    high: Int64


Change = WordChange | RectangleChange


class ChangeLog:
    """Changes in order, those that are old as spans by pair.

    Shapes: `pair_widths` [num_pairs] int64, the columns of each pair's row

    Attributes:
        changes: what was logged since the last `collapse`.
    """

    def __init__(self, pair_widths: Int64) -> None:
        self.changes: list[Change] = []
        self._pair_widths, num_pairs = pair_widths, len(pair_widths)
        self._low = np.full(num_pairs, INT32_MAX, dtype=np.int64)
        self._high = np.zeros(num_pairs, dtype=np.int64)
        self._is_dirty = np.zeros(num_pairs, dtype=np.bool_)
        self._has_spans = np.zeros(1, dtype=np.bool_)

    @property
    def is_empty(self) -> bool:
        """Whether nothing changed."""
        return not self.changes and not self._has_spans[0]

    @property
    def span_arrays(self) -> tuple[Int64, Int64, NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the arrays that hold the spans: low, high, is_dirty [num_pairs], whether there is any [1]."""
        return self._low, self._high, self._is_dirty, self._has_spans

    def clear(self) -> None:
        """Forget everything."""
        self.changes.clear()
        self._forget_spans(np.flatnonzero(self._is_dirty))

    def add(self, change: Change) -> None:
        """Log a change; the log stays short, however long nobody takes it."""
        if not len(change.pairs):
            return
        self.changes.append(change)
        if len(self.changes) > _MAX_CHANGES:
            self.collapse()

    def collapse(self) -> None:
        """Let the changes fall together into spans."""
        for change in self.changes:
            if isinstance(change, RectangleChange):
                self.mark(change.pairs, np.zeros_like(change.pairs), change.high)
                continue
            self.mark_run(change.pairs, change.column, change.counts)
        self.changes.clear()

    def mark_run(self, pairs: Int64, column: Int64, counts: Int64 | int) -> None:
        """Record that `counts[i]` columns from `column[i]` on changed, past the width round the ring."""
        end, widths = column + counts, self._pair_widths[pairs]
        wraps = end > widths
        self.mark(pairs, np.where(wraps, 0, column), np.where(wraps, widths, end))

    def mark(self, pairs: Int64, low: Int64, high: Int64) -> None:
        """Record that the columns `[low[i], high[i])`, perhaps none, and the live ranges of pairs changed."""
        self._is_dirty[pairs] = True
        self._has_spans[0] = True
        some = high > low
        pairs, low, high = pairs[some], low[some], high[some]
        self._low[pairs] = np.minimum(self._low[pairs], low)
        self._high[pairs] = np.maximum(self._high[pairs], high)

    def take_spans(self) -> tuple[Int64, Int64, Int64]:
        """Return the dirty pairs, ascending, with the columns `[low, high)` that changed; forget everything."""
        self.collapse()
        if not self._has_spans[0]:
            empty = np.empty(0, dtype=np.int64)
            return empty, empty, empty
        pairs = np.flatnonzero(self._is_dirty)
        high = self._high[pairs]
        low = np.minimum(self._low[pairs], high)  # a row of which only the live range changed has no columns
        self._forget_spans(pairs)
        return pairs, low, high

    def take_changes(self) -> list[Change]:
        """Return the changes if all of them are still in the log; none otherwise: the rest is in `take_spans`."""
        if self._has_spans[0]:
            return []
        changes, self.changes = self.changes, []
        return changes

    def _forget_spans(self, pairs: Int64) -> None:
        self._is_dirty[pairs] = False
        self._low[pairs] = INT32_MAX
        self._high[pairs] = 0
        self._has_spans[0] = False
