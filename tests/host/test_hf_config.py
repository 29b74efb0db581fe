"""Claims about the specs read from a config.json."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridkv.hf_config import known_families, model_spec_from_config
from hybridkv.specs import ModelSpec
from tests.config_cases import (
    FACT_NAMES,
    ROOT,
    TYPE_NAMES,
    Config,
    F,
    S,
    as_fact,
    facts,
    kinds,
    read,
    shapes,
    tiny,
    windows,
)


@pytest.mark.parametrize("name", FACT_NAMES)
def test_spec_equals_the_facts(name: str) -> None:
    """Every layer, the totals and the bytes at three contexts are exactly those of the recorded model."""
    fact = facts(name)
    expected = fact["expected"]
    spec = model_spec_from_config(fact["config"], name=name)
    assert spec.num_layers == expected["num_layers"]
    by_kind = expected["caches_by_kind"]
    assert isinstance(by_kind, dict)
    layers = [[as_fact(cache) for cache in layer.caches] for layer in spec.layers]
    assert layers == [by_kind[kind] for kind in expected["layers"]]
    caches = [as_fact(cache) for _, _, cache in spec.owned_caches()]
    totals = expected["totals"]
    assert isinstance(totals, dict)
    assert sum(c["bytes_per_token"] for c in caches if c["kind"] == F) == totals["growing_kv_bytes_per_token"]
    assert sum(c["bytes_per_token"] for c in caches if c["kind"] == S) == totals["windowed_kv_bytes_per_token"]
    assert sum(c.get("cap_bytes", 0) for c in caches) == totals["windowed_kv_cap_bytes"]
    assert {kind: kinds(spec).count(kind) for kind in totals["layer_kind_counts"]} == totals["layer_kind_counts"]
    for context, num_bytes in totals["bytes_at_context"].items():
        assert sum(min(int(context), c.get("window", int(context))) * c["bytes_per_token"] for c in caches) == num_bytes


@pytest.mark.parametrize("name", FACT_NAMES)
def test_original_resaved_and_shipped_specs_are_equal(name: str) -> None:
    """A config saved again by transformers, the JSON round trip and the shipped file all give the original's spec."""
    spec = model_spec_from_config(facts(name)["config"], name=name)
    assert model_spec_from_config(facts(name, "resaved")["config"], name=name) == spec
    assert ModelSpec.from_json(spec.to_json()) == spec
    assert ModelSpec.load(name) == spec


def test_every_family_is_known_and_gemma_3_270m_is_shipped() -> None:
    """The registry lists the families, and a shipped model without recorded facts has its published layout."""
    assert {"llama", "gemma3", "gemma3_text", "mistral3", "gpt_oss"} <= set(known_families())
    spec = ModelSpec.load("gemma-3-270m")
    assert kinds(spec) == [S, S, S, S, S, F] * 3
    assert set(windows(spec)) == {512, None}
    assert shapes(spec) == {(1, 256)}
    assert spec.max_model_len == 32768


def test_qwen3_8b_is_shipped_as_its_config_says() -> None:
    """The other shipped model without recorded facts is what its published configuration gives."""
    config = {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 36,
    }
    spec = ModelSpec.load("Qwen3-8B")
    assert spec == model_spec_from_config(config, name="Qwen3-8B")
    assert kinds(spec) == [F] * 36
    assert shapes(spec) == {(8, 128)}


