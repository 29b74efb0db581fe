"""Claims about configs that cannot be read."""

from pathlib import Path

import pytest

from hybridkv.errors import CheckpointError, SpecError
from hybridkv.hf_config import read_config
from tests.config_cases import Config, read, tiny

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
    (
        tiny("smollm3", use_sliding_window=True, sliding_window=8, no_rope_layers=[]),
        ["no_rope_layers: got []", "must be 6"],
    ),
    (tiny("llama4_text", no_rope_layers=[2] * 6), ["no_rope_layers: got", "6 (num_hidden_layers) entries of 0 or 1"]),
    (
        tiny("llama4_text", no_rope_layers=[1] * 6, layer_types=["full_attention"] * 6),
        ["no_rope_layers: got", "contradicts layer_types", "layer 0", "remove the wrong one"],
    ),
    (
        tiny("llama4_text", attention_chunk_size=None, layer_types=["chunked_attention"] * 6),
        ["layer_types: got", "layer 0", "no attention_chunk_size", "set the chunk size"],
    ),
    (tiny("llama4_text", layer_types=["sliding_attention"] * 6), ["entry 0", "'chunked_attention'", "correct"]),
    (tiny("gemma2", layer_types=["chunked_attention"] * 6), ["entry 0", "'sliding_attention'", "correct"]),
    (
        tiny("mimo_v2_flash", hybrid_layer_pattern=[0] * 6, layer_types=["sliding_attention"] * 6),
        ["hybrid_layer_pattern: got", "contradicts layer_types", "layer 0"],
    ),
    (tiny("mimo_v2_flash", hybrid_layer_pattern=[0, 1]), ["hybrid_layer_pattern: got [0, 1]", "must be 6"]),
    (tiny("nemotron_h", hybrid_override_pattern="M*-EX*"), ["hybrid_override_pattern: got 'M*-EX*'"]),
    (
        tiny("gemma4_text", use_bidirectional_attention=True),
        ["use_bidirectional_attention: got true", "'all', 'vision'"],
    ),
    (tiny("deepseek_v3", sliding_window=8), ["sliding_window: got 8", "attends to every token", "set it to null"]),
    (tiny("deepseek_v32", layer_types=["indexed_attention"]), ["layer_types: got", "has 1 entries", "is 6"]),
    (
        tiny("mistral", sliding_window=8, per_layer_config={"2": {"attention_chunk_size": 4}}),
        ["per_layer_config.2.attention_chunk_size: got 4", "no chunked attention", "remove it"],
    ),
    ({"model_type": "llama4"}, ["text_config: got nothing", "object", "nested config"]),
    (
        {"model_type": "gemma3", "text_config": tiny("gemma3")},
        ["text_config.model_type: got 'gemma3'", "a multimodal model inside another", "correct it"],
    ),
    ({"model_type": "llava", "text_config": []}, ["text_config: got []", "object", "nested config"]),
    ({"model_type": "llava", "text_config": {"num_hidden_layers": 2}}, ["text_config.model_type: got nothing"]),
    (
        {"model_type": "whisper", "d_model": 64, "decoder_attention_heads": 5},
        ["d_model: got 64", "multiple of decoder_attention_heads 5"],
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
