"""Which rows compute which tokens in one step, as the host knows it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv.units import INT32_MAX, INT64_MAX, distinct_bounds, int_array

if TYPE_CHECKING:
    from hybridkv_kernels._host import Tables

_LONG_CHUNKS = 128
"""Tokens a row, on average, from which rows are written one by one."""


@dataclass(frozen=True)
class StepBatch:
    """The live batch positions of a step, checked.

    Shapes (n positions):
        rows          [n] int64, table row of each, distinct
        query_starts  [n+1] int64, token range of each in the flat batch
        computed      [n] int64, tokens in the cache before this step
        seq_lens      [n] int64, tokens in the cache after this step
    """

    rows: NDArray[np.int64]
    query_starts: NDArray[np.int64]
    computed: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    max_query_len: int
    max_seq_len: int
    highest_row: int

    @classmethod
    def of(
        cls,
        rows: ArrayLike,
        num_scheduled_tokens: ArrayLike,
        num_computed_tokens: ArrayLike,
        native: "Tables | None" = None,
    ) -> "StepBatch":
        """Check a step in which row `rows[i]` computes `num_scheduled_tokens[i]` tokens.

        Args:
            native: the compiled helper of the tables whose rows they are, which does it in one call.

        Shapes: rows, num_scheduled_tokens, num_computed_tokens [n]
        Raises: ValueError if the shapes differ, a row occurs twice or schedules less than one token, or a length
            passes int32.
        """
        if native is not None and isinstance(rows, np.ndarray):
            size = rows.size
            both = np.empty(4 * size + 1, dtype=np.int64)
            bounds_of = native.check_batch(rows, num_scheduled_tokens, num_computed_tokens, both)
            if bounds_of is not None:
                ends = size, 2 * size, 3 * size
                return cls(
                    both[: ends[0]], both[ends[2] :], both[ends[0] : ends[1]], both[ends[1] : ends[2]], *bounds_of
                )
        row_ids = int_array("rows", rows)
        scheduled = int_array("num_scheduled_tokens", num_scheduled_tokens)
        computed = int_array("num_computed_tokens", num_computed_tokens)
        if not row_ids.shape == scheduled.shape == computed.shape:
            raise ValueError(
                f"rows, scheduled and computed tokens: got shapes {row_ids.shape}, {scheduled.shape} and "
                f"{computed.shape}, expected equal, flat ones"
            )
        starts = np.zeros(len(row_ids) + 1, dtype=np.int64)
        if not len(row_ids):
            return cls(row_ids, starts, computed, computed, 0, 0, -1)
        # As unsigned numbers negative ones are the largest, so one pass finds both ends.
        max_query_len = int(scheduled.view(np.uint64).max())
        most_computed, bounds = int(computed.view(np.uint64).max()), distinct_bounds(row_ids)
        if INT32_MAX < max_query_len <= INT64_MAX:
            raise ValueError(f"num_scheduled_tokens: got {max_query_len}, expected at most {INT32_MAX} a row")
        np.add.accumulate(scheduled, out=starts[1:])
        seq_lens = computed + scheduled
        # A sum as large as their number and no value above 1: all are 1, as in every decode.
        is_decode = max_query_len == 1 and starts[-1] == len(row_ids)
        lowest_row, highest_row = bounds or (0, INT64_MAX)
        if not (is_decode or scheduled.min() >= 1) or most_computed > INT64_MAX or lowest_row < 0:
            raise ValueError("got a negative row or length or a row without tokens, expected at least one token a row")
        longest = most_computed + 1 if is_decode else max(most_computed, int(seq_lens.max()))
        if highest_row > INT32_MAX:
            raise ValueError(f"rows: got {row_ids.tolist()}, expected distinct rows that fit int32")
        if longest > INT32_MAX or starts[-1] > INT32_MAX:
            raise ValueError(
                f"lengths: got a row of {longest} tokens and a batch of {starts[-1]} tokens, expected at most "
                f"{INT32_MAX}: lengths on the device are int32"
            )
        return cls(row_ids, starts, computed, seq_lens, max_query_len, longest, highest_row)

    @property
    def num_reqs(self) -> int:
        """Live batch positions."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of all of them."""
        return int(self.query_starts[-1])

    def padded_sizes(self, num_reqs_padded: int, num_tokens_padded: int) -> tuple[int, int]:
        """Return the batch positions and tokens of the padded batch; 0 stands for no padding.

        Raises: ValueError if a padded size is negative or too small.
        """
        num_reqs, num_tokens = self.num_reqs, self.num_tokens
        if (num_reqs_padded and num_reqs_padded < num_reqs) or (num_tokens_padded and num_tokens_padded < num_tokens):
            raise ValueError(
                f"padded sizes: got {num_reqs_padded} rows and {num_tokens_padded} tokens for {num_reqs} rows "
                f"and {num_tokens} tokens"
            )
        return max(num_reqs_padded, num_reqs), max(num_tokens_padded, num_tokens)

    def write_tokens(self, token_rows: NDArray[np.int32], positions: NDArray[np.int64]) -> None:
        """Write row and position of every token; padding has row -1 and position 0.

        Shapes: token_rows [T] int32, positions [T] int64, both overwritten
        """
        num_tokens = self.num_tokens
        if num_tokens == self.num_reqs:
            token_rows[:num_tokens], positions[:num_tokens] = self.rows, self.computed
        elif num_tokens >= _LONG_CHUNKS * self.num_reqs:
            # Few long runs: one write each is less work than an index for every token.
            for i, begin in enumerate(self.query_starts[:-1].tolist()):
                end, computed = int(self.query_starts[i + 1]), int(self.computed[i])
                token_rows[begin:end] = self.rows[i]
                positions[begin:end] = np.arange(computed, computed + end - begin)
        else:
            lengths = self.query_starts[1:] - self.query_starts[:-1]
            token_rows[:num_tokens] = self.rows.repeat(lengths)
            np.add(
                (self.computed - self.query_starts[:-1]).repeat(lengths),
                np.arange(num_tokens),
                out=positions[:num_tokens],
            )
        token_rows[num_tokens:] = -1
        positions[num_tokens:] = 0
