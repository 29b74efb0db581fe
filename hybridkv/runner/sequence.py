"""What a caller asks for, what a running sequence remembers, what the caller gets."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv.errors import InvalidRequest, InvariantError
from hybridkv.runner.text import TextStream
from hybridkv.units import RowId

FinishReason = Literal["stop", "length"]
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence is decoded.

    Attributes:
        max_new_tokens: most tokens to generate, at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probabilities add up to at least this, 0 < top_p <= 1.
        seed: of this sequence's own random stream; None takes an unpredictable one.
        stop_token_ids: tokens that end the sequence; the token is kept in the output.
        stop: texts that end the sequence; the text is cut before them.
        n: completions of the prompt, which is computed once; the i-th takes `seed + i`.

    Raises: InvalidRequest for a value out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    n: int = 1

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name, valid, rule in (
            ("max_new_tokens", _is_int(self.max_new_tokens) and self.max_new_tokens >= 1, "an integer of at least 1"),
            (
                "temperature",
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < float("inf"),
                f"0 for greedy decoding, or a number of at least {MIN_TEMPERATURE}",
            ),
            ("top_k", _is_int(self.top_k) and self.top_k >= 0, "an integer of at least 0; 0 keeps every token"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("seed", self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63), "an integer in 0..2^63-1"),
            (
                "stop",
                isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop),
                "a tuple of texts that are not empty",
            ),
            ("n", _is_int(self.n) and self.n >= 1, "an integer of at least 1"),
        ):
            if not valid:
                raise InvalidRequest(f"{name}: got {getattr(self, name)!r}, expected {rule}")


@dataclass(frozen=True)
class Completion:
    """One completion of a request.

    Attributes:
        token_ids: the new tokens, a stop token included.
        text: the completion, cut before a stop text; None without a tokenizer.
        num_cached_tokens: prompt tokens whose cache was reused.
        finish_reason: `"stop"` for a stop token or text, `"length"` at `max_new_tokens` or the model's length.
        choice_idx: which of the request's completions it is, from 0 to `SamplingParams.n` - 1.
    """

    token_ids: list[int]
    text: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    finish_reason: FinishReason
    choice_idx: int = 0


@dataclass(frozen=True)
class StepOutput:
    """What a step added to one completion of a request.

    Attributes:
        token_ids: its new tokens.
        text: the text that became certain.
        completion: the whole of it, with its last token.
    """

    request_id: int
    choice_idx: int
    token_ids: list[int]
    text: str
    completion: Completion | None


class Phase(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """A request on its way through the scheduler.

        | prompt tokens ............ | new tokens ... |
        0                num_prompt_tokens        num_tokens
        | in the cache ........ | to compute ........ |
        0             num_computed_tokens         num_tokens

    A preempted sequence comes back with what is still cached of its tokens, and keeps its new ones;
    `num_tokens_at_start` is what it had when it last started. Drafts lie behind its tokens until they are verified.
    `request_idx` is its request's id once it is queued, before that the prompt's place in the call.

    Shapes: `tokens` [most tokens it can reach] int64, the first `num_tokens` valid, then `num_drafts` to be verified
    """

    request_idx: int
    tokens: NDArray[np.int64]
    num_prompt_tokens: int
    params: SamplingParams
    num_tokens: int
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens_at_start: int = 0
    num_drafts: int = 0
    choice_idx: int = 0
    salt: Hashable = None
    row: RowId | None = None
    phase: Phase = Phase.WAITING
    finish_reason: FinishReason | None = None
    stream: TextStream | None = field(default=None, repr=False)
    has_other_choices: bool = False

    @classmethod
    def create(cls, request_idx: int, prompt: ArrayLike, params: SamplingParams, max_model_len: int) -> "Sequence":
        """Make a waiting sequence that ends at `max_model_len` tokens at the latest.

        Raises: InvalidRequest if the prompt is not a flat list of at least one token id of at least 0, or leaves no
            room for a token after it.
        """
        ids = np.asarray(prompt)
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0:
            raise InvalidRequest(
                f"prompt {request_idx}: got {ids.size} tokens of {ids.dtype}, expected a flat list of at "
                "least one token id of at least 0"
            )
        if ids.size >= max_model_len:
            raise InvalidRequest(
                f"prompt {request_idx}: got {ids.size} tokens, expected fewer than max_model_len={max_model_len} so "
                "that at least one can follow"
            )
        tokens = np.zeros(min(ids.size + params.max_new_tokens, max_model_len), dtype=np.int64)
        tokens[: ids.size] = ids
        return cls(request_idx, tokens, ids.size, params, ids.size)

    def other_choices(self) -> "list[Sequence]":
        """Return the other completions of a new sequence's prompt, waiting without a row."""
        params, others = self.params, []
        for choice_idx in range(1, params.n):
            seed = None if params.seed is None else (params.seed + choice_idx) % 2**63
            others.append(
                replace(
                    self,
                    tokens=self.tokens.copy(),
                    params=replace(params, seed=seed),
                    num_tokens=self.num_prompt_tokens,
                    num_computed_tokens=0,
                    num_cached_tokens=0,
                    choice_idx=choice_idx,
                    has_other_choices=False,
                    row=None,
                    phase=Phase.WAITING,
                    stream=None if self.stream is None else self.stream.fresh(),
                )
            )
        return others

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The prompt and the tokens generated so far."""
        return self.tokens[: self.num_tokens]

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens that are not in the cache yet."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def admitted_row(self) -> RowId:
        """The row of a sequence that has one.

        Raises: InvariantError if it has none.
        """
        if self.row is None:
            raise InvariantError(f"request {self.request_idx} has no row")
        return self.row

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.num_remaining_tokens == 1 and self.num_tokens > self.num_prompt_tokens

    @property
    def new_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        ids: list[int] = self.tokens[self.num_prompt_tokens : self.num_tokens].tolist()
        return ids

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
