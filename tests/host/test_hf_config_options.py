"""Claims about the choices that a config.json leaves to the caller."""

import re

import pytest
from pydantic import ValidationError

from hybridkv.errors import SpecError, UnsupportedModel
from hybridkv.hf_config import CacheOptions, model_spec_from_config
from hybridkv.options import apply_options
from hybridkv.specs import CacheTensor, ModelSpec
from tests.config_cases import FACT_NAMES, F, S, facts, kinds, read, tiny


def recorded(name: str, **options: object) -> ModelSpec:
    """Read a recorded model with options."""
    return model_spec_from_config(facts(name)["config"], name=name, options=CacheOptions.model_validate(options))


def test_kv_dtype_is_an_option() -> None:
    """K and V have the dtype of the options, whatever the checkpoint's dtype."""
    spec = read(tiny("llama", torch_dtype="float16"), kv_dtype="float32")
    assert [tensor.dtype for tensor in spec.layers[5].caches[0].tensors] == ["float32", "float32"]


@pytest.mark.parametrize(("name", "scales", "per_token"), [
    ("Llama-3.1-8B", "per_head", [2 * 8 * (128 + 4)]),
    ("Llama-3.1-8B", "per_tensor", [2 * 8 * 128]),
    ("DeepSeek-V3.2", "per_head", [656, 132]),
    ("DeepSeek-V3.2", "per_tensor", [576, 128]),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_8_bit_caches_keep_their_scales(name: str, scales: str, per_token: list[int], dtype: str) -> None:
    """A float32 scale a token and head, or 128 elements of a latent; its rotary part stays 16 bits wide."""
    spec = recorded(name, kv_dtype=dtype, kv_scales=scales)
    assert [[cache.bytes_per_token for cache in layer.caches] for layer in spec.layers] == [per_token] * spec.num_layers


def test_the_facts_know_the_indexer_in_8_bits() -> None:
    """The recorded size of an 8-bit indexer key is the spec's."""
    by_kind = facts("DeepSeek-V3.2")["expected"]["caches_by_kind"]
    assert isinstance(by_kind, dict)
    cache = recorded("DeepSeek-V3.2", kv_dtype="float8_e4m3fn").layers[0].caches[1]
    assert cache.bytes_per_token == by_kind["mla+indexer"][1]["bytes_per_token_fp8"]


@pytest.mark.parametrize(("tp_size", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_kv_heads_are_divided_then_replicated(tp_size: int, heads: int) -> None:
    """A rank keeps its part of the KV heads, at least one of them."""
    spec = recorded("Llama-3.1-8B", tp_size=tp_size)
    assert [tensor.shape for tensor in spec.layers[0].caches[0].tensors] == [(heads, 128)] * 2


def test_latents_are_replicated_and_layers_differ_in_their_heads() -> None:
    """A latent has no heads to divide; a model with two head counts replicates the fewer, divides the others."""
    assert recorded("DeepSeek-V3.2", tp_size=8).layers == recorded("DeepSeek-V3.2").layers
    gemma = recorded("gemma-4-31B", tp_size=8)
    assert [gemma.layers[layer].caches[0].tensors[0].shape for layer in (4, 5)] == [(2, 256), (1, 512)]


def check_part(part: CacheTensor, whole: CacheTensor, tp_size: int) -> None:
    """Check that a rank keeps an even part of a tensor in one dimension, or a replica of it."""
    assert (part.name, part.dtype, part.kind) == (whole.name, whole.dtype, whole.kind)
    changed = [(own, total) for own, total in zip(part.shape, whole.shape, strict=True) if own != total]
    assert len(changed) <= 1
    for own, total in changed:
        assert total / tp_size <= own < total
        # K and V are in heads; a state's channels may hold replicated groups beside divided ones
        assert own == max(1, total // tp_size) or part.name == "conv"


@pytest.mark.parametrize("tp_size", [2, 4, 8])
@pytest.mark.parametrize("name", FACT_NAMES)
def test_a_rank_keeps_its_part_or_says_why_not(name: str, tp_size: int) -> None:
    """Every recorded model has a consistent spec for a rank, or one line that names tp_size."""
    whole = recorded(name)
    try:
        part: ModelSpec | SpecError = recorded(name, tp_size=tp_size)
    except SpecError as error:
        part = error
    if isinstance(part, SpecError):
        assert str(part).startswith(f"tp_size: got {tp_size}, must divide")
        assert len(str(part).splitlines()) == 1
        return
    assert kinds(part) == kinds(whole)
    for (*where, own), (*there, total) in zip(part.owned_caches(), whole.owned_caches(), strict=True):
        assert where == there
        assert own.lifecycle == total.lifecycle
        for own_tensor, total_tensor in zip(own.tensors, total.tensors, strict=True):
            check_part(own_tensor, total_tensor, tp_size)


def test_which_recorded_models_cannot_be_divided() -> None:
    """The models that 2, 4, 8 ranks do not divide are known, so that a new refusal is a decision."""
    refused: dict[int, list[str]] = {2: [], 4: [], 8: []}
    for tp_size, names in refused.items():
        for name in FACT_NAMES:
            try:
                recorded(name, tp_size=tp_size)
            except SpecError:
                names.append(name)
    odd_heads = ["Olmo-Hybrid-7B", "Zamba-7B-v1"]
    assert refused == {2: [], 4: odd_heads, 8: [*odd_heads, "whisper-large-v3"]}


def test_draft_layers_repeat_the_last_attention_layer() -> None:
    """Draft layers are numbered on, each with caches of its own like those of the last attention layer."""
    plain, drafted = recorded("DeepSeek-V3.2"), recorded("DeepSeek-V3.2", draft_layers=2)
    assert drafted.layers[:61] == plain.layers
    assert [(layer.layer, layer.caches) for layer in drafted.layers[61:]] == [
        (61, plain.layers[60].caches),
        (62, plain.layers[60].caches),
    ]


@pytest.mark.parametrize(("name", "like"), [
    ("Nemotron-H-8B", 40),  # states and MLPs follow the last attention layer
    ("gemma-3-4b", 33),  # a sliding layer
    ("gemma-3n-E2B", 19),  # the last layer reads layer 19
    ("gemma-4-E2B", 14),
    ("Hunyuan-Large", 62),
])  # fmt: skip
def test_a_draft_has_the_caches_of_an_owner(name: str, like: int) -> None:
    """Where the last layers keep a state, nothing, or another layer's cache, the draft has the caches they rely on."""
    spec = recorded(name, draft_layers=1)
    assert spec.layers[-1].caches == spec.layers[like].caches
    assert all(cache.shares_kv_with is None for cache in spec.layers[-1].caches)


@pytest.mark.parametrize(
    ("name", "kept"), [("Falcon-H1-0.5B", "full_attention"), ("whisper-large-v3", "full_attention")]
)
def test_a_draft_keeps_neither_a_state_nor_a_source(name: str, kept: str) -> None:
    """Beside attention a layer may keep a state or its source's keys: a draft layer has the attention alone."""
    spec = recorded(name, draft_layers=1)
    assert [cache.lifecycle.kind for cache in spec.layers[-1].caches] == [kept]
    assert spec.layers[-1].caches[0] == spec.layers[-2].caches[0]


def test_options_apply_to_a_loaded_spec_as_to_a_config() -> None:
    """A spec that ships with the package gives, under options, what its config gives."""
    options = CacheOptions(kv_dtype="float8_e4m3fn", state_dtype="bfloat16", conv_columns="K", tp_size=2)
    for name in ("Bamba-9B-v1", "DeepSeek-V3.2", "gemma-3-27b", "Qwen3-Next-80B-A3B"):
        read_from_config = model_spec_from_config(facts(name)["config"], name=name, options=options)
        assert apply_options(ModelSpec.load(name), options) == read_from_config


def test_options_at_their_defaults_change_nothing() -> None:
    """A spec of other dtypes keeps them unless the options ask for something else."""
    spec = recorded("Bamba-9B-v1", kv_dtype="float16", state_dtype="float16", conv_dtype="float32")
    assert apply_options(spec, CacheOptions()) == spec
    halved = apply_options(spec, CacheOptions(tp_size=2))
    assert {tensor.dtype for _, _, cache in halved.owned_caches() for tensor in cache.tensors} == {"float16", "float32"}


def test_drafts_of_other_layers() -> None:
    """A tiny Gemma 3 whose last layer slides drafts with a window; a text model skips the image's layers."""
    assert kinds(read(tiny("gemma3_text", num_hidden_layers=8), draft_layers=1))[-2:] == [S, S]
    vision = tiny("mllama_text_model", cross_attention_layers=[5])
    assert kinds(read(vision, draft_layers=1, max_source_tokens=9))[-2:] == ["cross", F]


@pytest.mark.parametrize("name", ["mamba-2.8b-hf", "mamba2-2.7b-hf", "falcon-mamba-7b"])
def test_a_model_without_attention_has_no_draft(name: str) -> None:
    """A draft has nothing to repeat in a model of states alone; zero draft layers are always right."""
    assert recorded(name, draft_layers=0) == recorded(name)
    with pytest.raises(UnsupportedModel, match=r"draft_layers: got 1, but '.*mamba.*' has no attention layer"):
        recorded(name, draft_layers=1)


@pytest.mark.parametrize(("field", "value"), [
    ("kv_dtype", "float64"), ("kv_scales", "per_block"), ("tp_size", 0), ("draft_layers", -1), ("draft_layers", 65),
    ("max_source_tokens", 0), ("conv_columns", "K+1"), ("page_size", 16),
])  # fmt: skip
def test_a_wrong_option_is_named(field: str, value: object) -> None:
    """An option out of range or of an unknown name is refused with its name and value."""
    with pytest.raises(ValidationError, match=re.escape(f"{field}: got {value!r}")):
        CacheOptions.model_validate({field: value})


def test_draft_layers_count_as_layers() -> None:
    """The layers of a spec are counted anew once options have added some, whoever asked for the number before."""
    spec = ModelSpec.load("Qwen3-8B")
    assert spec.num_layers == 36
    assert apply_options(spec, CacheOptions(draft_layers=2)).num_layers == 38
