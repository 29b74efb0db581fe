"""Claims about hybrid models that several engines share, whose steps fail, or whose layers are compiled."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hybridkv.runner import SamplingParams, recurrence
from hybridkv.runner.sequence import Sequence as Request
from hybridkv.runner.tiny import tiny_model
from hybridkv_kernels.causal_conv1d import causal_conv1d
from hybridkv_kernels.gated_delta_rule import gated_delta_rule
from hybridkv_kernels.lightning_attention import lightning_attention
from hybridkv_kernels.mamba2_scan import mamba2_scan
from hybridkv_kernels.rg_lru import rg_lru
from hybridkv_kernels.selective_scan import selective_scan
from tests.run.live_engines import generate, make_engine, make_prompts

PROMPTS = make_prompts((9, 20, 5))
# A scan in the interpreter takes long.
SHORT, LONG = make_prompts((2, 1)), make_prompts((10, 2))
LAUNCHERS = {
    "bamba": (causal_conv1d, mamba2_scan),
    "falcon_mamba": (causal_conv1d, selective_scan),
    "minimax": (lightning_attention,),
    "qwen3_5_text": (causal_conv1d, gated_delta_rule),
    "recurrent_gemma": (causal_conv1d, rg_lru),
}


@pytest.mark.parametrize("family", ["llama", "bamba", "recurrent_gemma"])
def test_engines_in_threads_share_a_model(family):
    """Two engines that generate at the same time on one model give the tokens of each alone, then leave no forward."""
    model = tiny_model(family)
    expected = generate(make_engine(family, model), PROMPTS, 4)
    model.model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(0.01))
    engines = [make_engine(family, model) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda engine: generate(engine, PROMPTS, 4), engines)) == [expected, expected]
    assert [name for name, module in model.named_modules() if "forward" in module.__dict__] == []


def test_a_model_with_an_engine_can_be_copied():
    """What an engine leaves on a model is no obstacle to a copy of it, which runs."""
    model = tiny_model("lfm2")
    expected = generate(make_engine("lfm2", model), PROMPTS, 2)
    twin = copy.deepcopy(model)
    assert generate(make_engine("lfm2", twin), PROMPTS, 2) == expected
    assert twin._hybridkv_pass_lock is not model._hybridkv_pass_lock


@pytest.mark.parametrize("failing_step", [2, 5])
@pytest.mark.parametrize("where", ["model", "sampler"])
@pytest.mark.parametrize("family", ["llama", "bamba", "kimi_linear", "recurrent_gemma", "minimax"])
def test_a_step_that_failed_may_be_taken_again(family, where, failing_step, monkeypatch):
    """An interrupt behind the layers, or while sampling, leaves an engine whose next steps give the right tokens."""
    model = tiny_model(family)
    expected = generate(make_engine(family, model), PROMPTS, 6)
    engine = make_engine(family, model)
    num_calls = 0

    def interrupt(*_args):
        nonlocal num_calls
        num_calls += 1
        if num_calls == failing_step:
            raise KeyboardInterrupt

    if where == "model":
        model.lm_head.register_forward_pre_hook(interrupt)
    else:
        sample = engine.sampler.sample
        monkeypatch.setattr(engine.sampler, "sample", lambda *args: interrupt() or sample(*args))
    params = SamplingParams(max_new_tokens=6)
    requests = [Request.create(idx, prompt, params, 256) for idx, prompt in enumerate(PROMPTS)]
    for request in requests:
        engine.scheduler.add(request)
    num_failures = 0
    while engine.scheduler.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            num_failures += 1
            engine.manager.check()
    assert [request.new_token_ids for request in requests] == expected
    assert num_failures == 1


def test_compiled_layers_run():
    """Layers that the caller has compiled give the same tokens: recurrent modules stay out of the compiled code."""
    model, prompts = tiny_model("bamba"), make_prompts((3,))
    expected = generate(make_engine("bamba", model), prompts, 2)
    for layer in model.model.layers[:2]:
        layer.compile(backend="eager")
    try:
        assert generate(make_engine("bamba", model), prompts, 2) == expected
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("family", LAUNCHERS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels take no CPU tensors")
def test_kernels_take_what_layers_hand_them(family, monkeypatch):
    """With kernels in place of the torch paths, as on a GPU, a hybrid generates the same tokens."""
    model, prompts = tiny_model(family), SHORT if family == "falcon_mamba" else LONG
    expected = generate(make_engine(family, model), prompts, 2)
    called = set()
    for kernel in LAUNCHERS[family]:

        def launch(*args, _kernel=kernel, **kwargs):
            called.add(_kernel)
            _kernel(*args, **kwargs)

        monkeypatch.setattr(recurrence, f"{kernel.__name__}_torch", launch)
    assert generate(make_engine(family, model), prompts, 2) == expected
    assert called == set(LAUNCHERS[family])
