"""What ended and preempted sequences computed is used again, and no token changes by it."""

import pytest

from hybridkv.runner import SamplingParams
from hybridkv.runner.tiny import FAMILIES
from tests.run.live_engines import (
    SAMPLE_FAMILIES,
    assert_hugging_face_generates,
    generate,
    generate_recorded,
    make_engine,
    make_prompts,
    null_blocks_are_zero,
    poison_free_blocks,
    steady_model,
)

REST = [family for family in FAMILIES if family not in SAMPLE_FAMILIES]
EACH_FAMILY = [*SAMPLE_FAMILIES, *(pytest.param(family, marks=pytest.mark.full) for family in REST)]
NUM_NEW = 6


def _num_computed(engine, run):
    """Return what `run` returns, and how many tokens it took through the model."""
    before = engine.stats.num_computed_tokens
    result = run()
    return result, engine.stats.num_computed_tokens - before


def _alike(length, num_shared, seed=0):
    """Return two prompts with the same first tokens."""
    first, second = make_prompts((length, length), seed)
    return first, first[:num_shared] + second[num_shared:]


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_a_prompt_computes_only_what_no_earlier_one_did(family):
    """A prompt that shares three quarters with an earlier one computes the last quarter, and every token is right."""
    unit = 64 if family in ("falcon_mamba", "mamba", "mamba2") else 32  # without attention states are kept every 64
    length, shared = unit * 4, unit * 3
    model, prompts = steady_model(family), _alike(length, shared)
    engine = make_engine(family, model, max_model_len=length + 16, resume_every=unit, max_num_batched_tokens=40)
    outputs, logits, counts = [], [], []
    for prompt in prompts:
        ((completion,), of_output), num_computed = _num_computed(
            engine, lambda prompt=prompt: generate_recorded(engine, [prompt], SamplingParams(max_new_tokens=NUM_NEW))
        )
        outputs.append(completion.token_ids)
        logits += of_output
        counts.append((completion.num_cached_tokens, num_computed))
        engine.manager.check()
        poison_free_blocks(engine)
    assert counts == [(0, length + NUM_NEW - 1), (shared, length - shared + NUM_NEW - 1)]
    assert_hugging_face_generates(model, prompts, outputs, logits)
    assert null_blocks_are_zero(engine)


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_the_next_turn_of_a_conversation_hits_all_of_the_last(family):
    """A prompt that goes on from prompt and answer computes the answer's last token, the rest, and nothing before."""
    model, (first, question) = steady_model(family), make_prompts((33, 7))
    engine = make_engine(family, model)
    (answer,) = generate(engine, [first])
    second = first + answer + question
    ((completion,), logits), num_computed = _num_computed(
        engine, lambda: generate_recorded(engine, [second], SamplingParams(max_new_tokens=NUM_NEW))
    )
    num_hit = len(first) + len(answer) - 1
    assert completion.num_cached_tokens == num_hit
    assert num_computed == len(second) - num_hit + NUM_NEW - 1
    assert_hugging_face_generates(model, [second], [completion.token_ids], logits)
    engine.manager.check()


@pytest.mark.parametrize("family", ["bamba", "gemma3_text", "llama"])
def test_the_third_prompt_finds_where_the_second_parted(family):
    """Without points at fixed steps, the second of several prompts that begin alike leaves one where they part."""
    first, second = _alike(48, 32)
    third = first[:32] + make_prompts((9,), seed=5)[0]
    model = steady_model(family)
    engine = make_engine(family, model)
    completions = [engine.generate([p], SamplingParams(max_new_tokens=4))[0] for p in (first, second, third)]
    has_points = family != "llama"
    assert [c.num_cached_tokens for c in completions] == [0, 0 if has_points else 32, 32]
    assert_hugging_face_generates(model, [first, second, third], [c.token_ids for c in completions])


@pytest.mark.parametrize("family", ["bamba", "gemma3_text", "kimi_linear"])
def test_a_layout_of_dense_tensors_hits_alike(family):
    """With one dense tensor a layer, the copies of states and last blocks give the same tokens."""
    model, (first, question) = steady_model(family), make_prompts((33, 7))
    engine = make_engine(family, model, layout="contiguous")
    (answer,) = generate(engine, [first])
    second = first + answer + question
    (completion,), logits = generate_recorded(engine, [second], SamplingParams(max_new_tokens=NUM_NEW))
    assert completion.num_cached_tokens == len(first) + len(answer) - 1
    assert_hugging_face_generates(model, [second], [completion.token_ids], logits)


