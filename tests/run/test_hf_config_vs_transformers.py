"""Claims that hybridkv reads a config as transformers does."""

import json

import pytest

pytest.importorskip("transformers")

from transformers import CONFIG_MAPPING, PreTrainedConfig

from hybridkv.hf_config import model_spec_from_config
from hybridkv.hf_config.registry import FAMILIES, WRAPPERS
from hybridkv.specs import ModelSpec
from tests.config_cases import FACT_NAMES, Config, facts, read
from tests.run import attention_cases, tiny_hybrids
from tests.run.cache_views import types_of_spec, types_of_transformers
from tests.run.random_models import build_config
from tests.run.tiny_hybrids import SOURCE_FROM_CALLER, SOURCE_TOKENS

CASES = attention_cases.CASES | tiny_hybrids.CASES
RECORDED = [name for name in FACT_NAMES if facts(name)["config"]["model_type"] in CONFIG_MAPPING]
WITH_DEFAULTS = sorted(set(CONFIG_MAPPING) & set(FAMILIES))
MULTIMODAL = sorted(set(CONFIG_MAPPING) & set(WRAPPERS))
# class defaults that make no model: heads that do not divide hidden_size, layers without a type
INCOMPLETE: dict[str, Config] = {
    "glm4_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}
SHARES = ("gemma-3n-E2B", "gemma-3n-E4B", "gemma-4-E2B", "gemma-4-E4B")
SHARING = {name: CASES[name] for name in CASES if name.endswith(" shared")} | {
    name: facts(name)["config"] for name in SHARES
}
OVERRIDES = {2: {"num_key_value_heads": 1}, 3: {"head_dim": 48}}


def saved_forms(config: PreTrainedConfig) -> list[Config]:
    """Return what transformers writes to disk, with all fields and with those that differ from the class defaults."""
    return [json.loads(config.to_json_string(use_diff=use_diff)) for use_diff in (False, True)]


def spec_of(config: Config) -> ModelSpec:
    """Read a config; where it does not say how long a source is, take a length."""
    is_open = config["model_type"] in SOURCE_FROM_CALLER
    return read(config, max_source_tokens=SOURCE_TOKENS if is_open else None)


def check_agrees(config: Config) -> None:
    """Compare the layers of a config with those of transformers, then its saved forms with the config."""
    theirs, ours = build_config(config), spec_of(config)
    assert types_of_spec(ours) == types_of_transformers(theirs)
    assert [spec_of(form) for form in saved_forms(theirs)] == [ours, ours]


@pytest.mark.parametrize("name", CASES)
def test_layer_types_agree(name: str) -> None:
    """Every layer's type, window and chunk are those of transformers' cache, for each form of a config."""
    check_agrees(CASES[name])


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_configs_agree(name: str) -> None:
    """The layers of every released model are transformers' layers, for each form of its config."""
    check_agrees(facts(name)["config"])


@pytest.mark.parametrize("model_type", WITH_DEFAULTS)
def test_class_defaults_agree(model_type: str) -> None:
    """A config that says nothing but its model_type gives the layers of the config class built without arguments."""
    check_agrees({"model_type": model_type, **INCOMPLETE.get(model_type, {})})


@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_defaults_of_multimodal_configs_agree(model_type: str) -> None:
    """The text part of a multimodal config has the layers of its text class, whether it is empty or saved."""
    check_agrees({"model_type": model_type, "text_config": {}})
    theirs = build_config({"model_type": model_type})
    for form in saved_forms(theirs):
        assert types_of_spec(spec_of(form)) == types_of_transformers(theirs)


@pytest.mark.parametrize("name", SHARING)
def test_sharing_layers_read_the_layer_that_stores(name: str) -> None:
    """A layer without a cache of its own reads the layer of its type that transformers lets store for others."""
    config = SHARING[name]
    theirs = build_config(config).get_text_config(decoder=True)
    layers = list(zip(theirs.layer_types, theirs.kv_sharing_modes, strict=True))
    stores = {layer_type: layer for layer, (layer_type, mode) in enumerate(layers) if mode == "store"}
    expected = {layer: stores[layer_type] for layer, (layer_type, mode) in enumerate(layers) if mode == "reuse"}
    shared = ((spec.layer, cache.shares_kv_with) for spec in read(config).layers for cache in spec.caches)
    assert expected
    assert {layer: owner for layer, owner in shared if owner is not None} == expected


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss"])
def test_per_layer_config_agrees(family: str) -> None:
    """Overrides of single layers give each layer the shape of transformers' per-layer view, saved form included."""
    config = attention_cases.tiny(family) | {"head_dim": 16, "per_layer_config": OVERRIDES}
    theirs = build_config(config)
    expected = [(layer.num_key_value_heads, layer.head_dim) for layer in theirs.per_layer_config]
    assert len(set(expected)) == 3
    for form in (config, *saved_forms(theirs)):
        ours = model_spec_from_config(form, name="tiny")
        assert [layer.caches[0].tensors[0].shape for layer in ours.layers] == expected
