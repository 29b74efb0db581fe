"""Claims about models of a model_type that nobody registered."""

import pytest

from hybridkv.errors import SpecError, UnsupportedModel
from hybridkv.hf_config import model_spec_from_config
from hybridkv.specs import ModelSpec
from tests.config_cases import FACT_NAMES, TYPE_NAMES, C, Config, F, S, facts, kinds, read, shapes, tiny, windows


def unknown(**fields: object) -> Config:
    """Return a tiny config of a model_type without a reader."""
    return tiny("made_up", **fields)


NAMES = [TYPE_NAMES[kind] for kind in (F, S, C, F, S, C)]


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, [F] * 6),
    ({"sliding_window": None, "attention_chunk_size": None, "layer_types": None}, [F] * 6),
    ({"layer_types": ["attention"] * 6}, [F] * 6),
    ({"layer_types": NAMES, "sliding_window": 8, "attention_chunk_size": 4}, [F, S, C, F, S, C]),
    ({"per_layer_config": {"03": {"sliding_window": 8}}}, [F, F, F, S, F, F]),
])  # fmt: skip
def test_explicit_fields_are_read(fields: Config, expected: list[str]) -> None:
    """`layer_types` or per-layer windows give the kinds, without them all layers are full."""
    spec = read(unknown(**fields))
    assert kinds(spec) == expected
    assert spec.model_type == "made_up"
    assert [window for window in windows(spec) if window] == [{S: 8, C: 4}[kind] for kind in expected if kind != F]


def test_head_dim_is_explicit_or_derived() -> None:
    """A missing or null head_dim is hidden_size / num_attention_heads; a missing longest context is left open."""
    assert shapes(read(unknown(head_dim=24))) == {(2, 24)}
    assert shapes(read(unknown(head_dim=...))) == shapes(read(unknown(head_dim=None))) == {(2, 16)}
    assert read(unknown(max_position_embeddings=...)).max_model_len is None
    assert read(unknown(per_layer_config={"1": {"head_dim": 8, "num_key_value_heads": 1}})).layers[1] != read(unknown())


@pytest.mark.parametrize(("fields", "missing"), [
    ({"num_hidden_layers": ...}, "num_hidden_layers"),
    ({"num_attention_heads": None}, "num_attention_heads"),
    ({"num_key_value_heads": ...}, "num_key_value_heads"),
    ({"num_key_value_heads": None}, "num_key_value_heads"),
    ({"head_dim": None, "hidden_size": ...}, "head_dim or hidden_size"),
    ({"sliding_window": 8}, "layer_types, which says the layers that sliding_window is for"),
    ({"attention_chunk_size": 8}, "layer_types, which says the layers that attention_chunk_size is for"),
])  # fmt: skip
def test_what_is_missing_is_named(fields: Config, missing: str) -> None:
    """Geometry is never a default, and a window without its layers is never spread over all of them."""
    with pytest.raises(UnsupportedModel) as caught:
        read(unknown(**fields))
    text = str(caught.value)
    assert text.startswith("config of 'tiny': model_type: got 'made_up', which has no reader")
    assert f"missing: {missing}; seen: " in text
    assert "write its ModelSpec by hand" in text
    assert "\n" not in text


HINTS: Config = {
    "mamba_d_state": 16,
    "ssm_cfg": {"layer": "Mamba2"},
    "conv_kernel": 4,
    "linear_num_key_heads": 4,
    "linear_attn_config": {},
    "kv_lora_rank": 512,
    "index_topk": 2048,
    "num_kv_shared_layers": 2,
    "use_cla": True,
    "cla_share_factor": 2,
    "hybrid_override_pattern": "M*",
    "sliding_window_pattern": 4,
    "full_attention_interval": 4,
    "layers_block_type": ["attention"],
    "block_types": ["recurrent"],
    "attn_type_list": [1, 0],
    "rwkv_heads": 0,
    "state_size": 16,
    "cross_attention_layers": [1],
    "is_encoder_decoder": True,
    "encoder_layers": 6,
    "lru_width": 8,
    "multi_query": True,
    "block_configs": [],
    "no_rope_layers": [1],
    "max_window_layers": 4,
    "use_sliding_window": True,
    "attn_layer_indices": [1],
    "attention_window_size": 8,
    "compress_ratios": [4],
    "global_head_dim": 512,
    "swa_num_key_value_heads": 1,
    "v_head_dim": 8,
    "attn_config": {"kv_n_heads": 2},
    "decoder": {"mamba_expand": 2},
    "language_config": {"num_hidden_layers": 2},
    "num_key_value_heads_per_layer": [2] * 6,
    "key_value_heads": 2,
    "sliding_head_dim": 8,
    "k_head_dim": 8,
    "head_dim_v": 8,
    "mla": True,
    "swa": True,
    "use_deltanet": True,
    "rnn_width": 8,
    "xlstm_block": {},
    "gla_layers": [1],
    "hyena_order": 2,
    "kv_cache_sharing": True,
}


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_at_other_caches_is_refused(name: str) -> None:
    """A field by which other families say more about caches refuses the model, wherever it stands."""
    inner = {**unknown(), name: HINTS[name]}
    outer = {"model_type": "wrapper", "text_config": unknown(), name: HINTS[name]}
    for config in (inner, outer, {"model_type": "wrapper", "text_config": inner}):
        with pytest.raises(UnsupportedModel, match=f"may say more about its caches: {name}[.=]"):
            read(config)


