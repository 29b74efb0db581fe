"""The paged run equals Hugging Face's own generation, for every attention-only family."""

import pytest

from hybridkv.runner import EngineConfig
from tests.run.parity import PROMPT_LENGTHS, run_parity
from tests.run.tiny_models import FAMILIES, WINDOWED_FAMILIES

MEMORY = 2**22
BUDGETS = (1, 7, 16, 64)
WINDOWS = (8, 12, 17, 24)
FP32_TOLERANCE = (
    5e-3  # logits reach 20; both sides differ in the order of additions only, which sharp softmaxes amplify
)
# In units of what bfloat16 itself changes in Hugging Face's logits: both sides round, each in its own order.
BF16_TOLERANCE = 2.0
# With every expert active a rounding error cannot change the route, which would change the logits at will.
ALL_EXPERTS = {
    "dots1": {"num_experts_per_tok": 4},
    "gpt_oss": {"num_experts_per_tok": 4},
    "minimax_m2": {"num_experts_per_tok": 4},
    "mixtral": {"num_experts_per_tok": 4},
    "qwen2_moe": {"num_experts_per_tok": 4},
    "qwen3_moe": {"num_experts_per_tok": 4},
}
# Its router takes exactly two experts and masks by a threshold, so it always can flip: tokens and logits in fp32 only.
NOT_IN_BF16 = ("phimoe",)


def _window(family):
    """Return the family's window; several sizes are covered."""
    return WINDOWS[FAMILIES.index(family) % len(WINDOWS)]


def _fields(family):
    return {"sliding_window": _window(family)} if family in WINDOWED_FAMILIES else {}


def _check_fp32(family, folder, config):
    run = run_parity(family, folder, "float32", config, fields=_fields(family))
    assert run.verification.equal, run.verification.first_difference
    assert run.max_logit_difference < FP32_TOLERANCE
    assert len({tuple(output) for output in run.outputs}) == len(run.outputs)
    for group in run.stats.groups:
        if group.lifecycle == "sliding_window":
            scheduled = min(config.max_num_batched_tokens, max(PROMPT_LENGTHS))
            window = _window(family)
            assert group.num_blocks_freed_out_of_window >= 8 * (window // group.block_size)
            assert group.peak_blocks_per_row <= -(-(window - 1 + scheduled) // group.block_size) + 1
    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_generates_what_hugging_face_generates(family, tmp_path):
    """Eight uneven prompts at once, in chunks of 16 tokens with forced preemptions, give Hugging Face's tokens."""
    config = EngineConfig(MEMORY, block_size=4, max_num_batched_tokens=16, preempt_every=9)
    run = _check_fp32(family, tmp_path, config)
    assert run.stats.num_preemptions >= 3


@pytest.mark.full
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_budget_and_block_size_generates_the_same(family, block_size, budget, tmp_path):
    """Any token budget, even one token a step, and a block size that divides nothing give Hugging Face's tokens."""
    _check_fp32(family, tmp_path, EngineConfig(MEMORY, block_size=block_size, max_num_batched_tokens=budget))


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "cohere2"])
def test_bf16_logits_stay_within_tolerance(family, tmp_path):
    """In bfloat16 the logits differ by rounding only."""
    _check_bf16(family, tmp_path, EngineConfig(MEMORY, block_size=4, max_num_batched_tokens=16, preempt_every=9))


@pytest.mark.full
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_IN_BF16])
def test_every_family_stays_within_tolerance_in_bf16(family, budget, tmp_path):
    """In bfloat16 the logits of every family differ by rounding only, whatever the budget."""
    _check_bf16(family, tmp_path, EngineConfig(MEMORY, block_size=4, max_num_batched_tokens=budget))


def _check_bf16(family, folder, config):
    run = run_parity(family, folder, "bfloat16", config, fields=_fields(family) | ALL_EXPERTS.get(family, {}))
    difference = run.verification.first_difference
    assert run.max_logit_difference < BF16_TOLERANCE * run.rounding
    assert difference is None or difference.gap < BF16_TOLERANCE * run.rounding


@pytest.mark.parametrize("layout", ["slab", "contiguous"])
def test_memory_that_runs_out_preempts_and_changes_nothing(layout, tmp_path):
    """With too little memory for all eight sequences the youngest are preempted, in either layout, without a trace."""
    config = EngineConfig(200_000, block_size=4, max_num_batched_tokens=32, layout=layout)
    run = run_parity("gemma3_text", tmp_path, "float32", config)
    assert run.verification.equal
    assert run.stats.num_preemptions >= 3
    assert run.max_logit_difference < FP32_TOLERANCE
