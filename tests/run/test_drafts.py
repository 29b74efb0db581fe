"""Draft tokens that are verified several in a step change no token."""

import random

import numpy as np
import pytest

from hybridkv.runner import EngineConfig, PromptLookup, SamplingParams
from hybridkv.runner.engine import Engine
from hybridkv.runner.tiny import FAMILIES
from hybridkv.runner.tiny_configs import VOCAB_SIZE
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
LENGTHS = (30, 17, 45)
NUM_NEW = 16


class Spoiled:
    """Drafts of 1 to 5 tokens that are right up to a random place."""

    def __init__(self, prompts, answers, vocab_size=VOCAB_SIZE):
        self.vocab_size = vocab_size
        self.texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        self.random = random.Random(0)
        self.num_wrong = 0

    def __call__(self, tokens):
        text = next(text for text in self.texts if text[: len(tokens)] == tokens.tolist())
        drafts = text[len(tokens) : len(tokens) + self.random.randint(1, 5)]
        if drafts and self.random.random() < 0.7:
            wrong = self.random.randrange(len(drafts))
            drafts[wrong] = (drafts[wrong] + 1) % self.vocab_size
            self.num_wrong += 1
        return drafts


def _with_drafts(family, model, propose, **config):
    engine = make_engine(family, model, **config)
    engine.scheduler.propose = propose
    return engine


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_drafts_that_are_taken_back_change_no_token(family):
    """Drafts of 1 to 5 tokens, wrong from any place on, leave Hugging Face's tokens, preempted or not."""
    model, prompts = steady_model(family), make_prompts(LENGTHS)
    answers = generate(make_engine(family, model), prompts, NUM_NEW)
    assert_hugging_face_generates(model, prompts, answers)
    for config in ({}, {"preempt_every": 4}, {"prefix_caching": False}):
        propose = Spoiled(prompts, answers)
        engine = _with_drafts(family, model, propose, **config)
        assert generate(engine, prompts, NUM_NEW, on_step=lambda _s, e=engine: poison_free_blocks(e)) == answers
        stats = engine.stats
        assert propose.num_wrong > 5
        assert 5 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
        assert stats.num_generated_tokens == NUM_NEW * len(prompts)
        assert null_blocks_are_zero(engine)
        engine.manager.check()
        assert engine.manager.pool.num_held.sum() == 0


@pytest.mark.parametrize("family", ["bamba", "gemma3_text", "llama"])
def test_right_drafts_take_fewer_steps(family):
    """Drafts that are all right give several tokens a step and compute nothing twice."""
    model, prompts = steady_model(family), make_prompts((30,))
    answers = generate(make_engine(family, model), prompts, NUM_NEW)
    text = prompts[0] + answers[0]
    engine = _with_drafts(family, model, lambda tokens: text[len(tokens) : len(tokens) + 4])
    assert generate(engine, prompts, NUM_NEW) == answers
    assert engine.stats.num_accepted_draft_tokens == engine.stats.num_draft_tokens == 12
    assert engine.stats.num_computed_tokens == 30 + NUM_NEW - 1
    assert engine.stats.num_steps <= 3 + 3


@pytest.mark.parametrize("family", ["bamba", "gemma3_text", "llama"])
def test_what_was_drafted_and_refused_is_in_nobodys_cache(family):
    """After a run with refused drafts the next turn of each conversation hits its whole last turn and is right."""
    model, prompts = steady_model(family), make_prompts(LENGTHS)
    answers = generate(make_engine(family, model), prompts, NUM_NEW)
    engine = _with_drafts(family, model, Spoiled(prompts, answers))
    assert generate(engine, prompts, NUM_NEW) == answers
    engine.scheduler.propose = None
    turns = [prompt + answer + [7, 9, 11] for prompt, answer in zip(prompts, answers, strict=True)]
    completions = engine.generate(turns, SamplingParams(max_new_tokens=6))
    assert_hugging_face_generates(model, turns, [c.token_ids for c in completions])
    assert [c.num_cached_tokens for c in completions] == [len(turn) - 4 for turn in turns]


def test_drafts_end_where_the_output_ends():
    """A stop token among accepted drafts, and the most new tokens, end the output as without drafts."""
    model, (prompt,) = steady_model("bamba"), make_prompts((30,))
    (answer,) = generate(make_engine("bamba", model), [prompt], 30)
    stop = next(token for i, token in enumerate(answer) if i > 5 and token not in answer[:i])
    text = prompt + answer
    for params in (
        SamplingParams(max_new_tokens=30, stop_token_ids=frozenset({stop})),
        SamplingParams(max_new_tokens=7),
    ):
        expected = make_engine("bamba", model).generate([prompt], params)
        engine = _with_drafts("bamba", model, lambda tokens: text[len(tokens) : len(tokens) + 5])
        assert engine.generate([prompt], params) == expected
        engine.manager.check()


def test_a_sampled_sequence_gets_no_drafts():
    """Drafts are for greedy sequences; a sampled one beside them keeps its tokens."""
    prompts = make_prompts((20, 20), seed=3)
    params = [SamplingParams(max_new_tokens=8), SamplingParams(max_new_tokens=8, temperature=1.0, seed=1)]
    expected = make_engine("bamba").generate(prompts, params)
    engine = _with_drafts("bamba", None, lambda tokens: [1, 2])
    assert engine.generate(prompts, params) == expected
    assert engine.stats.num_draft_tokens > 0


def test_drafts_give_way_where_memory_is_short():
    """Without room for a second set of states a row decodes without drafts instead of failing."""
    model, prompts = steady_model("bamba"), make_prompts((30, 17, 45, 40))
    answers = generate(make_engine("bamba", model), prompts, NUM_NEW)
    engine = _with_drafts("bamba", model, Spoiled(prompts, answers), memory_bytes=280_000)
    assert generate(engine, prompts, NUM_NEW) == answers
    engine.manager.check()


def test_prompt_lookup_guesses_what_followed_before():
    """The latest earlier place of the longest known run of last tokens decides; without one there is no guess."""
    propose = PromptLookup(num_drafts=3, max_ngram=2)
    assert propose(np.array([1, 2, 3, 4, 9, 2, 3, 5, 6, 7, 2, 3])) == [5, 6, 7]
    assert propose(np.array([1, 2, 3, 4, 8, 3])) == [4, 8, 3]
    assert propose(np.array([1, 2, 3])) == []
    assert propose(np.array([1])) == []


@pytest.mark.parametrize("family", ["bamba", "gemma3_text"])
def test_prompt_lookup_changes_no_token(family):
    """A prompt that repeats itself, continued with lookups, gives Hugging Face's tokens."""
    model, (part,) = steady_model(family), make_prompts((12,))
    prompts = [part * 3, part * 2]
    engine = Engine(
        model,
        make_engine(family, model).plan.spec,
        None,
        EngineConfig(2**22, block_size=4, max_num_batched_tokens=16, max_model_len=256),
        propose=PromptLookup(),
    )
    outputs = generate(engine, prompts, 24)
    assert_hugging_face_generates(model, prompts, outputs)
    assert engine.stats.num_draft_tokens > 0