def test_inert_fields_are_no_hints() -> None:
    """Null and false switch a feature off; rotary embedding, experts, other modalities say nothing of caches."""
    inert: Config = {
        **dict.fromkeys(HINTS),
        "use_sliding_window": False,
        "is_encoder_decoder": False,
        "rope_parameters": {"rope_type": "default", "rope_local_base_freq": 10.0},
        "vision_config": {"num_hidden_layers": 3, "window_size": 7},
        "quantization_config": {"block_structure": "channel"},
        "num_local_experts": 8,
        "chunk_size_feed_forward": 0,
        "num_nextn_predict_layers": 1,
        "use_qk_norm": True,
        "classifier_dropout": 0.1,
    }
    assert read(unknown(**inert)) == read(unknown())


@pytest.mark.parametrize("name", ["linear_attention", "mamba", "mlp", 3])
def test_an_unknown_layer_type_is_refused(name: object) -> None:
    """A layer type says nothing about which state it keeps: the model_type would."""
    with pytest.raises(UnsupportedModel, match=f"layer_types has {name!r}"):
        read(unknown(layer_types=["full_attention"] * 5 + [name]))


@pytest.mark.parametrize(("fields", "words"), [
    ({"num_key_value_heads": 0}, "num_key_value_heads: got 0"),
    ({"head_dim": ..., "hidden_size": 66}, "hidden_size: got 66, must be a multiple"),
    ({"layer_types": ["full_attention"] * 5}, "layer_types: got .*has 5 entries"),
    ({"layer_types": ["sliding_attention"] * 6}, "layer_types: got .*layer 0 is 'sliding_attention'"),
    ({"layer_types": ["chunked_attention"] * 6}, "layer_types: got .*there is no attention_chunk_size"),
])  # fmt: skip
def test_a_wrong_value_is_an_error_of_its_field(fields: Config, words: str) -> None:
    """The generic rules check values as every reader does."""
    with pytest.raises(SpecError, match=words):
        read(unknown(**fields))


def test_an_unknown_multimodal_model_is_its_text_part() -> None:
    """The text part's own model_type decides: its reader, or the generic rules."""
    text = tiny("gemma2")
    assert read({"model_type": "wrapper", "text_config": text, "vision_config": {"num_layers": 2}}) == read(text)
    assert read({"model_type": "wrapper", "text_config": unknown()}) == read(unknown())


@pytest.mark.parametrize("name", FACT_NAMES)
def test_a_recorded_model_under_an_unknown_name_is_right_or_refused(name: str) -> None:
    """Without its family's reader a recorded model gives its own layers or a refusal, never other layers."""
    config = facts(name)["config"]
    spec = model_spec_from_config(config, name=name)
    text = config.get("text_config", config)
    assert isinstance(text, dict)
    try:
        outcome: ModelSpec | None = model_spec_from_config({**text, "model_type": "made_up"}, name=name)
    except UnsupportedModel:
        outcome = None
    assert outcome is None or outcome.layers == spec.layers


@pytest.mark.parametrize("fields", [
    {"model_type": "made_up_vision"},
    {"model_type": "t5gemma9_decoder"},
    {"model_type": "eurobert"},
    {"architectures": ["MadeUpForSequenceClassification"]},
    {"architectures": ["MadeUpModel"]},
])  # fmt: skip
def test_what_is_no_causal_model_is_refused(fields: Config) -> None:
    """An encoder keeps no cache, a half of a model not all of it: neither is priced as a decoder."""
    with pytest.raises(UnsupportedModel, match="does not look like a causal language model"):
        read({**unknown(), **fields})
    read({**unknown(), "architectures": ["MadeUpForCausalLM"]})


@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size"])
def test_attention_beside_a_window_is_ambiguous(field: str) -> None:
    """Older files call layers 'attention' that slide as well as layers that do not."""
    with pytest.raises(UnsupportedModel, match="may or may not slide"):
        read({**unknown(), "layer_types": ["attention"] * 6, field: 8})


def test_an_odd_name_stays_on_one_line() -> None:
    """A field whose name holds a line break is shown escaped."""
    with pytest.raises(UnsupportedModel) as caught:
        read({**unknown(), "mamba\nsize": 3})
    assert len(str(caught.value).splitlines()) == 1


def test_an_unknown_list_with_an_entry_a_layer_is_a_hint() -> None:
    """A list as long as the model is deep may mark layers that keep something else; one about experts does not."""
    with pytest.raises(UnsupportedModel, match="may say more about its caches: made_up_marks="):
        read({**unknown(), "made_up_marks": [0, 0, 1, 0, 0, 1]})
    read({**unknown(), "made_up_marks": [0, 1], "mlp_layer_types": ["dense"] * 6})
