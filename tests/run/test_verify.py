"""Claims about the comparison with Hugging Face's generation."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridkv.errors import InvalidRequest
from hybridkv.runner.tiny import make_tiny
from hybridkv.runner.tiny_configs import VOCAB_SIZE
from hybridkv.runner.verify import (
    Difference,
    StopRules,
    Tie,
    Verification,
    default_tie_gap,
    verify_greedy,
)

NUM_NEW = 10
PROMPTS = [list(range(3, 23)), [7, 99, 41]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load("mistral", tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def outputs(model: PreTrainedModel) -> list[list[int]]:
    return [hf_greedy(model, prompt) for prompt in PROMPTS]


def load(family: str, folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(make_tiny(family, folder), dtype=torch.float32)


def hf_greedy(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False)
    return out[0, len(prompt) :].tolist()


def verify(model: PreTrainedModel, outputs: Sequence[Sequence[int]], eos: frozenset[int] = frozenset()) -> Verification:
    return verify_greedy(model, PROMPTS, outputs, StopRules([NUM_NEW] * len(PROMPTS), eos))


def test_own_generation_is_equal(model: PreTrainedModel, outputs: list[list[int]]) -> None:
    """What Hugging Face's generate gives is equal, without ties, with every token reported to the progress callback."""
    seen: list[tuple[int, int]] = []
    rules = StopRules([NUM_NEW] * len(PROMPTS))
    result = verify_greedy(model, PROMPTS, outputs, rules, lambda done, total: seen.append((done, total)))
    assert result == Verification(None, [])
    assert result.equal
    assert seen == [(i, 20) for i in range(1, 21)]


def test_one_changed_token_is_found(model: PreTrainedModel, outputs: list[list[int]]) -> None:
    """A changed token is the first difference, with both tokens and their gap, whatever follows it."""
    changed = [outputs[0], outputs[1].copy()]
    changed[1][4] = (outputs[1][4] + 1) % VOCAB_SIZE
    first = verify(model, changed).first_difference
    assert first is not None
    assert (first.prompt_idx, first.token_idx) == (1, 4)
    assert (first.expected, first.got) == (outputs[1][4], changed[1][4])
    assert first.gap is not None
    assert first.gap > 1e-4


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, -1])
def test_token_outside_the_vocabulary_is_a_difference(
    model: PreTrainedModel, outputs: list[list[int]], token_id: int
) -> None:
    """A token id no logit belongs to is a difference without a gap."""
    first = verify(model, [outputs[0], [*outputs[1][:-1], token_id]]).first_difference
    assert first == Difference(1, NUM_NEW - 1, outputs[1][-1], token_id, None)


def test_truncated_output_is_found(model: PreTrainedModel, outputs: list[list[int]]) -> None:
    """An output that ends before Hugging Face's differs where it ends."""
    first = verify(model, [outputs[0][:6], outputs[1]]).first_difference
    assert first == Difference(0, 6, outputs[0][6], None, None)


def test_empty_output_is_found(model: PreTrainedModel, outputs: list[list[int]]) -> None:
    """An output without a token differs at its first token."""
    assert verify(model, [[], outputs[1]]).first_difference == Difference(0, 0, outputs[0][0], None, None)


def test_overlong_output_is_found(model: PreTrainedModel, outputs: list[list[int]]) -> None:
    """An output that passes max_new_tokens differs at the first token too many."""
    first = verify(model, [[*outputs[0], 5], outputs[1]]).first_difference
    assert first == Difference(0, NUM_NEW, None, 5, None)


def test_output_must_end_at_an_end_token(model: PreTrainedModel, outputs: list[list[int]]) -> None:
    """An output that runs on after an end token differs there; one that ends with it is equal."""
    eos = frozenset({outputs[0][3]})
    end = outputs[0].index(outputs[0][3]) + 1
    cut = outputs[1][: outputs[1].index(outputs[0][3]) + 1] if outputs[0][3] in outputs[1] else outputs[1]
    assert verify(model, [outputs[0][:end], cut], eos).equal
    first = verify(model, [outputs[0], cut], eos).first_difference
    assert first == Difference(0, end, None, outputs[0][end], None)


def test_stop_rule_of_the_caller_ends_an_output(model: PreTrainedModel, outputs: list[list[int]]) -> None:
    """An output ends where the caller's rule says, such as at a stop text."""
    rules = StopRules([NUM_NEW] * len(PROMPTS), ends=lambda token_ids: len(token_ids) == 4)
    assert verify_greedy(model, PROMPTS, [output[:4] for output in outputs], rules).equal
    assert not verify_greedy(model, PROMPTS, outputs, rules).equal


def test_tie_is_accepted_once_the_logits_agree(tmp_path: Path) -> None:
    """With two tokens of equal logits, the one Hugging Face does not take is a tie, from which it goes on."""
    model = load("llama", tmp_path)
    prompt = PROMPTS[1]
    best = hf_greedy(model, prompt)[0]
    twin = (best + 1) % VOCAB_SIZE
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[best]
    taken = hf_greedy(model, prompt)[0]
    other = best + twin - taken
    output = [other, *hf_greedy(model, [*prompt, other])[: NUM_NEW - 1]]
    result = verify_greedy(model, [prompt], [output], StopRules([NUM_NEW]))
    assert result.equal
    assert (result.ties[0].prompt_idx, result.ties[0].token_idx) == (0, 0)
    assert abs(result.ties[0].gap) < 1e-4
    third = next(token_id for token_id in range(VOCAB_SIZE) if token_id not in (best, twin))
    assert not verify_greedy(model, [prompt], [[third, *output[1:]]], StopRules([NUM_NEW])).equal


def test_the_caller_may_widen_the_tie_rule(model: PreTrainedModel, outputs: list[list[int]]) -> None:
    """A token is a tie below the gap that the caller gives, a difference at it; Qwen3-Next's own is ten times wider."""
    output = [*outputs[1][:-1], (outputs[1][-1] + 1) % VOCAB_SIZE]
    rules = StopRules([NUM_NEW])
    gap = verify_greedy(model, PROMPTS[1:], [output], rules).first_difference.gap
    result = verify_greedy(model, PROMPTS[1:], [output], rules, tie_gap=gap + 1e-3)
    assert (result.equal, result.ties) == (True, [Tie(0, NUM_NEW - 1, gap)])
    assert not verify_greedy(model, PROMPTS[1:], [output], rules, tie_gap=gap).equal
    assert [default_tie_gap(name) for name in ("llama", "bamba", "qwen3_next", "qwen3_5_text")] == [1e-4] * 2 + [
        1e-3
    ] * 2


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_attention_is_switched_back(tmp_path: Path, family: str) -> None:
    """The model keeps its attention implementation, also where SDPA is refused."""
    model = load(family, tmp_path)
    model.set_attn_implementation("eager")
    output = hf_greedy(model, PROMPTS[0])
    assert verify_greedy(model, PROMPTS[:1], [output], StopRules([NUM_NEW])).equal
    assert model.config._attn_implementation == "eager"


def test_lists_of_other_lengths_are_refused(model: PreTrainedModel, outputs: list[list[int]]) -> None:
    """Every prompt needs an output."""
    with pytest.raises(InvalidRequest, match="1 and 2 lengths for 2 prompts"):
        verify(model, outputs[:1])


def test_the_tie_rule_is_one_ten_thousandth() -> None:
    """Two logits count as a tie below 1e-4 and not at it."""
    from hybridkv.runner import verify

    assert verify.TIE_GAP == 1e-4
