"""Claims that a spec read from a config is what transformers' caches of that model hold."""

from math import prod

import pytest

pytest.importorskip("transformers")

from transformers import CONFIG_MAPPING

from hybridkv.hf_config.registry import FAMILIES
from hybridkv.specs import DTYPE_BYTES, ModelSpec
from tests.config_cases import FACT_NAMES, Config, facts, read
from tests.run import attention_cases, tiny_hybrids
from tests.run.cache_views import kept_tokens, tensors_of_spec, tensors_of_transformers
from tests.run.random_models import build_config, build_model
from tests.run.tiny_hybrids import SOURCE_FROM_CALLER, SOURCE_TOKENS

NUM_TOKENS = 14  # more than any window below
# transformers keeps a convolution's whole kernel; RecurrentGemma keeps what the next step reads
CONV_COLUMNS = {"recurrent_gemma": "K-1"}
STATE_DTYPES = {"minimax": "bfloat16"}  # its lightning state has the dtype of the activations
SIX_LAYERS: Config = {"num_hidden_layers": 6}  # the sizes of one layer are the class defaults, the depth is not
# fields without which the class defaults make no model that runs; where they are sizes, defaults are not compared
DEFAULTS: dict[str, Config] = {
    "bamba": {**SIX_LAYERS, "attn_layer_indices": [1]},
    "deepseek_v2": {**SIX_LAYERS, "num_experts_per_tok": 2},
    "dots1": {**SIX_LAYERS, **attention_cases.NEEDED["dots1"]},
    "gemma3n_text": {**SIX_LAYERS, "num_kv_shared_layers": 1, "activation_sparsity_pattern": [0.0] * 6},
    "glm4_moe": {**SIX_LAYERS, "head_dim": 128},
    "granitemoehybrid": {**SIX_LAYERS, "layer_types": ["mamba", "attention"] * 3},
    "hunyuan_v1_dense": {**SIX_LAYERS, "head_dim": 128},
    "hunyuan_v1_moe": {**SIX_LAYERS, "head_dim": 128},
    "lfm2": {**SIX_LAYERS, "full_attn_idxs": [2, 4]},
    "lfm2_moe": {**SIX_LAYERS, "layer_types": ["conv", "full_attention"] * 3},
    "ministral": {**SIX_LAYERS, "head_dim": 128},
    "nemotron": {**SIX_LAYERS, "num_key_value_heads": 48},
    "nemotron_h": {},
    "t5": {},
    "whisper": {},
    "zamba": {"num_hidden_layers": 9},  # the least with two hybrid layers
    "zamba2": {},
}
DO_NOT_RUN = {"ministral sliding_window=None"}  # the model asks for a window even where no layer slides
WITH_DEFAULTS = sorted(set(FAMILIES) & set(CONFIG_MAPPING))
RECORDED = [name for name in FACT_NAMES if facts(name)["config"]["model_type"] in CONFIG_MAPPING]


def spec_of(config: Config) -> ModelSpec:
    """Read a config with the options that describe transformers' caches."""
    model_type = str(config["model_type"])
    return read(
        config,
        conv_columns=CONV_COLUMNS.get(model_type, "K"),
        state_dtype=STATE_DTYPES.get(model_type, "float32"),
        max_source_tokens=SOURCE_TOKENS if model_type in SOURCE_FROM_CALLER else None,
    )


@pytest.mark.parametrize("name", tiny_hybrids.CASES)
def test_real_caches_hold_what_the_spec_says(name: str) -> None:
    """A random model's cache tensors have the shapes and dtypes of the spec, layers without a cache included."""
    config = tiny_hybrids.CASES[name]
    spec = spec_of(config)
    held = tensors_of_transformers(build_model(build_config(config)), NUM_TOKENS)
    assert held == tensors_of_spec(spec, NUM_TOKENS)
    assert [sum(prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in layer.values()) for layer in held] == [
        sum(
            cache.bytes_per_token * kept_tokens(cache, NUM_TOKENS) + cache.bytes_per_sequence
            for cache in layer.caches
            if cache.shares_kv_with is None
        )
        for layer in spec.layers
    ]


@pytest.mark.parametrize("name", sorted(attention_cases.CASES.keys() - DO_NOT_RUN))
def test_attention_caches_hold_what_the_spec_says(name: str) -> None:
    """K and V of families with attention alone have the shapes of the spec, cut to the window where a layer slides."""
    config = attention_cases.CASES[name]
    model = build_model(build_config(config), "meta")
    assert tensors_of_transformers(model, NUM_TOKENS) == tensors_of_spec(spec_of(config), NUM_TOKENS)


@pytest.mark.parametrize("family", WITH_DEFAULTS)
def test_class_defaults_hold_what_the_spec_says(family: str) -> None:
    """A config that leaves out every size gives the caches of a model built from the config class."""
    config = {"model_type": family, **DEFAULTS.get(family, SIX_LAYERS)}
    model = build_model(build_config(config), "meta")
    assert tensors_of_transformers(model, NUM_TOKENS) == tensors_of_spec(spec_of(config), NUM_TOKENS)


@pytest.mark.full
@pytest.mark.parametrize("name", RECORDED)
def test_released_models_hold_what_the_spec_says(name: str) -> None:
    """A released model of full size, without its weights, has the caches of the spec of its config."""
    config = facts(name)["config"]
    whole = build_config(config)
    model = build_model(whole if whole.is_encoder_decoder else whole.get_text_config(decoder=True), "meta")
    assert tensors_of_transformers(model, NUM_TOKENS) == tensors_of_spec(spec_of(config), NUM_TOKENS)