PATTERNS = [
    (tiny("llama"), [F] * 6),
    (tiny("llama", layer_types=["attention"] * 6), [F] * 6),
    (tiny("mistral"), [S] * 6),
    (tiny("mistral", sliding_window=None), [F] * 6),
    (tiny("mistral", sliding_window=8, layer_types=[TYPE_NAMES[k] for k in (F, S, S, F, S, S)]), [F, S, S, F, S, S]),
    (tiny("ministral3"), [F] * 6),
    (tiny("phi3", sliding_window=1000), [S] * 6),
    (tiny("qwen2", sliding_window=8, max_window_layers=4), [F] * 6),
    (tiny("qwen2", sliding_window=0, use_sliding_window=False), [F] * 6),
    (tiny("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=4), [F, F, F, F, S, S]),
    (tiny("qwen3", sliding_window=8, use_sliding_window=True, max_window_layers=0), [S] * 6),
    (tiny("gemma2"), [S, F, S, F, S, F]),
    (tiny("gemma2", sliding_window=None), [F] * 6),
    (tiny("gemma3_text", num_hidden_layers=8), [S, S, S, S, S, F, S, S]),
    (tiny("gemma3_text", sliding_window_pattern=2), [S, F] * 3),
    (tiny("gemma3_text", _sliding_window_pattern=6, layer_types=["full_attention"] * 6), [F] * 6),
    (tiny("gpt_oss"), [S, F] * 3),
    (tiny("cohere2"), [S, S, S, F, S, S]),
    (tiny("olmo3"), [S, S, S, F, S, S]),
    (tiny("cwm"), [F, S, S, S, F, S]),
    (tiny("exaone4", sliding_window_pattern="LLG"), [S, S, F, S, S, F]),
    (tiny("exaone4", sliding_window_pattern="LLL"), [S, S, S, S, S, F]),
    (tiny("exaone4", sliding_window_pattern=3), [S, S, F, S, S, F]),
    (tiny("exaone4", sliding_window=None, sliding_window_pattern=0), [F] * 6),
    (tiny("exaone4", sliding_window_pattern=4, layer_types=["full_attention"] * 6), [F] * 6),
    (tiny("smollm3", sliding_window=8), [F] * 6),
    (tiny("smollm3", sliding_window=8, use_sliding_window=True), [F, F, F, S, F, F]),
    (tiny("smollm3", sliding_window=8, use_sliding_window=True, no_rope_layers=[0, 1, 1, 1, 1, 0]), [S, F, F, F, F, S]),
]


def case_id(value: Config | list[str]) -> str:
    """Name a case by its model_type or its layers."""
    return str(value["model_type"]) if isinstance(value, dict) else "".join(kind[0] for kind in value)


@pytest.mark.parametrize(("config", "expected"), PATTERNS, ids=case_id)
def test_each_family_has_its_pattern(config: Config, expected: list[str]) -> None:
    """Missing, null, gated and explicit fields give the layer kinds of the family's rule."""
    assert kinds(read(config)) == expected


@pytest.mark.parametrize(("config", "expected"), [
    (tiny("llama", num_key_value_heads=..., head_dim=...), (4, 16)),
    (tiny("llama", num_key_value_heads=None, head_dim=None), (4, 16)),
    (tiny("llama", head_dim=24), (2, 24)),
    (tiny("mistral", num_attention_heads=16, num_key_value_heads=..., head_dim=...), (8, 4)),
    (tiny("gemma3_text", num_attention_heads=..., num_key_value_heads=..., head_dim=...), (4, 256)),
    (tiny("gpt_oss", head_dim=...), (2, 64)),
    (tiny("qwen3", head_dim=...), (2, 128)),
    (tiny("cohere2", head_dim=32), (2, 32)),
    (tiny("cohere2", head_dim=...), (2, 16)),
])  # fmt: skip
def test_geometry_is_explicit_default_or_derived(config: Config, expected: tuple[int, int]) -> None:
    """KV heads and head_dim come from the config, else from the class default, else from heads and hidden_size."""
    assert shapes(read(config)) == {expected}


def test_kv_dtype_is_an_option() -> None:
    """K and V have the dtype of the options, whatever the checkpoint's dtype."""
    spec = read(tiny("llama", torch_dtype="float16"), kv_dtype="float32")
    assert [tensor.dtype for tensor in spec.layers[5].caches[0].tensors] == ["float32", "float32"]


def test_bidirectional_gemma_keeps_half_the_window() -> None:
    """With use_bidirectional_attention the window is W//2+1; the even W that is saved again gives the same."""
    assert windows(read(tiny("gemma3_text", sliding_window=512, use_bidirectional_attention=True)))[0] == 257
    assert windows(read(tiny("gemma3_text", sliding_window=513, use_bidirectional_attention=True)))[0] == 257
    assert windows(read(tiny("gemma3_text", sliding_window=512, use_bidirectional_attention=None)))[0] == 512


@pytest.mark.parametrize("keys", [("4", "5"), ("04", "05"), (4, 5)], ids=repr)
def test_per_layer_config_overrides_single_layers(keys: tuple[str | int, str | int]) -> None:
    """Overrides reach exactly their layers, whether the key is a number, its text or zero-padded text."""
    overrides = {keys[0]: {"head_dim": 32, "num_key_value_heads": 1}, keys[1]: {"sliding_window": None}}
    spec = read(tiny("mistral", sliding_window=8, per_layer_config=overrides))
    assert windows(spec) == [8, 8, 8, 8, 8, None]
    assert [layer.caches[0].tensors[0].shape for layer in spec.layers] == [(2, 16)] * 4 + [(1, 32), (2, 16)]


def test_a_nested_text_config_is_read_alone() -> None:
    """Only the text part of a multimodal config counts: colliding names outside it are ignored."""
    text = {key: value for key, value in tiny("gemma3_text", sliding_window=8).items() if key != "model_type"}
    config: Config = {
        "model_type": "gemma3",
        "sliding_window": 4,
        "num_hidden_layers": 2,
        "text_config": text,
        "vision_config": {"head_dim": 3},
    }
    assert read(config) == read(tiny("gemma3_text", sliding_window=8))


def test_the_command_prints_the_shipped_spec(tmp_path: Path) -> None:
    """`python -m hybridkv.hf_config CONFIG NAME` prints the shipped file, and one line for a broken config."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(facts("gemma-3-4b")["config"]))
    command = [sys.executable, "-m", "hybridkv.hf_config"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    good = subprocess.run([*command, path, "gemma-3-4b"], capture_output=True, text=True, env=env, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout == (ROOT / "model_configs" / "gemma-3-4b.json").read_text()
    bad = subprocess.run([*command, tmp_path / "x", "x"], capture_output=True, text=True, env=env, check=False)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.count("\n") == 1
