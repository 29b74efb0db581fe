"""Rows of running sequences: what each is used for, how far each has come.

| committed ......... | settled ....... | computed ...... | capacity ..... |
  blocks may be shared  kernels finished   kernels launched   blocks reserved
"""

from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv.units import distinct_bounds, int_array

Int64 = NDArray[np.int64]


class RowState(IntEnum):
    """What a row is used for."""

    FREE = 0
    RUNNING = 1
    PREEMPTED = 2
    SWAPPED = 3
    DRAINING = 4


class RowLengths:
    """Rows as arrays.

    Shapes, all `[num_rows]`:
        states      int8, a `RowState`
        computed    int64, tokens whose keys, values or states are in the cache, or will be once launched steps end
        settled     int64, tokens of steps that have ended
        committed   int64, tokens whose ids are final: their full blocks may be shared
        capacity    int64, tokens that blocks are reserved for
        generation  int64, how often the row was given away: tells a step's row from the next sequence's
    """

    def __init__(self, num_rows: int) -> None:
        self.states = np.zeros(num_rows, dtype=np.int8)
        self._lengths = np.zeros((4, num_rows), dtype=np.int64)
        self.computed, self.settled, self.committed, self.capacity = self._lengths
        self.generation = np.zeros(num_rows, dtype=np.int64)
        self._last_running: bytes | None = None

    def __len__(self) -> int:
        return len(self.states)

    def start(self, row: int, num_tokens: int) -> None:
        """Let a row run with so many tokens in the cache."""
        self.states[row] = RowState.RUNNING
        self._lengths[:, row] = num_tokens

    def end(self, row: int, state: RowState) -> None:
        """Take a row's tokens away."""
        self._last_running = None
        self.states[row] = state
        self._lengths[:, row] = 0
        self.generation[row] += 1

    def assign(self, targets: Int64, sources: Int64) -> None:
        """Let row `targets[i]` run with the lengths of row `sources[i]`; both may name the same rows."""
        self._last_running = None
        self.states[targets] = self.states[sources]
        self._lengths[:, targets] = self._lengths[:, sources]
        self.generation[targets] += 1

    def free_rows(self) -> Int64:
        """Return the rows that no sequence has, ascending."""
        return np.flatnonzero(self.states == RowState.FREE)

    def running(self, rows: ArrayLike) -> Int64:
        """Return rows as an array.

        Raises: ValueError unless they are distinct, exist and run.
        """
        row_ids = int_array("rows", rows)
        content = row_ids.tobytes()
        if content == self._last_running:  # most steps have the rows of the step before
            return row_ids
        bounds = distinct_bounds(row_ids)
        if bounds is None:
            raise ValueError(f"rows: got {row_ids.tolist()}, expected distinct rows")
        if row_ids.size and (bounds[0] < 0 or bounds[1] >= len(self.states)):
            raise ValueError(f"rows: got {bounds[0]}..{bounds[1]}, expected 0..{len(self.states) - 1}")
        states = self.states[row_ids]
        if (states != RowState.RUNNING).any():
            idle = int((states != RowState.RUNNING).argmax())
            raise ValueError(f"rows: row {row_ids[idle]} is {RowState(states[idle]).name}, expected RUNNING")
        self._last_running = content
        return row_ids

    def running_with(self, rows: ArrayLike, counts: ArrayLike) -> tuple[Int64, Int64]:
        """Return running rows and a count of at least 1 for each.

        Raises: ValueError if they are not of this form.
        """
        row_ids, num_new = self.running(rows), int_array("num_new_tokens", counts)
        if row_ids.shape != num_new.shape:
            raise ValueError(
                f"rows and counts: got shapes {row_ids.shape} and {num_new.shape}, expected equal, flat ones"
            )
        if num_new.size and np.minimum.reduce(num_new) < 1:
            raise ValueError(f"num_new_tokens: got {num_new.min()}, expected at least 1 a row")
        return row_ids, num_new

    def check_state(self, row: int, *expected: RowState) -> None:
        """Raise ValueError unless a row exists and is in one of these states."""
        if not 0 <= row < len(self.states):
            raise ValueError(f"row: got {row}, expected 0..{len(self.states) - 1}")
        if self.states[row] not in expected:
            names = " or ".join(state.name for state in expected)
            raise ValueError(f"row {row} is {RowState(self.states[row]).name}, expected {names}")
