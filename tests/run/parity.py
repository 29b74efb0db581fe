"""One parity run: a tiny checkpoint through the engine, then through Hugging Face."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridkv.hf_config import CacheOptions, model_spec_from_config, read_config
from hybridkv.runner import Engine, EngineConfig, EngineStats, SamplingParams
from hybridkv.runner.tiny import make_tiny
from hybridkv.runner.tiny_configs import TINY_CONFIGS, VOCAB_SIZE
from hybridkv.runner.verify import StopRules, Verification, verify_greedy
from hybridkv.specs import ModelSpec

PROMPT_LENGTHS = (3, 5, 11, 17, 24, 40, 61, 90)
MAX_NEW_TOKENS = 16
MEMORY = 2**23
BUDGETS = (1, 7, 16, 64)
WINDOWS = (8, 12, 17, 24)
_WINDOW_FIELDS = ("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size")
_MAX_PREEMPTION_PROBABILITY = 0.3
_TOKENS_BETWEEN_PREEMPTIONS = 50
# Logits reach 20. Both sides differ in the order of additions only, which sharp softmaxes and gates amplify.
LOGIT_TOLERANCE = 2e-3
# Hugging Face computes these prompts in blocks of tokens, where a state is advanced a token at a time here.
_LOGIT_TOLERANCES: Mapping[str, float] = {
    "minimax": 5e-3,
    "qwen3_5_moe_text": 1e-2,
    "qwen3_5_text": 1e-2,
    "qwen3_next": 1e-2,
}


@dataclass(frozen=True)
class ParityRun:
    """What both sides made of the same prompts."""

    outputs: list[list[int]]
    stats: EngineStats
    verification: Verification
    max_logit_difference: float


def logit_tolerance(family: str) -> float:
    """Return how far logits may be apart in float32."""
    return _LOGIT_TOLERANCES.get(family, LOGIT_TOLERANCE)


def windowed(family: str) -> dict[str, object]:
    """Return the field that gives a family a window or chunk of its own; several sizes are covered."""
    config = TINY_CONFIGS[family]
    size = WINDOWS[list(TINY_CONFIGS).index(family) % len(WINDOWS)]
    return {field: size for field in _WINDOW_FIELDS if config.get(field) is not None}


def random_prompts() -> list[list[int]]:
    """Return 8 uneven prompts."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in PROMPT_LENGTHS]


def load_tiny(folder: Path, dtype: str) -> tuple[PreTrainedModel, ModelSpec]:
    """Load a tiny checkpoint with its spec; a float32 model keeps every state in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    options = CacheOptions(kv_dtype=dtype, conv_dtype=dtype)
    return model, model_spec_from_config(read_config(folder), name=folder.name, options=options)


def tiny_engine(folder: Path, dtype: str, config: EngineConfig, backend=None) -> tuple[PreTrainedModel, Engine]:
    """Load a tiny checkpoint and build an engine on it."""
    model, spec = load_tiny(folder, dtype)
    return model, Engine(model, spec, None, config, backend)


def preempt_at_random(engine: Engine, seed: int) -> None:
    """Preempt the youngest sequence at random steps of an engine that may preempt at every step."""
    rng, can_spare = random.Random(seed), engine.scheduler._can_spare_youngest
    budget = engine.plan.limits.max_num_batched_tokens
    # Steps of few tokens need more of them to get anywhere.
    probability = min(_MAX_PREEMPTION_PROBABILITY, budget / _TOKENS_BETWEEN_PREEMPTIONS)
    engine.scheduler._can_spare_youngest = lambda: rng.random() < probability and can_spare()


class TinyFamily:
    """A tiny checkpoint of a family, with what Hugging Face makes of 8 uneven prompts."""

    def __init__(self, family: str, folder: Path, dtype: str, fields: Mapping[str, object] | None = None) -> None:
        self.folder = make_tiny(family, folder / family, fields=fields)
        self.model, self.spec = load_tiny(self.folder, dtype)
        self._answers: dict[tuple[tuple[int, ...], ...], tuple[Verification, list[torch.Tensor]]] = {}

    def run(self, config: EngineConfig, max_new_tokens: int = MAX_NEW_TOKENS) -> ParityRun:
        """Generate all prompts at once and compare tokens and logits with Hugging Face's, one prompt at a time.

        With `preempt_every=1` sequences are preempted at random steps.
        """
        engine = Engine(self.model, self.spec, None, config)
        if config.preempt_every == 1:
            preempt_at_random(engine, seed=0)
        params = SamplingParams(max_new_tokens=max_new_tokens)
        with recorded_samples(engine) as ours:
            outputs = [completion.token_ids for completion in engine.generate(random_prompts(), params)]
        engine.manager.check()
        assert engine.manager.pool.num_held.sum() == 0
        key = tuple(map(tuple, outputs))
        if key not in self._answers:
            self._answers[key] = self._verify(outputs, max_new_tokens)
        verification, theirs = self._answers[key]
        difference = float("inf")
        if verification.equal:
            in_order = [ours[key] for key in sorted(ours)]
            difference = float((torch.stack(in_order) - torch.stack(theirs)).abs().max())
        return ParityRun(outputs, engine.stats, verification, difference)

    def _verify(self, outputs: list[list[int]], max_new_tokens: int) -> tuple[Verification, list[torch.Tensor]]:
        with recorded_forwards(self.model) as logits:
            rules = StopRules([max_new_tokens] * len(outputs))
            verification = verify_greedy(self.model, random_prompts(), outputs, rules)
        return verification, logits


def run_parity(
    family: str,
    folder: Path,
    dtype: str,
    config: EngineConfig,
    fields: Mapping[str, object] | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> ParityRun:
    """Make a tiny checkpoint and run it once; see `TinyFamily`."""
    return TinyFamily(family, folder, dtype, fields).run(config, max_new_tokens)


@contextmanager
def recorded_samples(engine: Engine) -> Iterator[dict[tuple[int, int], torch.Tensor]]:
    """Yield the logits `[vocab_size]` that each token is sampled from, by request and sequence length."""
    logits: dict[tuple[int, int], torch.Tensor] = {}
    sample = engine.sampler.sample

    def recording_sample(rows, sequences):
        for row, sequence in zip(rows, sequences, strict=True):
            logits[sequence.request_idx, sequence.num_tokens] = row.float().clone()
        return sample(rows, sequences)

    engine.sampler.sample = recording_sample
    yield logits
    engine.sampler.sample = sample


@contextmanager
def recorded_forwards(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Yield the logits `[vocab_size]` of the last token of every forward."""
    logits: list[torch.Tensor] = []
    hook = model.register_forward_hook(lambda _model, _args, output: logits.append(output.logits[0, -1].float()))
    yield logits
    hook.remove()
