"""Engines on tiny models whose memory tests look into."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from hybridkv.batch import BatchGeometry
from hybridkv.hf_config import CacheOptions, model_spec_from_config
from hybridkv.runner import Completion, Engine, EngineConfig, SamplingParams
from hybridkv.runner.caches import ForwardStep
from hybridkv.runner.sequence import Sequence as Request
from hybridkv.runner.tiny import tiny_model
from hybridkv.runner.tiny_configs import TINY_CONFIGS, VOCAB_SIZE
from hybridkv.runner.verify import StopRules, verify_greedy
from hybridkv.specs import ModelSpec
from tests.run.parity import logit_tolerance, recorded_forwards, recorded_samples

FLOAT32 = CacheOptions(kv_dtype="float32", conv_dtype="float32")
# One family of each recurrence, then of each way to attend: windows, chunks, latents, sinks, shared pages, plain.
SAMPLE_FAMILIES = (
    "bamba",
    "falcon_mamba",
    "qwen3_5_text",
    "kimi_linear",
    "lfm2",
    "recurrent_gemma",
    "minimax",
    "gemma3_text",
    "llama4_text",
    "deepseek_v3",
    "gpt_oss",
    "gemma4_text-shared",
    "llama",
)
# With every expert active a rounding error cannot change the route, which would change the logits at will.
ALL_EXPERTS = {
    family: {"num_experts_per_tok": 4}
    for family in ("dots1", "gpt_oss", "minimax", "minimax_m2", "mixtral", "qwen2_moe", "qwen3_moe")
}
POISON = 0xFF  # as bytes of a float of any size: NaN


def tiny_spec(family: str) -> ModelSpec:
    """Return what a tiny model keeps."""
    return model_spec_from_config(TINY_CONFIGS[family], name=family, options=FLOAT32)


def steady_model(family: str) -> PreTrainedModel:
    """Return a tiny model that computes a token alike in any chunk, as part of a prompt and behind it.

    transformers limits the time steps of a prompt but not of generated tokens, so what was generated and comes back in
    a prompt would count as something else there.
    """
    model = tiny_model(family, fields=ALL_EXPERTS.get(family))
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
        if hasattr(module, "time_step_min"):
            module.time_step_min, module.time_step_max = 0.0, float("inf")
    return model


def make_engine(
    family: str, model: PreTrainedModel | None = None, *, spec: ModelSpec | None = None, **config: object
) -> Engine:
    """Return an engine with small blocks on a model, a new tiny one by default."""
    defaults = {"memory_bytes": 2**22, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 16}
    sizes = EngineConfig(**(defaults | {"max_model_len": 256} | config))
    return Engine(tiny_model(family) if model is None else model, spec or tiny_spec(family), None, sizes)


def make_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


def generate(engine: Engine, prompts: Sequence[Sequence[int]], num_new: int = 10, on_step=None) -> list[list[int]]:
    """Return the tokens generated after each prompt."""
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=num_new), on_step=on_step)
    return [completion.token_ids for completion in completions]


def start(engine: Engine, prompts: Sequence[Sequence[int]], num_steps: int) -> None:
    """Bring sequences into the engine and take some steps, which leave every one of them decoding."""
    for idx, prompt in enumerate(prompts):
        params = SamplingParams(max_new_tokens=100)
        engine.scheduler.add(Request.create(idx, prompt, params, engine.plan.limits.max_model_len))
    for _ in range(num_steps):
        engine.step()
    assert all(sequence.is_decoding for sequence in engine.scheduler.running)
    assert len(engine.scheduler.running) == len(prompts)


def poison_free_blocks(engine: Engine) -> int:
    """Fill all bytes but those of held and cached blocks and of the null blocks with NaN; return how many."""
    free = torch.ones(engine.plan.arena_bytes, dtype=torch.bool)
    free[: engine.plan.slab_bytes] = False
    pool = engine.manager.pool
    for group, offset in zip(engine.plan.groups, pool.offsets.tolist(), strict=True):
        blocks = slice(offset, offset + group.num_blocks)
        for block in np.flatnonzero(pool.holders[blocks] + pool.cached[blocks]).tolist():
            free[block * group.block_stride_bytes : (block + 1) * group.block_stride_bytes] = False
    engine.arena._bytes[free] = POISON
    return int(free.sum())


def null_blocks_are_zero(engine: Engine) -> bool:
    """Whether the reserved slab still holds zeros only."""
    return not engine.arena._bytes[: engine.plan.slab_bytes].any()


def begin_decode(engine: Engine, num_padded: int) -> tuple[torch.Tensor, BatchGeometry, ForwardStep]:
    """Prepare a decode of every running sequence, with that many rows and tokens of padding behind.

    The engine's blocks must have room for one token more.
    """
    running = engine.scheduler.running
    rows = [sequence.row for sequence in running]
    tables_step = engine.tables.step(
        rows,
        [1] * len(rows),
        engine.manager.num_computed_tokens[rows],
        num_reqs_padded=len(rows) + num_padded,
        num_tokens_padded=len(rows) + num_padded,
    )
    step = engine.model.begin(engine.passes.group_batches(tables_step), [s.num_prompt_tokens for s in running])
    ids = [int(sequence.tokens[sequence.num_tokens - 1]) for sequence in running]
    return torch.tensor(ids + [0] * num_padded), tables_step.geometry, step


def generate_recorded(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, on_step=None
) -> tuple[list[Completion], list[torch.Tensor]]:
    """Return the completions, and of each prompt the logits `[num_new, vocab_size]` that they were sampled from."""
    with recorded_samples(engine) as logits:
        completions = engine.generate(prompts, params, on_step=on_step)
    requests = sorted({request for request, _ in logits})
    return completions, [torch.stack([logits[key] for key in sorted(logits) if key[0] == r]) for r in requests]


def assert_hugging_face_generates(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    logits: Sequence[torch.Tensor] | None = None,
) -> None:
    """Check that Hugging Face's own greedy generation gives these outputs, ties aside, and nearly these logits."""
    rules = StopRules([len(output) for output in outputs])
    with recorded_forwards(model) as theirs:
        verification = verify_greedy(model, prompts, outputs, rules)
    assert verification.equal, verification.first_difference
    if logits is not None:
        difference = float((torch.cat(list(logits)) - torch.stack(theirs)).abs().max())
        assert difference < logit_tolerance(model.config.model_type)
