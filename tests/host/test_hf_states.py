"""Claims about the states of recorded models: their bytes, under each framework's policy, on several ranks."""

from math import prod

import pytest

from hybridkv.errors import SpecError
from hybridkv.hf_config import CacheOptions, model_spec_from_config
from hybridkv.specs import LayerCache, ModelSpec
from tests.config_cases import FACT_NAMES, Config, facts

NAMES = [name for name in FACT_NAMES if facts(name)["expected"]["totals"]["state_bytes_per_seq"]]

POLICIES: dict[str, Config] = {
    "all_bf16_Kminus1": {"state_dtype": "bfloat16"},
    "sglang_default": {},
    "transformers_5.23": {"conv_columns": "K"},
    "vllm_0.33_default": {"state_dtype": "bfloat16"},
}
# where a framework treats one family unlike the others
OWN_POLICIES: dict[tuple[str, str], Config] = {
    ("transformers_5.23", "minimax"): {"state_dtype": "bfloat16"},  # the state has the dtype of the activations
    ("transformers_5.23", "minimax_text_01"): {"state_dtype": "bfloat16"},
    ("transformers_5.23", "recurrent_gemma"): {},  # keeps K-1 columns here, K elsewhere
    ("vllm_0.33_default", "kimi_linear"): {},
    ("vllm_0.33_default", "nemotron_h"): {},  # its config asks for float32
    ("vllm_0.33_default", "qwen3_5_text"): {},  # its config asks for float32
    ("vllm_0.33_default", "qwen3_5_moe_text"): {},
}
# variants that no options express, because the framework does not run the family
NOT_EXPRESSIBLE = {
    ("vllm_0.33_default", "bamba"): "removed in 0.23",
    ("vllm_0.33_default", "minimax"): "removed in 0.23",
    ("vllm_0.33_default", "minimax_text_01"): "removed in 0.23",
    ("vllm_0.33_default", "recurrent_gemma"): "never supported",
    ("vllm_0.33_default", "zamba"): "never supported",
}
REFUSED_RANKS = {"Olmo-Hybrid-7B": (4, 8), "Zamba-7B-v1": (4, 8)}  # 30 heads, 2 heads


def read_fact(name: str, **options: object) -> ModelSpec:
    """Read a recorded config."""
    return model_spec_from_config(facts(name)["config"], name=name, options=CacheOptions(**options))


def state_bytes(spec: ModelSpec) -> int:
    """Return the bytes one sequence's states take in all layers."""
    return sum(cache.bytes_per_sequence for _, _, cache in spec.owned_caches())


@pytest.mark.parametrize("variant", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_options_reproduce_each_framework(name: str, variant: str) -> None:
    """The options of a framework give the bytes recorded for it, unless the framework does not run the family."""
    model_type = read_fact(name).model_type
    recorded = facts(name)["framework_variants"]["state_bytes_per_seq"][variant]
    if (variant, model_type) in NOT_EXPRESSIBLE:
        assert recorded is None
        return
    options = OWN_POLICIES.get((variant, model_type), POLICIES[variant])
    assert state_bytes(read_fact(name, **options)) == recorded


def rank_shapes(cache: LayerCache, ranks: int) -> list[list[int]]:
    """Return the shapes one of `ranks` keeps, from those of the whole model: channels and heads come first."""
    shapes = [list(tensor.shape) for tensor in cache.tensors]
    if cache.lifecycle.family == "mamba2":
        (channels, _), (heads, head_dim, state_size) = shapes
        groups = (channels - heads * head_dim) // (2 * state_size)
        held = groups if groups % ranks == 0 else ranks  # a copy of a group on each rank
        shapes[0][0] += 2 * (held - groups) * state_size
    assert all(shape[0] % ranks == 0 for shape in shapes)
    return [[shape[0] // ranks, *shape[1:]] for shape in shapes]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_keeps_its_part(name: str, ranks: int) -> None:
    """Ranks divide channels and heads, copy Mamba groups and latents where they must, or are refused in one line."""
    if ranks in REFUSED_RANKS.get(name, ()):
        with pytest.raises(SpecError, match=r"^[^\n]*tp_size: got \d, must divide [^\n]*$"):
            read_fact(name, tp_size=ranks)
        return
    whole, part = read_fact(name), read_fact(name, tp_size=ranks)
    for (layer_idx, _, cache), (own_layer_idx, _, own) in zip(whole.owned_caches(), part.owned_caches(), strict=True):
        assert layer_idx == own_layer_idx
        shapes = [list(tensor.shape) for tensor in own.tensors]
        if cache.lifecycle.kind == "state":
            assert shapes == rank_shapes(cache, ranks)
        else:
            heads = 1 if cache.tensors[0].name == "latent" else max(1, cache.tensors[0].shape[0] // ranks)
            assert shapes == [[heads, tensor.shape[1]] for tensor in cache.tensors]


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_and_columns_reach_every_state(name: str) -> None:
    """A convolution takes its own dtype and one column more, any other state the states' dtype; nothing is empty."""
    usual, wide = read_fact(name), read_fact(name, conv_columns="K", conv_dtype="float32", state_dtype="float16")
    for (_, _, cache), (_, _, own) in zip(usual.owned_caches(), wide.owned_caches(), strict=True):
        if cache.lifecycle.kind != "state":
            continue
        for tensor, other in zip(cache.tensors, own.tensors, strict=True):
            is_conv = tensor.name == "conv"
            assert other.dtype == ("float32" if is_conv else "float16")
            assert other.shape[-1] == tensor.shape[-1] + is_conv
            assert other.shape[:-1] == tensor.shape[:-1]
            assert prod(tensor.shape) >= 1
