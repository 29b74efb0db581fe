"""Claims about configs that cannot be read."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import CheckpointError, SpecError, UnsupportedModel
from hybridkv.hf_config import model_spec_from_config, read_config
from hybridkv.specs import ModelSpec
from tests.config_cases import FACT_NAMES, Config, facts, read, tiny

WRONG = [
    (tiny("llama", num_key_value_heads=0), ["num_key_value_heads: got 0", "at least 1", "use null"]),
    (tiny("llama", num_key_value_heads=3), ["num_key_value_heads: got 3", "divide num_attention_heads 4", "correct"]),
    (
        tiny("llama", num_attention_heads=3, head_dim=..., num_key_value_heads=...),
        ["hidden_size: got 64", "multiple", "head_dim"],
    ),
    (tiny("llama", num_hidden_layers=None), ["num_hidden_layers: got null", "at least 1", "remove it for 32"]),
    (tiny("llama", num_hidden_layers=10**12), ["num_hidden_layers: got 1000000000000", "at most", "correct"]),
    (tiny("llama", head_dim=16.0), ["head_dim: got 16.0", "integer", "null"]),
    (tiny("llama", head_dim=True), ["head_dim: got true", "integer"]),
    (tiny("llama", max_position_embeddings="256"), ["max_position_embeddings: got '256'", "integer"]),
    (tiny("llama", sliding_window=8), ["sliding_window: got 8", "attends to every token", "set it to null"]),
    (tiny("mistral", sliding_window=0), ["sliding_window: got 0", "at least 1", "null for a layer without a window"]),
    (tiny("mistral", sliding_window=-8), ["sliding_window: got -8", "at least 1"]),
    (tiny("gemma2", head_dim=None), ["head_dim: got null", "integer", "remove it for 256"]),
    (tiny("gemma2", layer_types=["full_attention"] * 5), ["layer_types: got", "5 entries", "num_hidden_layers is 6"]),
    (tiny("gemma2", layer_types=["global"] * 6), ["layer_types: got", "entry 0", "'sliding_attention'", "'global'"]),
    (tiny("gemma2", layer_types="full_attention"), ["layer_types: got 'full_attention'", "list"]),
    (
        tiny("gemma2", layer_types=["sliding_attention"] * 6, sliding_window=None),
        ["layer 0", "sliding_window is null", "set the window"],
    ),
    (
        tiny("qwen2", layer_types=["sliding_attention"] * 6),
        ["layer 0", "use_sliding_window is false", "full_attention"],
    ),
    (tiny("qwen2", use_sliding_window=1), ["use_sliding_window: got 1", "true or false"]),
    (
        tiny("phi3", sliding_window=8, layer_types=["full_attention"] * 6),
        ["layer_types: got", "entry 0", "remove layer_types"],
    ),
    (tiny("gemma3_text", sliding_window_pattern=0), ["sliding_window_pattern: got 0", "at least 1"]),
    (
        tiny("gemma3_text", sliding_window_pattern=3, layer_types=["full_attention"] * 6),
        ["sliding_window_pattern: got 3", "contradicts layer_types", "layer 0", "remove the wrong one"],
    ),
    (
        tiny("exaone4", sliding_window_pattern="LLLG"),
        ["sliding_window_pattern: got 'LLLG'", "length 4", "layers 6", "layer_types"],
    ),
    (tiny("exaone4", sliding_window_pattern="LLX"), ["sliding_window_pattern: got 'LLX'", "letters", "correct"]),
    (
        tiny("smollm3", use_sliding_window=True, sliding_window=8, no_rope_layers=[1]),
        ["no_rope_layers: got [1]", "must be 6"],
    ),
    (tiny("llama", per_layer_config={"6": {}}), ["per_layer_config: got", "key '6'", "0..5", "correct the key"]),
    (tiny("llama", per_layer_config={"4": {}, "04": {}}), ["per_layer_config: got", "layer 4 comes twice", "merge"]),
    (tiny("llama", per_layer_config={"4": {"head_dim": 0}}), ["per_layer_config.4.head_dim: got 0", "at least 1"]),
    ({"model_type": "gemma3", "text_config": None}, ["text_config: got null", "object", "nested config"]),
    ({}, ["model_type: got nothing", "string", "add"]),
]


@pytest.mark.parametrize(("config", "words"), WRONG, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_a_wrong_config_is_one_line_with_field_value_rule_and_fix(config: Config, words: list[str]) -> None:
    """Each wrong field gives one line with the config's name, the field, the value, the rule and what to do."""
    with pytest.raises(SpecError) as caught:
        read(config)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("config of 'tiny': ")
    assert ";" in text
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(("config", "words"), [
    (tiny("mamba2", state_size=128),
     ["'mamba2'", "no reader", "known: cohere2", "state_size=128", "num_hidden_layers=6"]),
    ({"model_type": "llava", "text_config": tiny("llama")}, ["'llava'", "pass its text_config alone", "'llama'"]),
    ({"model_type": "llava", "text_config": {"model_type": ["llama"]}}, ["'llava'", "write its ModelSpec by hand"]),
    ({"model_type": "gemma3", "text_config": {"model_type": "mamba"}}, ["text_config.model_type", "'mamba'", "none"]),
    (tiny("hunyuan_v1_dense", use_cla=True), ["use_cla: got true", "no reader", "set it to false"]),
    (tiny("llama", per_layer_config={"1": {"skip": ["attention"]}}), ["per_layer_config.1.skip", "no known caches"]),
])  # fmt: skip
def test_what_no_reader_explains_is_unsupported(config: Config, words: list[str]) -> None:
    """An unregistered model_type is refused with the known families and the telling fields, never guessed."""
    with pytest.raises(UnsupportedModel) as caught:
        read(config)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


