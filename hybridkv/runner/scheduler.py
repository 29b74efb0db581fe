"""Which sequences compute how many tokens in the next step.

Decodes come first, then prefill chunks, then admissions, until the token budget is spent. Sequences are served in the
order they came; when blocks run out the youngest running sequence is preempted, so the oldest always moves on and
nothing waits forever. A preempted sequence keeps its row, is first in the queue and computes its tokens again.
"""

from collections import deque
from dataclasses import dataclass

from hybridkv.errors import InvariantError
from hybridkv.manager import CacheManager, Verdict
from hybridkv.runner.sequence import Phase, Sequence
from hybridkv.units import RowId


@dataclass(frozen=True)
class ScheduledBatch:
    """One step's sequences with the number of tokens each computes; decodes first."""

    sequences: list[Sequence]
    num_scheduled_tokens: list[int]

    @property
    def rows(self) -> list[RowId]:
        """Table row of each sequence."""
        return [row_of(sequence) for sequence in self.sequences]


class Scheduler:
    """Continuous batching over a `CacheManager`."""

    def __init__(self, manager: CacheManager, preempt_every: int = 0) -> None:
        self.manager = manager
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
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
        """Pick the next step's work and reserve its blocks; at least one sequence if there is any."""
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
            num_new = min(self.waiting[0].num_remaining_tokens, budget)
            admitted = self._try_admit(num_new)
            if admitted is None:
                break
            batch.sequences.append(admitted)
            batch.num_scheduled_tokens.append(num_new)
            budget -= num_new
        if not batch.sequences and self.has_work:
            raise InvariantError("a sequence that fits alone could not be scheduled alone")
        return batch

    def finish(self, sequence: Sequence) -> None:
        """Free a finished sequence's row and blocks."""
        self.manager.finish(row_of(sequence))
        self.running.remove(sequence)
        sequence.phase = Phase.FINISHED

    def preempt_all(self) -> None:
        """Let every running sequence compute all its tokens again, in the order they came."""
        while self.running:
            self._preempt_youngest()

    def _reserve_running(self) -> ScheduledBatch:
        """Reserve the running sequences' next tokens, preempting the youngest until the rest fits.

        Even a sequence that runs alone may have to start over: blocks that others left scattered can cost it a slab. In
        the empty pool it then fits, as was checked when it came.
        """
        while self.running:
            batch = self._next_chunks()
            verdicts = self.manager.reserve(batch.rows, batch.num_scheduled_tokens).verdicts
            if (verdicts == Verdict.OK).all():
                return batch
            self._preempt_youngest()
        return ScheduledBatch([], [])

    def _next_chunks(self) -> ScheduledBatch:
        budget = self.manager.plan.limits.max_num_batched_tokens
        batch = ScheduledBatch([], [])
        for decoding in (True, False):
            for sequence in self.running:
                if sequence.is_decoding == decoding and budget > 0:
                    num_new = min(sequence.num_remaining_tokens, budget)
                    batch.sequences.append(sequence)
                    batch.num_scheduled_tokens.append(num_new)
                    budget -= num_new
        return batch

    def _try_admit(self, num_new: int) -> Sequence | None:
        """Give the first waiting sequence a row and blocks for its next chunk; None if it has to wait."""
        sequence = self.waiting[0]
        if sequence.phase is Phase.PREEMPTED:
            if self.manager.resume(row_of(sequence), num_new) is not Verdict.OK:
                return None
        elif self.manager.num_free_rows == 0:
            return None
        else:
            sequence.row = self.manager.admit(sequence.num_prompt_tokens, len(sequence.tokens))
            if self.manager.reserve([sequence.row], [num_new]).verdicts[0] != Verdict.OK:
                self.manager.finish(sequence.row)
                sequence.row = None
                return None
        sequence.phase = Phase.RUNNING
        sequence.num_tokens_at_start = sequence.num_tokens
        self.running.append(self.waiting.popleft())
        return sequence

    def _can_spare_youngest(self) -> bool:
        """Whether a preemption that nothing asked for still lets some sequence move on."""
        return len(self.running) > 1 or any(s.num_tokens > s.num_tokens_at_start for s in self.running)

    def _preempt_youngest(self) -> None:
        sequence = self.running.pop()
        self.manager.preempt(row_of(sequence))
        sequence.num_computed_tokens = 0
        sequence.phase = Phase.PREEMPTED
        self.waiting.appendleft(sequence)


def row_of(sequence: Sequence) -> RowId:
    """Return the row of a sequence that has one."""
    if sequence.row is None:
        raise InvariantError(f"request {sequence.request_idx} has no row")
    return sequence.row
