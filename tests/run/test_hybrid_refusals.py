"""Claims about hybrid models that are refused, and about the model after an engine has used it."""

import pytest
import torch

from hybridkv import UnsupportedModel
from hybridkv.hf_config import model_spec_from_config
from hybridkv.runner.caches import StateCache
from hybridkv.runner.mamba_hybrid import _check_states
from hybridkv.runner.mixers import LIGHTNING
from hybridkv.runner.recurrence import LayerRecurrence
from hybridkv.runner.tiny import tiny_model
from hybridkv.runner.tiny_configs import TINY_CONFIGS
from hybridkv.specs import State
from hybridkv_kernels.causal_conv1d import MAX_KERNEL
from hybridkv_kernels.state_batch import MAX_MATRIX_DIM
from tests.run.live_engines import FLOAT32, generate, make_engine, make_prompts

KINDS = ("bamba", "jamba", "qwen3_next", "kimi_linear", "lfm2", "recurrent_gemma", "minimax", "mamba2")
PROMPTS = make_prompts((9, 20))


def hf_logits(model):
    """Logits of Hugging Face's own forward over one prompt."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(torch.tensor(PROMPTS[:1]), use_cache=False).logits


def spec_and_model(family, **fields):
    """A tiny model with other fields in its config, and what it keeps."""
    spec = model_spec_from_config(TINY_CONFIGS[family] | fields, name="other", options=FLOAT32)
    return spec, tiny_model(family, fields=fields)


class Skipped(torch.nn.Module):
    """A mixer that adds nothing."""

    def forward(self, hidden_states, **_kwargs):
        return torch.zeros_like(hidden_states)


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
    with pytest.raises(UnsupportedModel, match=r"layers \[1\]: did not advance their states \(conv, (ssm|recurrent)\)"):
        generate(engine, PROMPTS, 2)


def test_a_state_that_nobody_computes_is_refused_beside_attention():
    """A layer that attends, but leaves out its recurrence, is named too."""
    model = tiny_model("falcon_h1")
    engine = make_engine("falcon_h1", model)
    model.model.layers[1].mamba = Skipped()
    with pytest.raises(UnsupportedModel, match=r"layers \[1\]: did not advance their states \(conv, ssm\)"):
        generate(engine, PROMPTS, 2)


def test_one_of_two_states_that_nobody_computes_is_refused(monkeypatch):
    """A layer that convolves, but leaves out its scan, is named with the state it left alone."""
    monkeypatch.setattr(LayerRecurrence, "mamba2_scan", lambda _self, x, *_args, **_kwargs: x)
    with pytest.raises(UnsupportedModel, match=r"layers \[0, 1, .*: did not advance their states \(ssm\)"):
        generate(make_engine("bamba"), PROMPTS, 2)


@pytest.mark.parametrize("family", ["bamba", "recurrent_gemma"])
def test_a_mixer_that_runs_twice_is_refused(family):
    """A recurrent module that a forward calls twice is named, instead of advancing its state twice."""
    model = tiny_model(family)
    layer = model.model.layers[1]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: (own(*args, **kwargs), own(*args, **kwargs))[1]
    with pytest.raises(UnsupportedModel, match="layer 1: its recurrent module was called twice in one forward pass"):
        generate(make_engine(family, model), PROMPTS, 2)


@pytest.mark.parametrize(("family", "field"), [("lfm2", "conv_L_cache"), ("bamba", "mamba_d_conv")])
def test_a_convolution_that_is_too_long_is_refused(family, field):
    """A kernel longer than the op takes is refused with its layer before anything runs; the longest one runs."""
    spec, model = spec_and_model(family, **{field: MAX_KERNEL + 1})
    with pytest.raises(UnsupportedModel, match=r"layer 0 \(\w+\): convolves over 9 tokens, only kernels of 2 to 8"):
        make_engine(family, model, spec=spec)
    spec, model = spec_and_model(family, **{field: MAX_KERNEL})
    assert generate(make_engine(family, model, spec=spec), PROMPTS, 2)


@pytest.mark.parametrize(
    ("family", "options", "says"),
    [
        ("bamba", {"state_dtype": "float16"}, "'ssm': got float16, expected one of float32, bfloat16; .*state_dtype"),
        ("lfm2", {"conv_dtype": "float8_e4m3fn"}, "'conv': got float8_e4m3fn, expected .*float16; .*conv_dtype"),
        ("recurrent_gemma", {"state_dtype": "bfloat16"}, "'recurrent': got bfloat16, expected one of float32; "),
        ("bamba", {"tp_size": 2}, r"'conv': got \[88, 4\] in its spec, expected \[176, 4\] or \[176, 5\]; make the"),
    ],
)
def test_a_state_that_its_op_does_not_take_is_refused(family, options, says):
    """A state of a dtype or a width that cannot be run is named with its layer before anything runs."""
    spec = model_spec_from_config(TINY_CONFIGS[family], name="other", options=FLOAT32.model_copy(update=options))
    with pytest.raises(UnsupportedModel, match=rf"layer 0 \(\w+\): state {says}"):
        make_engine(family, spec=spec)


@pytest.mark.parametrize(
    ("family", "options", "fields"), [("minimax", {"tp_size": 2}, {}), ("falcon_mamba", {}, {"state_size": 4})]
)
def test_a_state_that_does_not_fit_its_module_is_refused(family, options, fields):
    """What shows only in the step is named with its layer, its state and both shapes."""
    config = TINY_CONFIGS[family] | fields
    spec = model_spec_from_config(config, name="other", options=FLOAT32.model_copy(update=options))
    engine = make_engine(family, spec=spec)
    says = r"layer 0: state '\w+' does not fit what .*: expected \[.*\], got \[.*\]; make the spec"
    with pytest.raises(UnsupportedModel, match=says):
        generate(engine, PROMPTS, 2)


def test_a_state_of_another_kind_is_refused():
    """A layer whose spec describes another kind of state than its module keeps is named with both."""
    spec = model_spec_from_config(TINY_CONFIGS["lfm2"], name="other", options=FLOAT32)
    other = spec.layers[0].caches[0].model_copy(update={"lifecycle": State(family="mamba1")})
    layers = (spec.layers[0].model_copy(update={"caches": (other,)}), *spec.layers[1:])
    says = r"layer 0 \(Lfm2ShortConv\): keeps states conv of kind short_conv, its spec says conv of kind mamba1"
    with pytest.raises(UnsupportedModel, match=says):
        make_engine("lfm2", spec=spec.with_layers(layers))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_matrices_too_large_for_the_kernels_are_refused_on_a_gpu(device):
    """A state that the kernels of a GPU do not serve is named with its layer; a CPU runs it."""
    view = torch.empty(2, 4, MAX_MATRIX_DIM + 1, 8, device=device)
    arguments = (3, torch.nn.Module(), LIGHTNING, StateCache("lightning", 0, 0, {"recurrent": view}))
    if device == "cpu":
        _check_states(*arguments)
        return
    with pytest.raises(UnsupportedModel, match=r"layer 3 .*'recurrent': got matrices \[257, 8\], on a GPU .* 256"):
        _check_states(*arguments)


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
