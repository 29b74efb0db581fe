"""Greedy outputs compared with Hugging Face's own generation, token by token."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from hybridkv._torch import torch
from hybridkv.errors import InvalidRequest

# RecurrentGemma keeps states on its modules between calls, MiniMax forgets its length if its first layer is linear.
_RECOMPUTED = frozenset({"minimax", "recurrent_gemma"})
TIE_GAP = 1e-4
"""Logits closer than this may swap places between two correct ways to compute them."""
# Their prompts go through a chunked form of the delta rule, whose logits differ by that much from a step at a time.
_WIDE_TIE_GAP = 1e-3
_CHUNKED_DELTA_RULE = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})


@dataclass(frozen=True)
class Difference:
    """The first token of a prompt's output that Hugging Face would not have generated.

    Attributes:
        expected: Hugging Face's token, None if it had ended before.
        got: our token, None if our output ended before.
        gap: how far our token's logit is below Hugging Face's best, None if a side has no token or no number.
    """

    prompt_idx: int
    token_idx: int
    expected: int | None
    got: int | None
    gap: float | None


@dataclass(frozen=True)
class Tie:
    """A token that differs from Hugging Face's, with logits too close to tell which is right."""

    prompt_idx: int
    token_idx: int
    gap: float


@dataclass(frozen=True)
class Verification:
    """The outcome: equal if every difference is a tie."""

    first_difference: Difference | None
    ties: list[Tie]

    @property
    def equal(self) -> bool:
        """Whether Hugging Face generates the same, ties aside."""
        return self.first_difference is None


@dataclass(frozen=True)
class StopRules:
    """Where an output has to end.

    Attributes:
        max_new_tokens: per prompt, the most tokens of its output.
        eos_token_ids: tokens that end an output, kept in it.
        ends: whether the new tokens so far end an output for another reason, such as a stop text.
    """

    max_new_tokens: Sequence[int]
    eos_token_ids: frozenset[int] = frozenset()
    ends: Callable[[Sequence[int]], bool] = field(default=lambda _token_ids: False)


def verify_greedy(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    rules: StopRules,
    progress: Callable[[int, int], None] | None = None,
    tie_gap: float | None = None,
) -> Verification:
    """Generate every prompt again with Hugging Face's cache and attention, greedily, one prompt at a time.

    The prompt is computed in one piece, unpadded. After a tie it goes on from our token, so that one tie does not make
    the rest of the output differ.

    Args:
        outputs: the new tokens of each prompt, end token included.
        progress: called with the tokens compared so far, plus their total.
        tie_gap: how close two logits must be to count as a tie; `default_tie_gap` of the model if None.

    Raises: InvalidRequest if the lengths of the lists differ.
    """
    if not len(prompts) == len(outputs) == len(rules.max_new_tokens):
        raise InvalidRequest(
            f"outputs: got {len(outputs)} and {len(rules.max_new_tokens)} lengths for {len(prompts)} prompts, "
            "expected one of each"
        )
    gap = default_tie_gap(model.config.model_type) if tie_gap is None else tie_gap
    total, num_done = sum(len(output) for output in outputs), 0
    differences: list[Difference] = []
    ties: list[Tie] = []
    with _own_attention(model), torch.inference_mode():
        for prompt_idx, prompt in enumerate(prompts):
            for found in _compare(model, prompt_idx, prompt, outputs[prompt_idx], rules, gap):
                if isinstance(found, Difference):
                    differences.append(found)
                elif isinstance(found, Tie):
                    ties.append(found)
                if progress is not None:
                    num_done += 1
                    progress(min(num_done, total), total)
    return Verification(differences[0] if differences else None, ties)


def default_tie_gap(model_type: str) -> float:
    """Return how close two logits of such a model must be to count as a tie."""
    return _WIDE_TIE_GAP if model_type in _CHUNKED_DELTA_RULE else TIE_GAP


def _compare(
    model: PreTrainedModel,
    prompt_idx: int,
    prompt: Sequence[int],
    output: Sequence[int],
    rules: StopRules,
    tie_gap: float,
) -> Iterator[Difference | Tie | None]:
    """Yield the verdict on each token: None for an equal one; nothing after a difference."""
    oracle = Oracle(model)
    input_ids = list(prompt)
    token_idx = -1
    for token_idx in range(rules.max_new_tokens[prompt_idx]):
        logits = oracle.logits(input_ids)
        expected = int(logits.argmax())
        if token_idx == len(output):
            yield Difference(prompt_idx, token_idx, expected, None, None)
            return
        got = output[token_idx]
        if got == expected:
            yield None
        else:
            gap = _gap(logits, expected, got)
            if gap is None or gap >= tie_gap:
                yield Difference(prompt_idx, token_idx, expected, got, gap)
                return
            yield Tie(prompt_idx, token_idx, gap)
        input_ids = [got]
        if got in rules.eos_token_ids or rules.ends(output[: token_idx + 1]):
            break
    if len(output) > token_idx + 1:
        yield Difference(prompt_idx, token_idx + 1, None, output[token_idx + 1], None)


class Oracle:
    """Hugging Face's logits for one sequence, its prompt in one piece and then token by token.

    Positions are given as `generate` gives them. A model whose own cache is not to be trusted computes the whole
    sequence every time.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        names = [name for name in ("past_key_values", "cache_params") if name in parameters]
        self._cache_name = None if model.config.model_type in _RECOMPUTED or not names else names[0]
        self._takes_positions = "position_ids" in parameters
        self._cache: object = None
        self._token_ids: list[int] = []

    def logits(self, new_token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits `[vocab_size]` after some more tokens."""
        self._token_ids += new_token_ids
        token_ids = list(new_token_ids) if self._cache_name else self._token_ids
        input_ids = torch.tensor([token_ids], device=self._model.device)
        arguments: dict[str, object] = {"use_cache": self._cache_name is not None}
        if self._cache_name is not None:
            arguments[self._cache_name] = self._cache
        if self._takes_positions:
            first = len(self._token_ids) - len(token_ids)
            arguments["position_ids"] = torch.arange(first, len(self._token_ids), device=input_ids.device)[None]
        result = self._model(input_ids=input_ids, logits_to_keep=1, **arguments)
        if self._cache_name is not None:
            self._cache = getattr(result, self._cache_name)
        logits: torch.Tensor = result.logits[0, -1].float()
        return logits


def _gap(logits: torch.Tensor, expected: int, got: int) -> float | None:
    """How far below the best logit our token's is; None where that is no number."""
    if not 0 <= got < len(logits):
        return None
    gap = float(logits[expected] - logits[got])
    return gap if math.isfinite(gap) else None


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Give the model Hugging Face's attention back for a while: SDPA, or eager where the model refuses that."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
