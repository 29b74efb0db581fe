"""Sequences that share a past: several completions of a prompt, and beams."""

from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from hybridkv import InvalidRequest
from hybridkv.runner import BeamParams, SamplingParams
from hybridkv.runner.tiny import FAMILIES
from tests.run.live_engines import (
    SAMPLE_FAMILIES,
    assert_hugging_face_generates,
    generate,
    make_engine,
    make_prompts,
    null_blocks_are_zero,
    poison_free_blocks,
    steady_model,
)

REST = [family for family in FAMILIES if family not in SAMPLE_FAMILIES]
EACH_FAMILY = [*SAMPLE_FAMILIES, *(pytest.param(family, marks=pytest.mark.full) for family in REST)]
# transformers keeps RecurrentGemma's states on its modules and MiniMax's in a cache that cannot be reordered.
NO_BEAMS = ("recurrent_gemma", "minimax")
SAMPLED = SamplingParams(max_new_tokens=8, temperature=1.0, top_k=20, seed=5)


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_four_completions_compute_the_prompt_once(family):
    """Each of four completions is what its seed gives alone, and the prompt went through the model once."""
    model, (prompt,) = steady_model(family), make_prompts((29,))
    engine = make_engine(family, model)
    four = engine.generate([prompt], replace(SAMPLED, n=4))
    assert engine.stats.num_computed_tokens == len(prompt) + 4 * (SAMPLED.max_new_tokens - 1)
    engine.manager.check()
    alone = [
        make_engine(family, model).generate([prompt], replace(SAMPLED, seed=SAMPLED.seed + choice))[0].token_ids
        for choice in range(4)
    ]
    assert [c.token_ids for c in four] == alone
    assert [c.choice_idx for c in four] == [0, 1, 2, 3]
    assert len({*map(tuple, alone)}) > 1


@pytest.mark.parametrize("family", SAMPLE_FAMILIES)
def test_forked_rows_write_into_no_blocks_of_each_other(family):
    """Greedy completions of two prompts, four of each, all equal Hugging Face's, whatever lies in free memory."""
    model, prompts = steady_model(family), make_prompts((29, 18))
    engine = make_engine(family, model, max_num_seqs=8, preempt_every=5)
    params = SamplingParams(max_new_tokens=10, n=4)
    completions = engine.generate(prompts, params, on_step=lambda _stats: poison_free_blocks(engine))
    outputs = [c.token_ids for c in completions]
    assert outputs[:4] == [outputs[0]] * 4
    assert outputs[4:] == [outputs[4]] * 4
    assert_hugging_face_generates(model, prompts, [outputs[0], outputs[4]])
    assert engine.stats.num_preemptions > 0
    assert null_blocks_are_zero(engine)
    engine.manager.check()


@pytest.mark.parametrize("config", [{"max_num_seqs": 2}, {"max_num_seqs": 2, "prefix_caching": False}])
def test_completions_without_a_row_wait_for_one(config):
    """Five completions through two rows give what five seeds give, with or without a prefix cache."""
    model, (prompt,) = steady_model("bamba"), make_prompts((29,))
    engine = make_engine("bamba", model, **config)
    five = engine.generate([prompt], replace(SAMPLED, n=5))
    alone = [generate_one(model, prompt, SAMPLED.seed + choice) for choice in range(5)]
    assert [c.token_ids for c in five] == alone
    engine.manager.check()


def generate_one(model, prompt, seed):
    return make_engine("bamba", model).generate([prompt], replace(SAMPLED, seed=seed))[0].token_ids


@torch.inference_mode()
def _their_beams(model, prompt, params):
    """Return Hugging Face's new tokens of every beam and the scores."""
    model.set_attn_implementation("eager")
    stop = sorted(params.stop_token_ids)
    config = GenerationConfig(
        num_beams=params.num_beams,
        num_return_sequences=params.num_beams,
        max_new_tokens=params.max_new_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        eos_token_id=stop or None,
        pad_token_id=stop[0] if stop else 0,
    )
    input_ids = torch.tensor([prompt])
    result = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
    beams = []
    for row in result.sequences[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in params.stop_token_ids), len(row))
        beams.append(row[:end])
    return beams, result.sequences_scores.tolist()


