"""One parity run: a tiny checkpoint through the engine, then through Hugging Face."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hybridkv.hf_config import CacheOptions, model_spec_from_config, read_config
from hybridkv.runner import Engine, EngineConfig, EngineStats, SamplingParams
from hybridkv.runner.verify import StopRules, Verification, verify_greedy
from tests.run.tiny_models import VOCAB_SIZE, make_tiny

PROMPT_LENGTHS = (3, 5, 11, 17, 24, 40, 61, 90)
MAX_NEW_TOKENS = 32


@dataclass
class ParityRun:
    """What both sides made of the same prompts."""

    outputs: list[list[int]]
    stats: EngineStats
    verification: Verification
    max_logit_difference: float
    rounding: float  # what the dtype alone changes in Hugging Face's logits, against float32


def tiny_engine(folder: Path, dtype: str, config: EngineConfig, backend=None) -> tuple[torch.nn.Module, Engine]:
    """Load a tiny checkpoint and build an engine on it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    options = CacheOptions(kv_dtype=dtype)
    spec = model_spec_from_config(read_config(folder), name=folder.name, options=options)
    return model, Engine(model, spec, None, config, backend)


def run_parity(family: str, folder: Path, dtype: str, config: EngineConfig, **fields: object) -> ParityRun:
    """Generate 8 uneven prompts at once and compare tokens and logits with Hugging Face's, one prompt at a time."""
    model, engine = tiny_engine(make_tiny(family, folder / family, **fields), dtype, config)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in PROMPT_LENGTHS]
    logits: dict[tuple[int, int], torch.Tensor] = {}
    sample = engine.sampler.sample

    def recording_sample(rows, sequences):
        for row, sequence in zip(rows, sequences, strict=True):
            logits[sequence.request_idx, sequence.num_tokens] = row.float().clone()
        return sample(rows, sequences)

    engine.sampler.sample = recording_sample
    outputs = [o.token_ids for o in engine.generate(prompts, SamplingParams(max_new_tokens=MAX_NEW_TOKENS))]
    verification = verify_greedy(model, prompts, outputs, StopRules([MAX_NEW_TOKENS] * len(prompts)))
    exact = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32)
    difference = rounding = 0.0
    for request, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        theirs = _plain_logits(model, prompt, output)
        ours = torch.stack([logits[request, len(prompt) + n] for n in range(len(output))])
        difference = max(difference, float((ours - theirs).abs().max()))
        rounding = max(rounding, float((theirs - _plain_logits(exact, prompt, output)).abs().max()))
    engine.manager.check()
    assert engine.manager.pool.num_held.sum() == 0
    return ParityRun(outputs, engine.stats, verification, difference, rounding)


@torch.inference_mode()
def _plain_logits(model, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Logits that chose each output token, from one plain forward pass over prompt and output."""
    model.set_attn_implementation("eager")
    result = model(input_ids=torch.tensor([prompt + output[:-1]]), use_cache=False)
    return result.logits[0, len(prompt) - 1 :].float()
