"""Claims about hybrid models that are refused, and about the model after an engine has used it."""

import pytest
import torch

from hybridkv import UnsupportedModel
from hybridkv.hf_config import model_spec_from_config
from hybridkv.runner.tiny import tiny_model
from hybridkv.runner.tiny_configs import TINY_CONFIGS
from tests.run.live_engines import FLOAT32, generate, make_engine, make_prompts

KINDS = ("bamba", "jamba", "qwen3_next", "kimi_linear", "lfm2", "recurrent_gemma", "minimax", "mamba2")
PROMPTS = make_prompts((9, 20))


def hf_logits(model):
    """Logits of Hugging Face's own forward over one prompt."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(torch.tensor(PROMPTS[:1]), use_cache=False).logits


def own_forwards(model):
    """Names of modules whose forward is not their class's."""
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


def test_an_unknown_mixer_is_refused_by_name():
    """A layer that keeps a state in a module of an unknown class is named, with the class, before anything runs."""
    model = tiny_model("lfm2")
    mixer = model.model.layers[1].conv
    mixer.__class__ = type("Lfm9GlobalConv", (type(mixer),), {})
    with pytest.raises(UnsupportedModel, match=r"layers \[1\]: keep a state, .* Lfm9GlobalConv.*; known: BambaMixer"):
        make_engine("lfm2", model)


def test_a_mixer_without_a_state_in_the_spec_is_refused():
    """A recurrent module of a layer that has no state in the spec is named, instead of running without its past."""
    spec = model_spec_from_config(TINY_CONFIGS["lfm2"] | {"full_attn_idxs": [1, 2, 5]}, name="other", options=FLOAT32)
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.conv: Lfm2ShortConv has no state in the layer's spec"):
        make_engine("lfm2", spec=spec)


def test_a_second_mixer_of_a_layer_is_refused():
    """Two recurrent modules of one layer, which would share one state, are refused."""
    model = tiny_model("lfm2")
    model.model.layers[1].other = model.model.layers[0].conv
    model.model.layers[1].other.layer_idx = 1
    with pytest.raises(UnsupportedModel, match=r"second of layer 1"):
        make_engine("lfm2", model)


@pytest.mark.parametrize("family", ["bamba", "recurrent_gemma"])
def test_a_state_that_nobody_computes_is_refused(family):
    """A layer that leaves out its recurrence is named, instead of generating nonsense."""
    model = tiny_model(family)
    engine = make_engine(family, model)
    layer = model.model.layers[1]
    skipped = (lambda x, *_, **__: (x, None)) if family == "bamba" else (lambda x, *_, **__: x)
    layer.forward = skipped
    with pytest.raises(UnsupportedModel, match=r"layers \[1\]"):
        generate(engine, PROMPTS, 2)


@pytest.mark.parametrize("family", KINDS)
def test_hugging_faces_forward_is_its_own_again(family):
    """After a run, or one that failed in the model, no module keeps a replaced forward; the logits are as before."""
    model = tiny_model(family)
    before = hf_logits(model)
    engine = make_engine(family, model)
    expected = generate(engine, PROMPTS, 4)
    assert own_forwards(model) == []
    torch.testing.assert_close(hf_logits(model), before, rtol=0, atol=0)
    norm = next(module for name, module in reversed(list(model.named_modules())) if "norm" in name)
    failing = norm.register_forward_hook(lambda *_: (_ for _ in ()).throw(ArithmeticError("broken")))
    with pytest.raises(ArithmeticError, match="broken"):
        generate(engine, PROMPTS, 4)
    failing.remove()
    assert own_forwards(model) == []
    torch.testing.assert_close(hf_logits(model), before, rtol=0, atol=0)
    assert generate(engine, PROMPTS, 4) == expected


def test_a_forward_of_the_callers_is_kept():
    """A forward that the caller put on a mixer, which the run does without, is there again afterwards."""
    model = tiny_model("bamba")
    mixer = model.model.layers[0].mamba
    mixer.forward = kept = lambda *_args, **_kwargs: None
    generate(make_engine("bamba", model), PROMPTS, 2)
    assert mixer.forward is kept