def check_beams(engine, model, prompt, params):
    """Check tokens, order and scores of an engine's beams; return them."""
    ours = engine.beam_search(prompt, params)
    engine.manager.check()
    assert engine.manager.pool.num_held.sum() == 0
    beams, scores = _their_beams(model, prompt, params)
    assert [beam.token_ids for beam in ours] == beams
    assert [beam.score for beam in ours] == pytest.approx(scores, abs=1e-4)
    return beams


@pytest.mark.parametrize("family", [family for family in EACH_FAMILY if family not in NO_BEAMS])
def test_beam_search_finds_hugging_faces_beams(family):
    """Eight beams over 12 tokens are Hugging Face's, in its order, with its scores."""
    model, (prompt,) = steady_model(family), make_prompts((37,))
    engine = make_engine(family, model, max_num_seqs=8)
    params = BeamParams(num_beams=8, max_new_tokens=12)
    beams = check_beams(engine, model, prompt, params)
    assert len({*map(tuple, beams)}) == 8


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -0.5, 2.0])
@pytest.mark.parametrize("num_stop", [1, 40])
def test_beams_end_where_hugging_faces_end(early_stopping, length_penalty, num_stop):
    """With stop tokens, every rule for stopping and every length penalty gives Hugging Face's beams."""
    model, (prompt, stop) = steady_model("gemma3_text"), make_prompts((21, num_stop))
    engine = make_engine("gemma3_text", model, max_num_seqs=8)
    (plain,) = generate(engine, [prompt], 4)
    stops = frozenset([*stop, plain[-1]])
    params = BeamParams(4, 14, length_penalty, early_stopping, stops)
    check_beams(engine, model, prompt, params)


@pytest.mark.parametrize("family", ["bamba", "gemma3_text"])
def test_beams_share_what_they_have_in_common(family):
    """Four beams of a long prompt hold the prompt's whole blocks once, and the next search hits the prompt."""
    model, (prompt,) = steady_model(family), make_prompts((64,))
    engine = make_engine(family, model)
    first = engine.beam_search(prompt, BeamParams(4, 8))
    full = next(g for g, group in enumerate(engine.plan.groups) if group.group.lifecycle.kind == "full_attention")
    assert engine.stats.groups[full].peak_blocks <= 64 // 4 + 4 * 3 + 4
    before = engine.stats.num_computed_tokens
    assert [beam.token_ids for beam in engine.beam_search(prompt, BeamParams(4, 8))] == [b.token_ids for b in first]
    assert engine.stats.num_computed_tokens - before <= 8 + 4 * 7


def test_too_many_beams_are_refused():
    """More beams than rows are refused with the number that would do."""
    engine = make_engine("llama", max_num_seqs=4)
    with pytest.raises(InvalidRequest, match="at most 4"):
        engine.beam_search([1, 2, 3], BeamParams(num_beams=5))
    engine.add([1, 2], SamplingParams(max_new_tokens=2))
    with pytest.raises(InvalidRequest, match="unfinished"):
        engine.beam_search([1, 2, 3], BeamParams(num_beams=2))


def test_a_failed_beam_search_leaves_an_engine_that_works(monkeypatch):
    """After a forward that failed, every row is free and the next search gives Hugging Face's beams."""
    model, (prompt,) = steady_model("bamba"), make_prompts((21,))
    engine = make_engine("bamba", model)
    forward, num_calls = engine.model.forward, 0

    def failing(*args):
        nonlocal num_calls
        num_calls += 1
        logits = forward(*args)
        if num_calls == 5:
            raise RuntimeError("out of memory")
        return logits

    monkeypatch.setattr(engine.model, "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.beam_search(prompt, BeamParams(4, 8))
    engine.manager.check()
    assert engine.manager.num_free_rows == 6
    check_beams(engine, model, prompt, BeamParams(4, 8))
