"""How one step's work travels to the device: one int32 staging buffer, and where the step's outputs lie.

    staging | header | rows [n] | query starts [n+1] | computed [n] | record_of [G, n] | group starts [G+1] |
            | records | payload |

with n = the live batch positions. The header holds the live sizes and where each part begins, in words from the start
of the buffer: grids and scalar arguments freeze when a graph is captured, the buffer's content does not. A record is
one row's changed span in one group: columns `[low, low + num_words)` become the payload, then nulls, and the row's live
ordinals become `[first, count)`. Records are sorted by group and row, one a row and group at most; `record_of[g, i]` is
the record of batch position i's row in group g, or -1.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import Final

__all__ = ["HEADER_WORDS", "NUM_INDEX_COLUMNS", "RECORD_WORDS", "Header", "IndexMeta", "Record"]


class Header(IntEnum):
    """Words of the header; the parts' beginnings are in words."""

    NUM_REQS = 0
    NUM_TOKENS = 1
    AT_ROWS = 2
    AT_QUERY_STARTS = 3
    AT_COMPUTED = 4
    AT_RECORD_OF = 5
    AT_GROUP_STARTS = 6
    AT_RECORDS = 7


class Record(IntEnum):
    """Words of a record; `AT_PAYLOAD` in words from the start of the staging buffer."""

    ROW = 0
    LOW = 1
    NUM_WORDS = 2
    NUM_PAYLOAD = 3
    AT_PAYLOAD = 4
    FIRST = 5
    COUNT = 6


HEADER_WORDS: Final = len(Header)
RECORD_WORDS: Final = len(Record)


@dataclass(frozen=True)
class IndexMeta:
    """Where one group's page indices go: one row of `index_meta`, the values in column order.

    Places are words from the start of the index buffer, -1 where the group does not ask for that dialect.

    Attributes:
        table_at: of the block table by batch position `[R, table_width]`, from the row's first live ordinal on.
        first_at: of the first position `[R]` that the table holds.
        len_at: of the tokens `[R]` from there on.
        indptr_at, indices_at, last_at: of CSR's `[R+1]`, `[num_indices]`, `[R]`.
        pad_seq_len: what `len_at` holds for padding.
        state_row: first row of the group in `state_slots`, -1 for a group that keeps tokens.
    """

    table_at: int = -1
    table_width: int = 0
    first_at: int = -1
    len_at: int = -1
    indptr_at: int = -1
    indices_at: int = -1
    num_indices: int = 0
    last_at: int = -1
    pad_seq_len: int = 0
    state_row: int = -1

    def as_row(self) -> tuple[int, ...]:
        """Return the values in column order."""
        row: tuple[int, ...] = astuple(self)
        return row


NUM_INDEX_COLUMNS: Final = len(fields(IndexMeta))
"""Columns of `index_meta [num_groups, NUM_INDEX_COLUMNS] int64`."""