@pytest.mark.parametrize("family", ["bamba", "gemma3_text", "llama"])
def test_prompts_that_run_side_by_side_share_what_one_has_committed(family):
    """Eight prompts that begin alike, more than run at once, hit each other's prefixes and none is changed by it."""
    start, *ends = make_prompts((32, 3, 20, 7, 9, 5, 14, 1, 30), seed=2)
    prompts = [start + end for end in ends]
    model = steady_model(family)
    engine = make_engine(family, model, max_num_seqs=3)
    completions, logits = generate_recorded(engine, prompts, SamplingParams(max_new_tokens=NUM_NEW))
    assert sum(c.num_cached_tokens >= 32 for c in completions) >= 4
    assert_hugging_face_generates(model, prompts, [c.token_ids for c in completions], logits)
    engine.manager.check()
    assert engine.manager.pool.num_held.sum() == 0


@pytest.mark.parametrize("family", SAMPLE_FAMILIES)
def test_a_preempted_sequence_goes_on_from_its_end(family):
    """A preempted sequence whose cache was not needed meanwhile computes no token twice."""
    model, prompts = steady_model(family), make_prompts((30, 17, 45))
    engine = make_engine(family, model, preempt_every=3)
    completions, logits = generate_recorded(engine, prompts, SamplingParams(max_new_tokens=10))
    assert engine.stats.num_preemptions > 3
    assert engine.stats.num_computed_tokens == sum(map(len, prompts)) + 9 * len(prompts)
    assert_hugging_face_generates(model, prompts, [c.token_ids for c in completions], logits)


def test_what_was_cached_goes_when_memory_is_short():
    """Prompts that fill the memory many times over evict each other, and the last conversation still hits."""
    model = steady_model("gemma3_text")
    engine = make_engine("gemma3_text", model, memory_bytes=200_000)
    for seed in range(8):
        prompts = make_prompts((40, 50), seed)
        outputs = generate(engine, prompts)
        assert_hugging_face_generates(model, prompts, outputs)
        engine.manager.check()
    second = prompts[1] + outputs[1] + [5]
    assert engine.generate([second], SamplingParams(max_new_tokens=2))[0].num_cached_tokens == len(second) - 2


@pytest.mark.parametrize("family", ["bamba", "gemma3_text"])
def test_another_salt_shares_nothing(family):
    """Requests of different salts compute the same prompt each for itself; an equal salt hits."""
    (prompt,) = make_prompts((40,))
    engine = make_engine(family)
    hits = []
    for salt in ("a", "b", "a", None):
        engine.add(prompt, SamplingParams(max_new_tokens=3), salt=salt)
        while engine.has_work:
            hits += [output.completion.num_cached_tokens for output in engine.step() if output.completion]
    assert hits == [0, 0, 36, 0]


def test_without_prefix_caching_nothing_is_kept():
    """With prefix caching off, the same prompt is computed again and no block stays."""
    engine = make_engine("bamba", prefix_caching=False)
    (prompt,) = make_prompts((40,))
    for _ in range(2):
        assert engine.generate([prompt], SamplingParams(max_new_tokens=3))[0].num_cached_tokens == 0
    assert engine.stats.num_hit_tokens == 0
    assert sum(group.cached_blocks for group in engine.stats.groups) == 0


@pytest.mark.parametrize("fails_at", [1, 3, 5])
@pytest.mark.parametrize("family", ["bamba", "qwen3_5_text", "gemma3_text"])
def test_a_step_that_failed_leaves_nothing_wrong_in_the_cache(family, fails_at, monkeypatch):
    """After a forward that failed behind its last layer, the same prompts give Hugging Face's tokens."""
    model, prompts = steady_model(family), make_prompts((30, 21))
    engine = make_engine(family, model)
    forward, num_calls = engine.model.forward, 0

    def failing(*args):
        nonlocal num_calls
        num_calls += 1
        logits = forward(*args)
        if num_calls == fails_at:
            raise RuntimeError("out of memory")
        return logits

    monkeypatch.setattr(engine.model, "forward", failing)
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_new_tokens=NUM_NEW))
    outputs = {}
    with pytest.raises(RuntimeError, match="out of memory"):
        _finish(engine, outputs)
    engine.manager.check()
    _finish(engine, outputs)
    assert_hugging_face_generates(model, prompts, [outputs[0], outputs[1]])
    again = generate(engine, prompts, NUM_NEW)
    assert_hugging_face_generates(model, prompts, again)
    engine.manager.check()


def _finish(engine, outputs):
    while engine.has_work:
        for output in engine.step():
            if output.completion is not None:
                outputs[output.request_id] = output.completion.token_ids