JUNK = st.sampled_from(
    [
        None,
        0,
        -1,
        1,
        3,
        2**70,
        1.5,
        True,
        "",
        "x",
        "LLG",
        [],
        [1],
        ["sliding_attention"],
        {},
        {"0": {}},
        {"0": {"head_dim": 0}},
    ]
)
FIELDS = [
    "sliding_window",
    "layer_types",
    "sliding_window_pattern",
    "head_dim",
    "num_key_value_heads",
    "use_sliding_window",
    "per_layer_config",
    "model_type",
    "text_config",
    "no_rope_layers",
    "max_window_layers",
    "num_attention_heads",
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FACT_NAMES), st.booleans(), st.data())
def test_a_mutated_config_gives_a_spec_or_one_line(name: str, resaved: bool, data: st.DataObject) -> None:
    """Fields deleted, nulled, zeroed, retyped or misplaced give a valid spec or a one-line SpecError, nothing else."""
    config = facts(name, "resaved" if resaved else "")["config"]
    for _ in range(data.draw(st.integers(min_value=1, max_value=3))):
        nested = config.get("text_config")
        target: Config = nested if isinstance(nested, dict) and data.draw(st.booleans()) else config
        field = data.draw(st.sampled_from(sorted(target.keys() | set(FIELDS))))
        if data.draw(st.booleans()):
            target.pop(field, None)
        else:
            target[field] = data.draw(JUNK)
    try:
        outcome: ModelSpec | str = model_spec_from_config(config, name=name)
    except SpecError as error:
        outcome = str(error)
    if isinstance(outcome, str):
        assert outcome.startswith("config of ")
        assert ";" in outcome
        assert "\n" not in outcome
    else:
        assert ModelSpec.from_json(outcome.to_json()) == outcome


def test_read_config_takes_a_folder_or_a_file(tmp_path: Path) -> None:
    """A checkpoint folder and its config.json read alike."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_config(tmp_path) == read_config(str(tmp_path / "config.json")) == {"model_type": "llama"}


@pytest.mark.parametrize(("content", "words"), [
    (None, "no config.json; give a checkpoint folder"),
    ("{", "not valid JSON"),
    ("[1]", "holds a list"),
    pytest.param("[" * 99999, "not valid JSON", id="deep"),
])  # fmt: skip
def test_read_config_explains_a_broken_checkpoint(tmp_path: Path, content: str | None, words: str) -> None:
    """A folder without config.json, a file without a JSON object, a missing path each give one CheckpointError line."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        read_config(tmp_path / "absent")
