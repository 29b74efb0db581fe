"""Engines on tiny models whose memory tests look into."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from hybridkv.batch import BatchGeometry
from hybridkv.hf_config import CacheOptions, model_spec_from_config
from hybridkv.runner import Engine, EngineConfig, SamplingParams
from hybridkv.runner.caches import ForwardStep
from hybridkv.runner.sequence import Sequence as Request
from hybridkv.runner.tiny import tiny_model
from hybridkv.runner.tiny_configs import TINY_CONFIGS, VOCAB_SIZE
from hybridkv.specs import ModelSpec

FLOAT32 = CacheOptions(kv_dtype="float32", conv_dtype="float32")
POISON = 0xFF  # as bytes of a float of any size: NaN


def tiny_spec(family: str) -> ModelSpec:
    """Return what a tiny model keeps."""
    return model_spec_from_config(TINY_CONFIGS[family], name=family, options=FLOAT32)


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
    """Fill all bytes but those of held blocks and of the null blocks with NaN; return how many."""
    free = torch.ones(engine.plan.arena_bytes, dtype=torch.bool)
    free[: engine.plan.slab_bytes] = False
    for group, counts in zip(engine.plan.groups, engine.manager.pool.ref_counts, strict=True):
        for block in np.flatnonzero(counts).tolist():
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
    step = engine.model.begin(engine._group_batches(tables_step), [s.num_prompt_tokens for s in running])
    ids = [int(sequence.tokens[sequence.num_tokens - 1]) for sequence in running]
    return torch.tensor(ids + [0] * num_padded), tables_step.geometry, step
