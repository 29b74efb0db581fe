"""Claims about the specs read from a config.json."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridkv.hf_config import known_families, model_spec_from_config
from hybridkv.specs import ModelSpec, known_models
from tests.config_cases import (
    FACT_NAMES,
    RESAVED_NAMES,
    ROOT,
    TYPE_NAMES,
    UNRECORDED,
    Config,
    F,
    S,
    expected_layers,
    facts,
    kinds,
    layer_as_fact,
    read,
    shapes,
    tiny,
    totals,
    windows,
)


def test_the_facts_are_all_there() -> None:
    """67 recorded models, 64 of them saved again by transformers too."""
    assert (len(FACT_NAMES), len(RESAVED_NAMES)) == (67, 64)
    assert set(RESAVED_NAMES) < set(FACT_NAMES)


@pytest.mark.parametrize("name", FACT_NAMES)
def test_spec_equals_the_facts(name: str) -> None:
    """Every cache of every layer, the totals and the bytes at three contexts are exactly those of the record."""
    fact = facts(name)
    expected = fact["expected"]
    spec = model_spec_from_config(fact["config"], name=name)
    assert spec.num_layers == expected["num_layers"]
    assert [layer_as_fact(layer) for layer in spec.layers] == expected_layers(expected)
    assert totals(spec) == expected["totals"]


@pytest.mark.parametrize("name", RESAVED_NAMES)
def test_a_resaved_config_gives_an_equal_spec(name: str) -> None:
    """A config that transformers saved again gives the original's spec."""
    original = model_spec_from_config(facts(name)["config"], name=name)
    assert model_spec_from_config(facts(name, "resaved")["config"], name=name) == original


SHIPPED: dict[str, Config] = {name: facts(name)["config"] for name in FACT_NAMES} | UNRECORDED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_spec_is_what_its_config_gives(name: str) -> None:
    """The shipped file is the spec's JSON, loads as an equal spec, and has one line per layer."""
    spec = model_spec_from_config(SHIPPED[name], name=name)
    text = (ROOT / "model_configs" / f"{name}.json").read_text()
    assert text == spec.to_json()
    assert ModelSpec.load(name) == spec
    lines = [json.loads(line.rstrip(",")) for line in text.splitlines() if line.startswith('  {"layer":')]
    assert [line["layer"] for line in lines] == list(range(spec.num_layers))


def test_the_shipped_specs_are_the_recorded_models_and_two_more() -> None:
    """The folder holds one JSON per model and nothing else."""
    assert known_models() == sorted(SHIPPED)
    assert sorted(path.name for path in (ROOT / "model_configs").iterdir()) == sorted(f"{n}.json" for n in SHIPPED)


def test_every_family_of_the_facts_is_known() -> None:
    """Both the outer and the text model_type of each record have a reader of their own."""
    configs = [facts(name)["config"] for name in FACT_NAMES]
    nested = [config["text_config"] for config in configs if "text_config" in config]
    assert {config["model_type"] for config in [*configs, *nested]} <= set(known_families())


def test_gemma_3_270m_has_its_published_layout() -> None:
    """A shipped model without recorded facts has the layers its report describes."""
    spec = ModelSpec.load("gemma-3-270m")
    assert kinds(spec) == [S, S, S, S, S, F] * 3
    assert set(windows(spec)) == {512, None}
    assert shapes(spec) == {(1, 256)}
    assert spec.max_model_len == 32768


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
    (tiny("qwen2_vl", sliding_window=8, use_sliding_window=True, max_window_layers=4), [F, F, F, F, S, S]),
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


def test_reading_a_config_loads_neither_torch_nor_transformers() -> None:
    """In a fresh interpreter, reading every recorded config imports none of the heavy packages."""
    code = (
        "import sys; from tests.config_cases import FACT_NAMES, facts, read\n"
        "for name in FACT_NAMES: read(facts(name)['config'])\n"
        "print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert result.stdout == "[]\n"


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
