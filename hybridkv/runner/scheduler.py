"""Which sequences compute how many tokens in the next step.

Decodes come first, then prefill chunks, then admissions, until the token budget is spent. Sequences are served in the
order they came; when blocks run out the youngest running sequence is preempted, so the oldest always moves on and
nothing waits forever. A preempted sequence keeps its row, is first in the queue, and comes back with what the host
kept or what is still cached of its tokens.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.admission import Admission, Verdict
from hybridkv.errors import OutOfBlocks
from hybridkv.manager import CacheManager
from hybridkv.runner.sequence import Phase, Sequence
from hybridkv.units import RowId

Propose = Callable[[NDArray[np.int64]], Seq[int]]
"""Guesses what follows some tokens `[n]` int64."""


@dataclass(frozen=True)
class ScheduledBatch:
    """One step's sequences with the number of tokens each computes, drafts included; decodes first."""

    sequences: list[Sequence]
    num_scheduled_tokens: list[int]

    @property
    def rows(self) -> list[RowId]:
        """Table row of each sequence."""
        return [sequence.admitted_row for sequence in self.sequences]


class Scheduler:
    """Continuous batching over a `CacheManager`.

    Attributes:
        propose: guesses tokens that sequences without sampling verify while they decode; None for no guesses.
        num_hit_tokens: tokens that sequences found in the cache when they started or came back.
    """

    def __init__(self, manager: CacheManager, preempt_every: int = 0, propose: Propose | None = None) -> None:
        self.manager, self.propose = manager, propose
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_hit_tokens = 0
        self._preempt_every = preempt_every
        self._num_steps = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is not finished."""
        return bool(self.waiting or self.running)

    def schedule(self) -> ScheduledBatch:
        """Pick the next step's work and reserve its blocks.

        Returns: at least one sequence, if there is any and no block waits to be copied to the host.
        """
        self._num_steps += 1
        if self._preempt_every and self._num_steps % self._preempt_every == 0 and self._can_spare_youngest():
            self._preempt_youngest()
        num_preemptions = self.manager.num_preemptions
        batch = self._reserve_running()
        if batch.sequences and self.manager.num_preemptions > num_preemptions:
            # What was just freed is for those that go on: the preempted one would take it back at once.
            return batch
        budget = self.manager.plan.limits.max_num_batched_tokens - sum(batch.num_scheduled_tokens)
        while budget > 0 and self.waiting:
            num_new = self._try_admit(budget)
            if not num_new:
                break
            batch.sequences.append(self.running[-1])
            batch.num_scheduled_tokens.append(num_new)
            budget -= num_new
        return batch

    def finish(self, sequence: Sequence) -> None:
        """Free a sequence's row and blocks, if it has any, and take it out."""
        if sequence.row is not None:
            self.manager.finish(sequence.row)
            sequence.row = None
        if sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.phase = Phase.FINISHED

    def start_choices(self, sequence: Sequence, others: Seq[Sequence]) -> Seq[Sequence]:
        """Let other completions of a prompt that was just computed go on from it; return those that do.

        The rest wait, and find the prompt cached.
        """
        num_forks = min(len(others), self.manager.num_free_rows)
        try:
            rows = self.manager.fork(sequence.admitted_row, num_forks) if num_forks else []
        except OutOfBlocks:
            rows = []
        for other, row in zip(others, rows, strict=False):
            other.row, other.phase = row, Phase.RUNNING
            other.num_computed_tokens = other.num_cached_tokens = sequence.num_computed_tokens
            other.num_tokens_at_start = other.num_tokens
            self.running.append(other)
        self.waiting.extend(others[len(rows) :])
        return others[: len(rows)]

    def preempt_all(self, *, keep: bool = True) -> None:
        """Let every running sequence go back to the queue, in the order they came.

        Args:
            keep: keep what they computed; not after a step that failed.
        """
        while self.running:
            self._preempt_youngest(keep=keep)

    def _reserve_running(self) -> ScheduledBatch:
        """Reserve the running sequences' next tokens, preempting the youngest until the rest fits.

        Even a sequence that runs alone may have to start over: blocks that others left scattered can cost it a slab. In
        the empty pool it then fits, as was checked when it came.
        """
        self._draft()
        while self.running:
            batch = self._next_chunks()
            verdicts = self.manager.reserve(batch.rows, batch.num_scheduled_tokens).verdicts
            if (verdicts == Verdict.OK).all():
                return self._with_checkpoints(batch)
            self._preempt_youngest()
        return ScheduledBatch([], [])

    def _next_chunks(self) -> ScheduledBatch:
        budget = self.manager.plan.limits.max_num_batched_tokens
        spare = budget - sum(sequence.is_decoding for sequence in self.running)
        limits = self.manager.chunk_limits([sequence.admitted_row for sequence in self.running]).tolist()
        batch = ScheduledBatch([], [])
        for decoding in (True, False):
            for sequence, limit in zip(self.running, limits, strict=True):
                if sequence.is_decoding == decoding and budget > 0:
                    sequence.num_drafts = max(0, min(sequence.num_drafts, spare, limit - 1))
                    num_new = min(sequence.num_remaining_tokens + sequence.num_drafts, budget, limit)
                    batch.sequences.append(sequence)
                    batch.num_scheduled_tokens.append(num_new)
                    budget -= num_new
                    spare -= sequence.num_drafts
        return batch

    def _draft(self) -> None:
        """Write guesses behind the tokens of sequences that decode greedily."""
        for sequence in self.running:
            sequence.num_drafts = 0
            # The token after the last accepted draft needs a place too.
            room = min(len(sequence.tokens) - sequence.num_tokens, self.manager.plan.limits.max_in_flight) - 1
            if self.propose is None or not sequence.is_decoding or sequence.params.temperature > 0 or room < 1:
                continue
            drafts = np.asarray(self.propose(sequence.token_ids), dtype=np.int64)[:room]
            sequence.tokens[sequence.num_tokens : sequence.num_tokens + len(drafts)] = drafts
            sequence.num_drafts = len(drafts)

    def _with_checkpoints(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Keep the states that drafts may spoil; where there is no room for that, go on without drafts."""
        with_drafts = [sequence for sequence in batch.sequences if sequence.num_drafts]
        try:
            self.manager.checkpoint([sequence.admitted_row for sequence in with_drafts])
        except OutOfBlocks:
            for idx, sequence in enumerate(batch.sequences):
                batch.num_scheduled_tokens[idx] -= sequence.num_drafts
                sequence.num_drafts = 0
        return batch

    def _try_admit(self, budget: int) -> int:
        """Give the first waiting sequence a row and blocks for its next chunk; return its length, 0 to wait."""
        sequence, manager = self.waiting[0], self.manager
        was_preempted = sequence.phase is Phase.PREEMPTED
        admission = self._admit(sequence)
        if admission.verdict is not Verdict.OK:
            return 0
        row = sequence.row = admission.admitted_row
        num_remaining = sequence.num_tokens - admission.num_hit_tokens
        num_new = min(num_remaining, budget, int(manager.chunk_limits([row])[0]))
        if manager.reserve([row], [num_new]).verdicts[0] != Verdict.OK:
            if was_preempted:
                manager.preempt(row)
            else:
                manager.finish(row)
                sequence.row = None
            return 0
        if not was_preempted:
            sequence.num_cached_tokens = admission.num_hit_tokens
        self.num_hit_tokens += admission.num_hit_tokens
        sequence.num_computed_tokens = admission.num_hit_tokens
        sequence.phase = Phase.RUNNING
        sequence.num_tokens_at_start = sequence.num_tokens
        self.running.append(self.waiting.popleft())
        return num_new

    def _admit(self, sequence: Sequence) -> Admission:
        if sequence.phase is Phase.PREEMPTED:
            return self.manager.resume(sequence.admitted_row, sequence.token_ids)
        return self.manager.admit(sequence.token_ids, len(sequence.tokens), salt=sequence.salt)

    def _can_spare_youngest(self) -> bool:
        """Whether a preemption that nothing asked for still lets some sequence move on."""
        return len(self.running) > 1 or any(s.num_tokens > s.num_tokens_at_start for s in self.running)

    def _preempt_youngest(self, *, keep: bool = True) -> None:
        sequence = self.running.pop()
        self.manager.preempt(sequence.admitted_row, to_host=keep, keep=keep)
        sequence.num_computed_tokens = sequence.num_drafts = 0
        sequence.phase = Phase.PREEMPTED
        self.waiting.appendleft(sequence)
