"""Rows that grow: blocks for the next tokens, steps in flight, tokens that become final."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.admission import Reservation, Verdict
from hybridkv.compaction import compact_for
from hybridkv.errors import InvalidRequest
from hybridkv.sequence_store import SequenceStore
from hybridkv.units import INT32_MAX, INT64_MAX

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class _Step:
    """A launched step. Shapes: rows, ends (tokens computed by its end), generations [n]."""

    rows: Int64
    ends: Int64
    generations: Int64


class Growth:
    """The verbs of `CacheManager` that move running rows' lengths, on rows and counts that are checked already."""

    def __init__(self, store: SequenceStore) -> None:
        self._store = store
        self._steps: dict[int, _Step] = {}

    def reserve(self, rows: Int64, num_new: Int64) -> Reservation:
        """Reserve blocks for `num_new[i]` more tokens of each row."""
        store = self._store
        targets = self._targets(rows, num_new)
        growth = store.groups.ends(targets)
        growth -= store.arrays.count[:, rows]
        np.maximum(growth, 0, out=growth)
        num_rows = len(rows)
        need = np.add.reduce(growth, axis=1)
        fits = bool(store.lender.fits(need))
        if not fits:
            compact_for(store, need)
            fits = bool(store.lender.fits(need))
        if fits:
            self._lend(rows, growth, need, targets)
            return Reservation(np.zeros(num_rows, dtype=np.int8), np.zeros(growth.shape, dtype=np.int64))
        cumulative = growth.cumsum(axis=1)
        ok = np.logical_and.accumulate(store.lender.fits(cumulative))
        num_ok = int(ok.sum())
        if num_ok:
            self._lend(rows[:num_ok], growth[:, :num_ok], cumulative[:, num_ok - 1], targets[:num_ok])
        verdicts = np.where(ok, Verdict.OK, Verdict.LATER).astype(np.int8)
        waiting = np.arange(num_ok, num_rows)
        verdicts[waiting[~self._fit_alone(rows[waiting], growth[:, waiting])]] = Verdict.NEVER
        left = cumulative - cumulative[:, num_ok - 1 : num_ok] if num_ok else cumulative
        return Reservation(verdicts, np.where(ok, 0, store.lender.shortfall(np.maximum(left, 0))))

    def launch(self, rows: Int64, num_new: Int64) -> int:
        """Count tokens as computed by a step in flight."""
        lengths = self._store.rows
        computed = lengths.computed[rows] + num_new
        self._check_capacity(rows, computed)
        step = self._store.pool.launch()
        lengths.computed[rows] = computed
        self._steps[step] = _Step(rows, computed, lengths.generation[rows])
        return step

    def settle(self, step: int) -> None:
        """Count the tokens of all steps up to this one as settled."""
        store, lengths = self._store, self._store.rows
        store.pool.settle(step)
        for number in sorted(n for n in self._steps if n <= step):
            launched = self._steps.pop(number)
            same = lengths.generation[launched.rows] == launched.generations
            rows = launched.rows[same]
            lengths.settled[rows] = np.maximum(lengths.settled[rows], launched.ends[same])
            store.drop_out_of_window(rows, self._final(rows))
        store.free_drained_rows()

    def take_back(self, rows: Int64) -> None:
        """Let steps in flight end no later than their rows' computed tokens: what is behind was rolled back."""
        lengths = self._store.rows
        most = np.full(len(lengths), INT64_MAX, dtype=np.int64)
        most[rows] = lengths.computed[rows]
        for step in self._steps.values():
            np.minimum(step.ends, most[step.rows], out=step.ends)

    def move(self, source: int, target: int, generation: int) -> None:
        """Let steps in flight of a row, which had `generation` before it moved, be those of the row it moved to."""
        for step in self._steps.values():
            moved = (step.rows == source) & (step.generations == generation)
            step.rows[moved] = target
            step.generations[moved] = self._store.rows.generation[target]

    def commit(self, rows: Int64, num_new: Int64, token_ids: Int32 | None) -> None:
        """Make tokens final."""
        store, lengths = self._store, self._store.rows
        starts = lengths.committed[rows]
        ends = starts + num_new
        self._check_capacity(rows, ends)
        computed, settled = lengths.computed[rows], lengths.settled[rows]
        early = (ends > settled) & (computed > starts)
        if np.count_nonzero(early):
            row = int(rows[early][0])
            raise ValueError(
                f"row {row}: would have {ends[early][0]} tokens committed, {lengths.settled[row]} are settled; settle "
                "the step first, or roll back"
            )
        if store.recorder is not None:
            store.recorder.record(rows, starts, num_new, token_ids)
        lengths.committed[rows] = ends
        lengths.computed[rows] = np.maximum(computed, ends)
        lengths.settled[rows] = np.maximum(settled, ends)
        if store.groups.windowed:
            store.drop_out_of_window(rows, self._final(rows))
        if not self._steps and store.pool.waits:  # an engine that waits for each step: it has ended
            store.pool.settle(store.pool.launch())

    def chunk_limits(self, rows: Int64) -> Int64:
        """Return the most tokens that rows may compute in their next step."""
        recorder = self._store.recorder
        if recorder is None or not self._store.groups.states:
            return np.full(len(rows), INT32_MAX, dtype=np.int64)
        limits: Int64 = np.minimum(recorder.next_point[rows] - self._store.rows.computed[rows], INT32_MAX)
        return limits

    def _final(self, rows: Int64) -> Int64:
        """Return the settled tokens, those before a resume point that is about to be kept: it needs its window."""
        settled, recorder = self._store.rows.settled[rows], self._store.recorder
        if recorder is None or not self._store.groups.windowed:
            return settled
        return np.minimum(settled, recorder.next_point[rows])

    def _lend(self, rows: Int64, growth: Int64, need: Int64, targets: Int64) -> None:
        store = self._store
        if np.count_nonzero(need):
            taken = store.lender.take(need)
            try:
                store.operations.append_rows(rows, growth, store.ids(taken, need))
            except BaseException:
                self._store.pool.release(taken)
                raise
        self._store.rows.capacity[rows] = np.maximum(self._store.rows.capacity[rows], targets)

    def _targets(self, rows: Int64, num_new: Int64) -> Int64:
        """Return the tokens that rows would have; raise for those that may not grow so far."""
        limits = self._store.plan.limits
        targets = self._store.rows.computed[rows] + num_new
        if not len(rows):
            return targets
        if np.maximum.reduce(num_new) > limits.max_in_flight:
            raise ValueError(
                f"num_new_tokens: got {num_new.max()}, expected at most {limits.max_in_flight} a row; plan with a "
                "larger max_num_batched_tokens"
            )
        in_flight = targets - self._final(rows)
        if np.maximum.reduce(in_flight) > limits.max_in_flight:
            row = rows[in_flight.argmax()]
            raise ValueError(
                f"num_new_tokens: row {row} would have {in_flight.max()} tokens in flight, expected at most "
                f"{limits.max_in_flight}; settle and commit a step first, or plan with a larger max_unsettled_tokens"
            )
        if np.maximum.reduce(targets) > limits.max_model_len:
            row = rows[targets.argmax()]
            raise InvalidRequest(
                f"tokens: row {row} would grow to {targets.max()}, past max_model_len={limits.max_model_len}"
            )
        if self._store.groups.states:
            chunk_limits = self.chunk_limits(rows)
            past = num_new > chunk_limits
            if np.count_nonzero(past):
                idx = int(past.argmax())
                raise ValueError(
                    f"num_new_tokens: row {rows[idx]} would pass the end of its chunk, where its state is to be kept, "
                    f"after {chunk_limits[idx]} tokens; schedule at most `chunk_limits`"
                )
        return targets

    def _check_capacity(self, rows: Int64, num_tokens: Int64) -> None:
        over = num_tokens > self._store.rows.capacity[rows]
        if np.count_nonzero(over):
            row = rows[over.argmax()]
            raise ValueError(
                f"row {row}: would have more tokens computed than its capacity of "
                f"{self._store.rows.capacity[row]}; reserve first"
            )

    def _fit_alone(self, rows: Int64, growth: Int64) -> NDArray[np.bool_]:
        held = self._store.arrays.count[:, rows] - self._store.arrays.first[:, rows]
        slabs = -(-(held + growth) // self._store.pool.blocks_per_slab[:, None])
        fits: NDArray[np.bool_] = slabs.sum(axis=0) <= self._store.plan.num_usable_slabs
        return fits
