"""Claims that hybridkv reads a config as transformers does."""

import pytest

pytest.importorskip("transformers")

from transformers import AutoConfig, PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from hybridkv.hf_config import model_spec_from_config
from hybridkv.hf_config.registry import FAMILIES
from tests.config_cases import TYPE_NAMES, Config, kinds, windows

# the class defaults of these fields are what a missing key means
GEOMETRY = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
VARIANTS: dict[str, list[Config]] = {
    "mistral": [{"sliding_window": None}],
    "ministral": [{"sliding_window": None}, {"layer_types": ["full_attention", "sliding_attention"] * 4}],
    "qwen2": [{"use_sliding_window": True, "max_window_layers": 3}],
    "qwen3": [
        {"use_sliding_window": True, "max_window_layers": 3},
        {"use_sliding_window": True, "max_window_layers": 0},
    ],
    "qwen2_moe": [{"use_sliding_window": True, "max_window_layers": 3}, {"use_sliding_window": True}],
    "qwen3_moe": [{"use_sliding_window": True}],
    "dots1": [{"max_window_layers": 3}, {"sliding_window": None}],
    "smollm3": [
        {"use_sliding_window": True},
        {"use_sliding_window": True, "no_rope_layers": [0, 1] * 4},
        {"use_sliding_window": True, "no_rope_layer_interval": 3},
    ],
    "gemma3_text": [
        {"sliding_window_pattern": 3},
        {"use_bidirectional_attention": True},
        {"layer_types": ["full_attention"] * 8},
    ],
    "cohere2": [{"sliding_window_pattern": 3}, {"head_dim": 32}],
    "exaone4": [{"sliding_window_pattern": 3}, {"layer_types": ["full_attention"] * 8}],
    "llama": [{"head_dim": 24}],
}
WINDOWLESS = {"llama", "minimax_m2", "hunyuan_v1_dense"}  # a window is an error there


def tiny(model_type: str) -> Config:
    """Return a config of eight small layers with a window of 8."""
    config: Config = {
        "model_type": model_type,
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "vocab_size": 32,
    }
    return config if model_type in WINDOWLESS else config | {"sliding_window": 8}


def load(config: Config) -> PreTrainedConfig:
    """Return the text part of the config as AutoConfig builds it."""
    fields = dict(config)
    return AutoConfig.for_model(fields.pop("model_type"), **fields).get_text_config(decoder=True)


CASES = [tiny(family) | variant for family in sorted(FAMILIES) for variant in ({}, *VARIANTS.get(family, []))]
OVERRIDES = {2: {"num_key_value_heads": 1}, 3: {"head_dim": 48}}


@pytest.mark.parametrize("config", CASES, ids=lambda config: str(config["model_type"]))
def test_layer_kinds_and_windows_agree(config: Config) -> None:
    """Every family's kinds and windows are those of get_layer_types_and_kwargs, for the config and its saved form."""
    theirs = load(config)
    types, kwargs = get_layer_types_and_kwargs(theirs)
    for form in (config, theirs.to_dict()):
        ours = model_spec_from_config(form, name="tiny")
        assert [TYPE_NAMES[kind] for kind in kinds(ours)] == types
        assert windows(ours) == [layer.get("sliding_window") for layer in kwargs]


def geometry(theirs: PreTrainedConfig) -> set[tuple[int, ...]]:
    """Return the K shape that transformers' attention modules derive."""
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    return {(getattr(theirs, "num_key_value_heads", None) or theirs.num_attention_heads, head_dim)}


@pytest.mark.parametrize("config", CASES, ids=lambda config: str(config["model_type"]))
def test_geometry_agrees(config: Config) -> None:
    """Every family's KV heads, head_dim and longest context are those of the config class."""
    ours, theirs = model_spec_from_config(config, name="tiny"), load(config)
    assert {cache.tensors[0].shape for _, _, cache in ours.owned_caches()} == geometry(theirs)
    assert ours.max_model_len == theirs.max_position_embeddings


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_class_defaults_agree(family: str) -> None:
    """A config that says nothing but its model_type gives the layers of the config class built without arguments."""
    ours, theirs = model_spec_from_config({"model_type": family}, name="default"), load({"model_type": family})
    types, kwargs = get_layer_types_and_kwargs(theirs)
    assert [TYPE_NAMES[kind] for kind in kinds(ours)] == types
    assert windows(ours) == [layer.get("sliding_window") for layer in kwargs]
    assert {cache.tensors[0].shape for _, _, cache in ours.owned_caches()} == geometry(theirs)
    assert ours.max_model_len == theirs.max_position_embeddings


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss"])
def test_per_layer_config_agrees(family: str) -> None:
    """Overrides of single layers give each layer the shape of transformers' per-layer view, saved form included."""
    config = tiny(family) | {"head_dim": 16, "per_layer_config": OVERRIDES}
    theirs = load(config)
    expected = [(layer.num_key_value_heads, layer.head_dim) for layer in theirs.per_layer_config]
    assert len(set(expected)) == 3
    for form in (config, theirs.to_dict()):
        ours = model_spec_from_config(form, name="tiny")
        assert [layer.caches[0].tensors[0].shape for layer in ours.layers] == expected
