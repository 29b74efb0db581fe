"""Requests that come and go while others run."""

import pytest

from hybridkv import InvalidRequest
from hybridkv.runner import SamplingParams
from hybridkv.runner.tiny import make_tiny
from tests.run.live_engines import assert_hugging_face_generates, generate, make_engine, make_prompts, steady_model
from tests.run.parity import load_tiny


def _step(engine, tokens):
    """Take a step and add the new tokens to those of each request; return the completions."""
    done = {}
    for output in engine.step():
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if output.completion is not None:
            done[output.request_id] = output.completion
    return done


@pytest.mark.parametrize("family", ["bamba", "gemma3_text"])
def test_requests_added_while_others_run_get_their_own_tokens(family):
    """Requests that come one every other step give Hugging Face's tokens, piece by piece and as a whole."""
    model, prompts = steady_model(family), make_prompts((30, 5, 17, 22, 9, 40))
    engine = make_engine(family, model, max_num_seqs=3)
    ids, tokens, done = [], {}, {}
    for prompt in prompts:
        ids.append(engine.add(prompt, SamplingParams(max_new_tokens=8)))
        for _ in range(2):
            done |= _step(engine, tokens)
    while engine.has_work:
        done |= _step(engine, tokens)
    assert [done[request].token_ids for request in ids] == [tokens[request] for request in ids]
    assert_hugging_face_generates(model, prompts, [tokens[request] for request in ids])
    assert engine.step() == []
    engine.manager.check()
    assert engine.manager.pool.num_held.sum() == 0


@pytest.mark.parametrize("family", ["bamba", "gemma3_text"])
def test_an_aborted_request_gives_its_row_up_and_leaves_what_it_computed(family):
    """Aborted while it waits, runs or is preempted, a request is gone, others go on, and its prompt is still hit."""
    model, prompts = steady_model(family), make_prompts((30, 17, 22))
    engine = make_engine(family, model, max_num_seqs=2)
    tokens = {}
    running, kept, waiting = (engine.add(prompt, SamplingParams(max_new_tokens=10)) for prompt in prompts)
    for _ in range(4):
        _step(engine, tokens)
    engine.abort(waiting)
    engine.abort(running)
    engine.manager.check()
    again = engine.add(prompts[0], SamplingParams(max_new_tokens=3))
    _step(engine, tokens)
    engine.scheduler.preempt_all()
    engine.abort(again)
    done = {}
    while engine.has_work:
        done |= _step(engine, tokens)
    assert {*done} == {kept}
    assert_hugging_face_generates(model, [prompts[1]], [tokens[kept]])
    assert engine.generate([prompts[0]], SamplingParams(max_new_tokens=1))[0].num_cached_tokens >= 28
    assert engine.manager.pool.num_held.sum() == 0
    with pytest.raises(InvalidRequest, match="no unfinished request"):
        engine.abort(running)


def test_generate_refuses_to_run_beside_open_requests():
    """A call of `generate` while requests are unfinished is refused, and works once they are aborted."""
    engine = make_engine("llama")
    request = engine.add([1, 2, 3], SamplingParams(max_new_tokens=4))
    with pytest.raises(InvalidRequest, match="unfinished"):
        engine.generate([[1]], SamplingParams(max_new_tokens=1))
    engine.abort(request)
    assert len(generate(engine, [[1]], 2)[0]) == 2


def test_a_request_with_several_completions_streams_each_of_them(tmp_path):
    """The text of every completion, piece by piece, joins to its whole text."""
    from transformers import AutoTokenizer

    folder = make_tiny("gemma3_text", tmp_path / "gemma3", tokenizer=True)
    model, spec = load_tiny(folder, "float32")
    engine = make_engine("gemma3_text", model, spec=spec)
    engine.tokenizer = AutoTokenizer.from_pretrained(folder)
    engine.add([1, 2, 3, 4, 5], SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, n=3))
    texts, whole = ["", "", ""], {}
    while engine.has_work:
        for output in engine.step():
            texts[output.choice_idx] += output.text
            if output.completion is not None:
                whole[output.choice_idx] = output.completion.text
    assert texts == [whole[0], whole[1], whole[2]]
    assert len({*texts}) > 1
