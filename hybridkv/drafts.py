"""Tokens computed in vain: drafts that were not accepted are taken back, in all groups at once.

Keys and values need nothing: what follows writes over them. A state has advanced over all drafts, so a row with states
needs a checkpoint from before them: a second set of state blocks. Rolling back, the two sets change places, and the
accepted tokens behind the checkpoint are computed again.
"""

import numpy as np
from numpy.typing import NDArray

from hybridkv.sequence_store import SequenceStore

Int64 = NDArray[np.int64]
_NO_POSITION = -1


class Drafts:
    """Checkpoints of rows' states.

    Shapes:
        positions  [num_rows] int64, tokens that the checkpoint has seen; -1 without one
    """

    def __init__(self, store: SequenceStore) -> None:
        self._store = store
        self._num_parts = store.groups.fixed[store.groups.states, 0]
        self.positions = np.full(len(store.rows), _NO_POSITION, dtype=np.int64)
        self._scratch = store.scratch

    def checkpoint(self, rows: Int64) -> None:
        """Ask for copies of the states of running rows as they are now.

        Raises: OutOfBlocks if a row has no checkpoint yet and its blocks do not fit; nothing changes then.
        """
        if not self._scratch.shape[1]:
            return
        rows = rows[(self.positions[rows] != self._store.rows.computed[rows]) & (self._store.rows.computed[rows] > 0)]
        new = rows[self._scratch[rows, 0] == 0]
        need = np.zeros(self._store.num_groups, dtype=np.int64)
        need[self._store.groups.states] = self._num_parts * len(new)
        taken = np.split(self._store.lender.take(need), need.cumsum()[:-1])
        parts = zip(self._store.groups.states, self._num_parts.tolist(), strict=True)
        by_group = [taken[g].reshape(len(new), num_parts) for g, num_parts in parts]
        self._scratch[new] = np.concatenate(by_group, axis=1)
        self.positions[rows] = self._store.rows.computed[rows]
        self._store.copies.add(self._state_blocks(rows).reshape(-1), self._scratch[rows].reshape(-1))

    def can_roll_back(self, rows: Int64, counts: Int64) -> NDArray[np.bool_]:
        """Return `[n]`: whether the last `counts[i]` computed tokens of each running row can be taken back."""
        lengths = self._store.rows
        target = lengths.computed[rows] - counts
        possible: NDArray[np.bool_] = target >= lengths.settled[rows]
        if self._scratch.shape[1]:
            position = self.positions[rows]
            possible &= (counts == 0) | ((position >= lengths.settled[rows]) & (position <= target) & (position >= 0))
        return possible

    def roll_back(self, rows: Int64, counts: Int64) -> None:
        """Take tokens back where `can_roll_back` allows it."""
        lengths = self._store.rows
        some = counts > 0
        rows, counts = rows[some], counts[some]
        if not len(rows):
            return
        if not self._scratch.shape[1]:
            lengths.computed[rows] -= counts
            return
        advanced = self._state_blocks(rows)
        self._replace_states(rows, self._scratch[rows])
        self._scratch[rows] = advanced
        lengths.computed[rows] = self.positions[rows]
        self.positions[rows] = _NO_POSITION

    def forget(self, row: int) -> None:
        """Give up a row's checkpoint."""
        if self._scratch.shape[1] and self._scratch[row, 0]:
            self._store.pool.release(self._scratch[row])
            self._scratch[row] = 0
        self.positions[row] = _NO_POSITION

    def move(self, source: int, target: int) -> None:
        """Move a row's checkpoint to a row without one."""
        for values in (self.positions, self._scratch):
            values[target] = values[source]
        self.positions[source], self._scratch[source] = _NO_POSITION, 0

    def _state_blocks(self, rows: Int64) -> Int64:
        """Return the flat state blocks `[n, num_state_blocks]` of rows."""
        store = self._store
        parts = [
            store.tables[g].entries[rows, :n] + store.pool.offsets[g]
            for g, n in zip(store.groups.states, self._num_parts.tolist(), strict=True)
        ]
        return np.concatenate(parts, axis=1)

    def _replace_states(self, rows: Int64, blocks: Int64) -> None:
        store, begin = self._store, 0
        for group, num_parts in zip(store.groups.states, self._num_parts.tolist(), strict=True):
            pairs = store.arrays.pairs(group, rows)
            ids = (blocks[:, begin : begin + num_parts] - store.pool.offsets[group]).astype(np.int32)
            store.arrays.clear(pairs)
            counts = np.full(len(rows), num_parts, dtype=np.int64)
            store.arrays.set_rows(pairs, np.zeros(len(rows), dtype=np.int64), counts, ids.reshape(-1))
            begin += num_parts
