"""Row operations and steps in C: each does its whole work, or refuses with None having changed nothing.

Arrays are numpy arrays; a method takes any object and refuses what it does not know.
"""

from typing import Literal, TypeAlias

_Done: TypeAlias = Literal[True] | None

class Tables:
    """What works on the arrays of one `TableArrays`, kept alive by it.

    Raises: ValueError for arrays that do not fit together.
    """

    def __new__(
        cls,
        words: object,
        group_metas: object,
        is_ring: object,
        low: object,
        high: object,
        is_dirty: object,
        has_spans: object,
        /,
    ) -> Tables: ...
    def append_rows(self, group: int, rows: object, counts: object, block_ids: object, /) -> _Done:
        """Append to rows of one group, counts [n], or of all groups for -1, counts [num_groups, n]."""

    def add_rows(self, rows: object, counts: object, block_ids: object, /) -> _Done:
        """Replace rows of all groups."""

    def clear_rows(self, rows: object, /) -> bytearray | None:
        """Empty rows of all groups; return the int32 ids that they held."""

    def drop_heads(self, group: int, rows: object, first_blocks: object, /) -> bytearray | None:
        """Drop heads of rows of one group; return the int32 ids that they held."""

    def move_rows(self, sources: object, targets: object, /) -> _Done:
        """Move rows of all groups."""

    def copy_dirty(self, mirror: object, /) -> int | None:
        """Bring a mirror up to date; return how many words of entries that took."""

    def check_batch(
        self, rows: object, scheduled: object, computed: object, out: object, /
    ) -> tuple[int, int, int] | None:
        """Write rows, computed, sequence lengths, query starts to `out` [4n + 1] int64.

        Returns: the longest query and sequence, the highest row.
        """

    def write_geometry(
        self,
        rows: object,
        query_starts: object,
        computed: object,
        out_rows: object,
        out_query_start_loc: object,
        out_seq_lens: object,
        out_zero_start: object,
        out_token_rows: object,
        out_positions: object,
        /,
    ) -> _Done:
        """Write a padded batch."""

    def map_batch(
        self,
        words: object,
        index_metas: object,
        rows: object,
        computed: object,
        query_start_loc: object,
        out_slots: object,
        out_state_slots: object,
        out_index: object,
        padded_rows: object,
        /,
    ) -> _Done:
        """Write slots, states and page indices of a padded batch."""
