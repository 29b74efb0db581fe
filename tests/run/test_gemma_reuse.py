"""Reuse, swaps, forks, beams and drafts on the real Gemma 3 270M weights."""

from itertools import pairwise
from pathlib import Path

import pytest

from hybridkv.hf_config import CacheOptions, model_spec_from_config, read_config
from hybridkv.runner import BeamParams, Engine, EngineConfig, PromptLookup, SamplingParams
from tests.run.live_engines import assert_hugging_face_generates, generate
from tests.run.test_drafts import Spoiled
from tests.run.test_forks import check_beams

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.gemma
LENGTH, SHARED = 1024, 768


@pytest.fixture(autouse=True)
def one_thread():
    """Use every core: this model is no tiny one."""
    return


@pytest.fixture(scope="module")
def gemma():
    """The model, its spec, and the token ids of a text of some thousand tokens."""
    from hybridkv.cli.run import default_cache_dir
    from hybridkv.runner.checkpoints import DEMO_MODEL, load_checkpoint, resolve_checkpoint

    path = resolve_checkpoint(DEMO_MODEL, default_cache_dir())
    checkpoint = load_checkpoint(path, "float32")
    options = CacheOptions(kv_dtype="float32", conv_dtype="float32")
    spec = model_spec_from_config(read_config(path), name=DEMO_MODEL, options=options)
    return checkpoint.model, spec, checkpoint.tokenizer.encode((ROOT / "LICENSE").read_text())


def _engine(gemma, **changes):
    config = {"memory_bytes": 2**28, "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 2048}
    propose = changes.pop("propose", None)
    return Engine(gemma[0], gemma[1], None, EngineConfig(**(config | changes)), propose=propose)


def test_a_second_prompt_computes_only_its_last_quarter(gemma):
    """A prompt that shares 768 of 1,024 tokens, past the window, computes 256, and the next turn only what is new."""
    model, _, text = gemma
    engine = _engine(gemma, resume_every=256)
    first, second = text[:LENGTH], text[:SHARED] + text[2000 : 2000 + LENGTH - SHARED]
    params = SamplingParams(max_new_tokens=8)
    completions, computed = [], [0]
    for prompt in (first, second):
        completions += engine.generate([prompt], params)
        computed.append(engine.stats.num_computed_tokens)
    turn = second + completions[1].token_ids + text[10:30]
    completions += engine.generate([turn], params)
    computed.append(engine.stats.num_computed_tokens)
    assert [c.num_cached_tokens for c in completions] == [0, SHARED, LENGTH + 7]
    assert [b - a for a, b in pairwise(computed)] == [LENGTH + 7, LENGTH - SHARED + 7, 21 + 7]
    assert_hugging_face_generates(model, [first, second, turn], [c.token_ids for c in completions])
    engine.manager.check()


def test_four_forks_and_their_prompt(gemma):
    """Four greedy completions of a prompt past the window compute it once and equal Hugging Face's."""
    model, _, text = gemma
    engine = _engine(gemma)
    prompt = text[100:700]
    four = engine.generate([prompt], SamplingParams(max_new_tokens=12, n=4))
    assert engine.stats.num_computed_tokens == len(prompt) + 4 * 11
    assert [c.token_ids for c in four] == [four[0].token_ids] * 4
    assert_hugging_face_generates(model, [prompt], [four[0].token_ids])


def test_eight_beams_are_hugging_faces(gemma):
    """Eight beams over 16 tokens are Hugging Face's, in its order."""
    check_beams(_engine(gemma), gemma[0], gemma[2][50:650], BeamParams(8, 16, stop_token_ids=frozenset({1, 106})))


def test_drafts_change_no_token(gemma):
    """Drafts of 1 to 5 tokens, refused from a random place on, and looked-up ones leave Hugging Face's tokens."""
    model, _, text = gemma
    prompts = [text[:600], text[500:560], text[1000:1513]]
    answers = generate(_engine(gemma), prompts, 24)
    assert_hugging_face_generates(model, prompts, answers)
    for propose in (Spoiled(prompts, answers, vocab_size=262144), PromptLookup()):
        engine = _engine(gemma, propose=propose)
        assert generate(engine, prompts, 24) == answers
        assert 0 < engine.stats.num_accepted_draft_tokens < engine.stats.num_draft_tokens


def test_swapped_sequences_compute_nothing_again(gemma):
    """Sequences that go to the host and back, without a prefix cache, compute each token once."""
    model, _, text = gemma
    engine = _engine(gemma, preempt_every=3, prefix_caching=False, host_memory_bytes=2**28)
    prompts = [text[:600], text[500:560], text[1000:1513]]
    outputs = generate(engine, prompts, 12)
    assert engine.stats.num_preemptions > 3
    assert engine.stats.num_computed_tokens == sum(map(len, prompts)) + 3 * 11
    assert_hugging_face_generates(model, prompts, outputs)
