"""The paged run equals Hugging Face's own generation, for every family."""

from itertools import cycle

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridkv.runner import EngineConfig, SamplingParams
from hybridkv.runner.tiny import FAMILIES, make_tiny
from hybridkv.runner.verify import Oracle, StopRules, verify_greedy
from tests.run.live_engines import ALL_EXPERTS
from tests.run.parity import (
    BUDGETS,
    LOGIT_TOLERANCE,
    MAX_NEW_TOKENS,
    MEMORY,
    PROMPT_LENGTHS,
    logit_tolerance,
    random_prompts,
    recorded_samples,
    run_parity,
    tiny_engine,
    windowed,
)

# In units of what bfloat16 itself changes in Hugging Face's logits: both sides round, each in its own order.
BF16_TOLERANCE = 2.0
# Its router takes exactly two experts and masks by a threshold, so it always can flip: tokens and logits in fp32 only.
NOT_IN_BF16 = ("phimoe",)
# One budget a family; a token a step, the slowest, has a test of its own.
SAMPLE = list(zip(FAMILIES, cycle((64, 16, 64, 7, 64)), strict=False))
# One family of each recurrence, those with a limit on the time step, and one of latents.
ONE_TOKEN_A_STEP = ("falcon_mamba", "nemotron_h", "olmo_hybrid", "kimi_linear", "lfm2", "recurrent_gemma", "minimax")


def _check_fp32(family, folder, config, max_new_tokens=MAX_NEW_TOKENS):
    run = run_parity(family, folder, "float32", config, windowed(family), max_new_tokens)
    assert run.verification.equal, run.verification.first_difference
    assert run.max_logit_difference < logit_tolerance(family)
    assert len({tuple(output) for output in run.outputs}) == len(run.outputs)
    assert len({token for output in run.outputs for token in output}) > len(run.outputs)
    (window,) = windowed(family).values() or (None,)
    for group in run.stats.groups:
        if group.lifecycle == "sliding_window":
            scheduled = min(config.max_num_batched_tokens, max(PROMPT_LENGTHS))
            lengths = [length + max_new_tokens - 1 for length in PROMPT_LENGTHS]
            freed = sum(max(0, (length - window) // group.block_size) for length in lengths)
            assert group.num_blocks_freed_out_of_window >= freed
            assert group.peak_blocks_per_row <= -(-(window - 1 + scheduled) // group.block_size) + 1
    return run


@pytest.mark.parametrize(("family", "budget"), SAMPLE)
def test_a_family_generates_what_hugging_face_generates(family, budget, tmp_path):
    """Eight uneven prompts at once, in chunks, preempted at random steps, give Hugging Face's tokens and logits."""
    config = EngineConfig(MEMORY, block_size=4, max_num_batched_tokens=budget, preempt_every=1)
    run = _check_fp32(family, tmp_path, config, max_new_tokens=12)
    assert run.stats.num_preemptions >= 3


@pytest.mark.parametrize("family", ONE_TOKEN_A_STEP)
def test_prompts_of_one_token_a_step_generate_the_same(family, tmp_path):
    """A budget of one token, which makes every chunk of a prompt look like a decode, gives Hugging Face's tokens."""
    config = EngineConfig(MEMORY, block_size=4, max_num_batched_tokens=1)
    model, engine = tiny_engine(make_tiny(family, tmp_path), "float32", config)
    prompts = random_prompts()[:4]
    outputs = [o.token_ids for o in engine.generate(prompts, SamplingParams(max_new_tokens=6))]
    verification = verify_greedy(model, prompts, outputs, StopRules([6] * len(prompts)))
    assert verification.equal, verification.first_difference


@pytest.mark.full
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("block_size", "preempt_every"), [(3, 1), (16, 0)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_budget_and_block_size_generates_the_same(family, block_size, budget, preempt_every, tmp_path):
    """Any token budget, even one token a step, a block size that divides nothing, any preemption change no token."""
    config = EngineConfig(MEMORY, block_size=block_size, max_num_batched_tokens=budget, preempt_every=preempt_every)
    run = _check_fp32(family, tmp_path, config)
    assert (run.stats.num_preemptions > 0) == bool(preempt_every)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "cohere2", "bamba", "qwen3_5_text"])
def test_bf16_logits_stay_within_tolerance(family, tmp_path):
    """In bfloat16 the logits differ by rounding only."""
    _check_bf16(family, tmp_path, EngineConfig(MEMORY, block_size=4, max_num_batched_tokens=16, preempt_every=9))


@pytest.mark.full
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("family", sorted(set(FAMILIES).difference(NOT_IN_BF16)))
def test_every_family_stays_within_tolerance_in_bf16(family, budget, tmp_path):
    """In bfloat16 the logits of every family differ by rounding only, whatever the budget."""
    _check_bf16(family, tmp_path, EngineConfig(MEMORY, block_size=4, max_num_batched_tokens=budget))


def _check_bf16(family, folder, config):
    make_tiny(family, folder / family, fields=windowed(family) | ALL_EXPERTS.get(family, {}))
    model, engine = tiny_engine(folder / family, "bfloat16", config)
    exact = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32)
    prompts = random_prompts()
    with recorded_samples(engine) as ours:
        outputs = [o.token_ids for o in engine.generate(prompts, SamplingParams(max_new_tokens=16))]
    first = verify_greedy(model, prompts, outputs, StopRules([16] * len(prompts))).first_difference
    difference = rounding = 0.0
    for request, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        theirs = _their_logits(model, prompt, output)
        mine = torch.stack([ours[request, len(prompt) + n] for n in range(len(output))])
        difference = max(difference, float((mine - theirs).abs().max()))
        rounding = max(rounding, float((theirs - _their_logits(exact, prompt, output)).abs().max()))
    assert difference < BF16_TOLERANCE * rounding
    assert first is None or first.gap < BF16_TOLERANCE * rounding


@torch.inference_mode()
def _their_logits(model, prompt, output):
    """Logits that chose each output token, from Hugging Face's one-shot prefill and then a step a token."""
    model.set_attn_implementation("eager")
    oracle = Oracle(model)
    return torch.stack([oracle.logits(token_ids) for token_ids in (prompt, *([token] for token in output[:-1]))])


@pytest.mark.parametrize(("family", "memory"), [("gemma3_text", 168_000), ("bamba", 300_000)])
@pytest.mark.parametrize("layout", ["slab", "contiguous"])
def test_memory_that_runs_out_preempts_and_changes_nothing(family, memory, layout, tmp_path):
    """With too little memory for all eight sequences the youngest are preempted, in either layout, without a trace."""
    config = EngineConfig(memory, block_size=4, max_num_batched_tokens=32, layout=layout)
    run = run_parity(family, tmp_path, "float32", config)
    assert run.verification.equal
    assert run.stats.num_preemptions >= 1
    assert run.max_logit_difference < LOGIT_TOLERANCE
