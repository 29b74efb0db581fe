"""Beam search over rows that share the blocks of their common past.

Each step keeps the `num_beams` best continuations of all beams. A beam without heirs gives its row up to a copy of one
with several: `CacheManager.reorder`. Scores and ends are those of Hugging Face's `generate`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hybridkv._torch import torch
from hybridkv.admission import Verdict
from hybridkv.errors import InvalidRequest, OutOfBlocks
from hybridkv.manager import CacheManager
from hybridkv.runner.passes import ForwardPasses, PassInput

Int64 = NDArray[np.int64]
_NEVER = -1e9  # a score that no beam reaches


@dataclass(frozen=True)
class BeamParams:
    """How beams are searched and scored.

    Attributes:
        num_beams: beams kept, and returned.
        max_new_tokens: most tokens of a beam.
        length_penalty: a finished beam's score is the sum of its log-probabilities / length ** length_penalty.
        early_stopping: True ends as soon as `num_beams` beams have finished; False once the best running beam would
            lose if it ended now; "never" once it would lose even at the best length.
        stop_token_ids: tokens that end a beam, kept in it.

    Raises: InvalidRequest for a value out of range.
    """

    num_beams: int = 4
    max_new_tokens: int = 64
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name in ("num_beams", "max_new_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidRequest(f"{name}: got {value!r}, expected an integer of at least 1")
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequest(f"early_stopping: got {self.early_stopping!r}, expected true, false or 'never'")


@dataclass(frozen=True)
class Beam:
    """A finished beam.

    Attributes:
        token_ids: its new tokens, a stop token included.
        score: the sum of their log-probabilities, divided by the length to the power of `length_penalty`.
    """

    token_ids: list[int]
    score: float


class BeamScores:
    """Which continuations live on, which beams have finished.

    Attributes:
        tokens: new tokens of each running beam, best first.
        is_over: whether no running beam is to go on.
    """

    def __init__(self, params: BeamParams) -> None:
        self._params = params
        self.tokens: list[list[int]] = [[]]
        self.is_over = False
        self._scores = torch.zeros(1)
        self._finished = [Beam([], _NEVER)] * params.num_beams
        self._can_improve = True

    def advance(self, logits: torch.Tensor) -> list[int]:
        """Take the next token's logits of every running beam; return the beam that each new one continues.

        Shapes: logits [beams, vocab_size]; returns [num_beams]
        """
        params = self._params
        scores = torch.log_softmax(logits.float().cpu(), dim=-1) + self._scores[:, None]
        num_kept = max(2, 1 + len(params.stop_token_ids)) * params.num_beams
        best, places = scores.reshape(-1).topk(min(num_kept, scores.numel()))
        sources, token_ids = (places // logits.shape[-1]).tolist(), (places % logits.shape[-1]).tolist()
        candidates = [[*self.tokens[source], token] for source, token in zip(sources, token_ids, strict=True)]
        num_new = len(candidates[0])
        ends = [token in params.stop_token_ids or num_new == params.max_new_tokens for token in token_ids]
        self._finish(candidates, best, ends)
        running, order = (best + _NEVER * torch.tensor(ends).float()).topk(params.num_beams)
        self.tokens, self._scores = [candidates[i] for i in order.tolist()], running
        self._check_over(num_new, all(ends))
        return [sources[i] for i in order.tolist()]

    def best(self) -> list[Beam]:
        """Return the finished beams, best first."""
        return [beam for beam in self._finished if beam.token_ids]

    def _finish(self, candidates: Sequence[list[int]], sums: torch.Tensor, ends: Sequence[bool]) -> None:
        """Let those of the best `num_beams` continuations that end take the place of worse finished beams."""
        params = self._params
        if not self._can_improve or (self._all_finished and params.early_stopping is True):
            return
        scores = (sums / len(candidates[0]) ** params.length_penalty).tolist()
        new = [Beam(candidates[i], scores[i]) for i in range(params.num_beams) if ends[i]]
        self._finished = sorted([*self._finished, *new], key=lambda beam: -beam.score)[: params.num_beams]

    @property
    def _all_finished(self) -> bool:
        return bool(self._finished[-1].token_ids)

    def _check_over(self, num_new: int, all_end: bool) -> None:
        params = self._params
        length = params.max_new_tokens if params.early_stopping == "never" and params.length_penalty > 0 else num_new
        possible = float(self._scores[0]) / length**params.length_penalty
        self._can_improve &= possible > (self._finished[-1].score if self._all_finished else _NEVER)
        is_full = self._all_finished and params.early_stopping is True
        self.is_over = not self._can_improve or is_full or all_end


def search_beams(manager: CacheManager, passes: ForwardPasses, prompt: Sequence[int], params: BeamParams) -> list[Beam]:
    """Search with rows of an idle manager; they are free afterwards.

    Raises: OutOfBlocks if the beams do not fit.
    """
    admission = manager.admit(prompt, len(prompt) + params.max_new_tokens)
    rows = [int(admission.admitted_row)]
    search = BeamScores(params)
    try:
        search.advance(_prefill(manager, passes, rows[0], prompt))
        rows += manager.fork(rows[0], params.num_beams - 1) if params.num_beams > 1 else []
        while not search.is_over:
            last = np.array([tokens[-1] for tokens in search.tokens], dtype=np.int64)
            sources = search.advance(_compute(manager, passes, rows, [1] * len(rows), last, len(prompt)))
            if not search.is_over:
                manager.reorder(rows, [rows[source] for source in sources])
    except BaseException:
        for row in rows:  # states may have been advanced by a step that failed
            manager.preempt(row, keep=False)
        passes.settle()
        raise
    finally:
        for row in rows:
            manager.finish(row)
    return search.best()


def _prefill(manager: CacheManager, passes: ForwardPasses, row: int, prompt: Sequence[int]) -> torch.Tensor:
    """Compute what is not cached of a prompt; return the logits `[1, vocab_size]` after it."""
    tokens = np.asarray(prompt, dtype=np.int64)
    budget = manager.plan.limits.max_num_batched_tokens
    while True:
        begin = int(manager.num_computed_tokens[row])
        end = min(len(tokens), begin + budget, begin + int(manager.chunk_limits([row])[0]))
        logits = _compute(manager, passes, [row], [end - begin], tokens[begin:end], len(tokens))
        if end == len(tokens):
            return logits


def _compute(
    manager: CacheManager,
    passes: ForwardPasses,
    rows: list[int],
    counts: list[int],
    token_ids: Int64,
    num_prompt: int,
) -> torch.Tensor:
    """Compute and commit tokens of rows; return the logits `[len(rows), vocab_size]` after them."""
    reservation = manager.reserve(rows, counts)
    if (reservation.verdicts != Verdict.OK).any():
        short = {group: int(count) for group, count in enumerate(reservation.shortfall[:, -1]) if count}
        raise OutOfBlocks({}, short)
    logits_at = (np.cumsum(counts) - 1).tolist()
    logits = passes.run(PassInput(rows, counts, token_ids, [num_prompt] * len(rows), logits_at))
    passes.settle()
    manager.commit(rows, counts, token_ids)
    return logits
