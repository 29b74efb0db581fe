"""Claims about layer specs."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from pydantic import BaseModel, ValidationError

from hybridkv.errors import SpecError
from hybridkv.specs import (
    CacheTensor,
    FullAttention,
    LayerCache,
    LayerSpec,
    ModelSpec,
    SlidingWindow,
    known_models,
)
from tests.strategies import model_specs

Path_ = tuple[str | int, ...]

_K = {"name": "k", "shape": [2, 4], "dtype": "bfloat16"}
_WINDOW_8 = {"kind": "sliding_window", "window": 8}
_CONV = {"name": "conv", "kind": "per_sequence", "shape": [8, 3], "dtype": "bfloat16"}
VALID: dict[str, object] = {
    "name": "tiny",
    "model_type": "test",
    "max_model_len": 64,
    "layers": [
        {"layer": 0, "caches": [{"lifecycle": _WINDOW_8, "tensors": [_K]}]},
        {"layer": 1, "caches": [{"lifecycle": _WINDOW_8, "shares_kv_with": 0}]},
        {"layer": 2, "caches": [{"lifecycle": {"kind": "state", "family": "mamba2"}, "tensors": [_CONV]}]},
        {"layer": 3, "caches": [{"lifecycle": {"kind": "full_attention"}, "tensors": [_K]}]},
        {"layer": 4},
    ],
}
CACHE0: Path_ = ("layers", 0, "caches", 0)
LIFE0: Path_ = (*CACHE0, "lifecycle")
TENSOR0: Path_ = (*CACHE0, "tensors", 0)
SHARE1: Path_ = ("layers", 1, "caches", 0, "shares_kv_with")
DELETE = object()


def edited(*edits: tuple[Path_, object]) -> str:
    """Return the valid spec as JSON with each path set to its value, or deleted."""
    root = json.loads(json.dumps(VALID))
    for path, value in edits:
        node: object = root
        for part in path[:-1]:
            node = node[part]  # type: ignore[index]
        if value is DELETE:
            del node[path[-1]]  # type: ignore[attr-defined]
        else:
            node[path[-1]] = value  # type: ignore[index]
    return json.dumps(root)


def positive(name: str, path: Path_, field: str, fix: str) -> list[object]:
    """Cases of an integer that must be at least 1."""
    bad: list[tuple[object, str, str, str]] = [
        (0, "got 0", "greater than or equal to 1", fix),
        (-3, "got -3", "greater than or equal to 1", fix),
        (True, "got True", "valid integer", ""),
        (8.0, "got 8.0", "valid integer", ""),
        ("8", "got '8'", "valid integer", ""),
    ]
    return [pytest.param(((path, value),), (field, *words), id=f"{name}-{value!r}") for value, *words in bad]


CASES = [
    *positive("window", (*LIFE0, "window"), "window", "use full_attention for a layer without a window"),
    *positive("shape", (*TENSOR0, "shape", 0), "shape", "give at least one dimension"),
    *positive("tokens_per_entry", (*TENSOR0, "tokens_per_entry"), "tokens_per_entry", "1 stores every token"),
    *positive("max_model_len", ("max_model_len",), "max_model_len", ""),
    pytest.param(
        ((LIFE0, {"kind": "chunked_attention", "chunk": 0}),), ("chunk", "got 0", "full_attention"), id="chunk-0"
    ),
    pytest.param(
        ((LIFE0, {"kind": "cross_attention", "max_source_tokens": 0}),),
        ("max_source_tokens", "got 0", "longest source"),
        id="source-0",
    ),
    pytest.param(
        (((*TENSOR0, "shape"), []),), ("shape", "got []", "at least 1 item", "at least one dimension"), id="shape-empty"
    ),
    pytest.param((((*TENSOR0, "shape"), 8),), ("shape", "got 8", "tuple", "at least one dimension"), id="shape-scalar"),
    pytest.param(
        (((*TENSOR0, "dtype"), "bf16"),), ("dtype", "'bf16'", "bfloat16", "listed values"), id="dtype-unknown"
    ),
    pytest.param(
        (((*TENSOR0, "dtype"), DELETE),), ("dtype", "got nothing", "required", "add the field"), id="dtype-missing"
    ),
    pytest.param((((*TENSOR0, "name"), ""),), ("name", "got ''", "at least 1 character"), id="tensor-name-empty"),
    pytest.param(
        (((*TENSOR0, "kind"), "per_block"),), ("kind", "'per_block'", "per_token", "listed"), id="tensor-kind"
    ),
    pytest.param(
        (((*TENSOR0, "kind"), "per_sequence"),),
        ("tensors", "'k'", "per_sequence", "wants per_token", "change"),
        id="tensor-kind-of-token-cache",
    ),
    pytest.param(
        ((("layers", 2, "caches", 0, "tensors"), [_K]),),
        ("tensors", "'k'", "wants per_sequence", "change"),
        id="state-with-per-token-tensor",
    ),
    pytest.param(
        (((*CACHE0, "tensors"), [_K, _K]),), ("tensors", "['k', 'k']", "must differ", "rename"), id="tensor-twice"
    ),
    pytest.param(
        (((*CACHE0, "tensors"), []),), ("tensors", "at least one tensor", "remove the cache"), id="tensors-empty"
    ),
    pytest.param(
        (((*LIFE0, "kind"), "rolling"),), ("lifecycle", "rolling", "sliding_window", "listed kinds"), id="kind-unknown"
    ),
    pytest.param((((*LIFE0, "kind"), DELETE),), ("lifecycle", "kind", "add the field `kind`"), id="kind-missing"),
    pytest.param((((*LIFE0, "window"), DELETE),), ("window", "got nothing", "required"), id="window-missing"),
    pytest.param(
        (((*LIFE0, "windows"), 8),), ("windows", "got 8", "not permitted", "known fields", "spelling"), id="extra"
    ),
    pytest.param(
        ((("layers", 2, "caches", 0, "lifecycle", "family"), "mamba3"),),
        ("family", "'mamba3'", "mamba2", "listed"),
        id="state-family",
    ),
    pytest.param(((SHARE1, 9),), ("shares_kv_with", "got 9", "layers 0..4", "point it at"), id="share-dangling"),
    pytest.param(((SHARE1, 1),), ("shares_kv_with", "got 1", "earlier layer", "point it at"), id="share-self"),
    pytest.param(((SHARE1, 2),), ("shares_kv_with", "got 2", "earlier layer", "point it at"), id="share-forward"),
    pytest.param(
        ((SHARE1, -1),),
        ("shares_kv_with", "got -1", "greater than or equal to 0", "earlier layer"),
        id="share-negative",
    ),
    pytest.param(((SHARE1, True),), ("shares_kv_with", "got True", "valid integer"), id="share-bool"),
    pytest.param(
        ((("layers", 2, "caches"), [{"lifecycle": _WINDOW_8, "shares_kv_with": 1}]),),
        ("shares_kv_with", "got 1", "owns no cache itself", "owns the bytes"),
        id="share-of-share",
    ),
    pytest.param(
        ((("layers", 1, "caches", 0, "lifecycle"), {"kind": "full_attention"}),),
        ("shares_kv_with", "got 0", "sliding_window", "one lifecycle"),
        id="share-across-kinds",
    ),
    pytest.param(
        ((("layers", 1, "caches", 0, "lifecycle", "window"), 16),),
        ("shares_kv_with", "got 0", "window=16", "one lifecycle"),
        id="share-across-windows",
    ),
    pytest.param(
        ((("layers", 1, "caches", 0, "tensors"), [_K]),),
        ("tensors", "must be empty", "owns no bytes", "remove one"),
        id="share-with-tensors",
    ),
    pytest.param(((("layers",), []),), ("layers", "got []", "at least 1 item", "list every layer"), id="model-empty"),
    pytest.param(
        ((("layers",), [{"layer": 0}]),), ("layers", "no layer owns a cache", "needs no cache manager"), id="no-caches"
    ),
    pytest.param(
        ((("layers", 3, "layer"), 2),), ("layers", "layer 2 at position 3", "duplicate", "number"), id="layer-twice"
    ),
    pytest.param(
        ((("layers", 3, "layer"), 4),), ("layers", "layer 4 at position 3", "out of order", "number"), id="layer-order"
    ),
    pytest.param(
        ((("layers", 0, "layer"), -1),), ("layer", "got -1", "greater than or equal to 0"), id="layer-negative"
    ),
    pytest.param(((("name",), ""),), ("name", "got ''", "at least 1 character"), id="name-empty"),
    pytest.param(
        ((("model_type",), 3),), ("model_type", "got 3", "valid string", "give a string"), id="model_type-number"
    ),
    pytest.param(((("name",), DELETE),), ("name", "got nothing", "required", "add the field"), id="name-missing"),
    pytest.param(
        ((("vocab_size",), 9),), ("vocab_size", "got 9", "not permitted", "max_model_len", "remove"), id="extra-top"
    ),
]


@pytest.mark.parametrize(("edits", "words"), CASES)
def test_a_wrong_value_is_one_line_with_field_value_rule_and_fix(
    edits: tuple[tuple[Path_, object], ...], words: tuple[str, ...]
) -> None:
    """Each wrong value gives exactly one line that names the field, the value, the rule and what to do."""
    with pytest.raises(SpecError) as caught:
        ModelSpec.from_json(edited(*edits), "tiny.json")
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("tiny.json: ")
    assert ";" in text
    assert [word for word in words if word not in text] == []


def test_several_problems_give_one_line_each() -> None:
    """Two independent wrong values are reported together, a line each."""
    with pytest.raises(SpecError) as caught:
        ModelSpec.from_json(edited(((*LIFE0, "window"), 0), ((*TENSOR0, "dtype"), "bf16")), "tiny.json")
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert "window" in lines[0]
    assert "dtype" in lines[1]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7", b"\xff\xfe{"], ids=repr)
def test_text_that_is_no_spec_is_a_spec_error(text: str | bytes) -> None:
    """Text that is no JSON object gives a one-line SpecError, never another exception."""
    with pytest.raises(SpecError, match=r"^model spec: ") as caught:
        ModelSpec.from_json(text)
    assert "\n" not in str(caught.value)


def test_python_construction_explains_too() -> None:
    """A spec built in Python raises a ValueError with the same field, value, rule and fix."""
    with pytest.raises(ValidationError, match=r"window: got 0, .* greater than or equal to 1; use full_attention"):
        SlidingWindow(window=0)


def test_the_valid_spec_is_valid() -> None:
    """The spec that the wrong cases start from is accepted, so each case fails for its own reason."""
    spec = ModelSpec.from_json(edited())
    assert spec.num_layers == 5
    assert [(layer, idx) for layer, idx, _ in spec.owned_caches()] == [(0, 0), (2, 0), (3, 0)]


@settings(deadline=None)
@given(model_specs())
def test_json_round_trip_is_the_identity(spec: ModelSpec) -> None:
    """Writing any spec as JSON and reading it back gives an equal spec with equal text."""
    text = spec.to_json()
    assert ModelSpec.from_json(text) == spec
    assert ModelSpec.from_json(text).to_json() == text


FROZEN: list[tuple[BaseModel, str]] = [
    (FullAttention(), "kind"),
    (SlidingWindow(window=8), "window"),
    (CacheTensor(name="k", shape=(2, 4), dtype="int8"), "shape"),
    (LayerSpec(layer=0), "caches"),
    (LayerCache(lifecycle=FullAttention(), tensors=(CacheTensor(name="k", shape=(1,), dtype="int8"),)), "tensors"),
]


@pytest.mark.parametrize(("value", "field"), FROZEN, ids=lambda value: type(value).__name__)
def test_specs_are_frozen(value: BaseModel, field: str) -> None:
    """No field of a spec can be assigned after construction, and equal specs hash alike."""
    with pytest.raises(ValidationError, match="frozen"):
        setattr(value, field, getattr(value, field))
    assert hash(value) == hash(value.model_copy())


def test_bytes_count_dtype_shape_and_entries() -> None:
    """Bytes follow dtype, shape and the tokens an entry stands for; a state costs by the sequence."""
    token = CacheTensor(name="k", shape=(2, 4), dtype="bfloat16")
    every_fourth = CacheTensor(name="k", shape=(2, 4), dtype="float32", tokens_per_entry=4)
    state = CacheTensor(name="conv", kind="per_sequence", shape=(8, 3), dtype="float32")
    assert [tensor.entry_bytes for tensor in (token, every_fourth, state)] == [16, 32, 96]
    assert LayerCache(lifecycle=FullAttention(), tensors=(every_fourth,)).bytes_per_token == 8


def test_load_by_path_by_name_or_not_at_all(tmp_path: Path) -> None:
    """A spec loads from a file or by its name; anything else is an error that lists the known names."""
    path = tmp_path / "mine.json"
    path.write_text(edited())
    assert ModelSpec.load(path).name == ModelSpec.load(str(path)).name == "tiny"
    assert ModelSpec.load("gemma-3-1b").model_type == "gemma3_text"
    with pytest.raises(SpecError, match=r"'gemma-9'.*no such name; known names: .*gemma-3-1b"):
        ModelSpec.load("gemma-9")


def test_load_names_the_broken_file(tmp_path: Path) -> None:
    """A broken file is reported with its path."""
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(SpecError, match=r"broken\.json"):
        ModelSpec.load(path)


@pytest.mark.parametrize("name", known_models())
def test_shipped_specs_are_what_to_json_writes(name: str) -> None:
    """Every shipped file loads under its own name and is byte for byte what `to_json` writes."""
    spec = ModelSpec.load(name)
    path = Path(__file__).parents[2] / "model_configs" / f"{name}.json"
    assert spec.name == name
    assert path.read_text() == spec.to_json()
