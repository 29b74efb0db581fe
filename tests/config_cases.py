"""Configs to read: recorded ones, tiny ones."""

import json
from pathlib import Path

from hybridkv.hf_config import CacheOptions, model_spec_from_config
from hybridkv.specs import LayerCache, ModelSpec, SlidingWindow

ROOT = Path(__file__).parents[1]
FACTS = ROOT / "tests" / "data" / "model_facts"
FACT_NAMES = sorted(path.stem for path in FACTS.glob("*.json"))
F, S = "full", "sliding"
TYPE_NAMES = {F: "full_attention", S: "sliding_attention"}
Config = dict[str, object]


def facts(name: str, folder: str = "") -> dict[str, Config]:
    """Return one file of facts."""
    loaded: dict[str, Config] = json.loads((FACTS / folder / f"{name}.json").read_text())
    return loaded


def tiny(model_type: str, **fields: object) -> Config:
    """Return a config of six small layers; a field set to `...` is left out."""
    config: Config = {
        "model_type": model_type,
        "num_hidden_layers": 6,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        **fields,
    }
    return {key: value for key, value in config.items() if value is not ...}


def read(config: Config, **options: object) -> ModelSpec:
    """Read a config under a fixed name."""
    return model_spec_from_config(config, name="tiny", options=CacheOptions.model_validate(options))


def kinds(spec: ModelSpec) -> list[str]:
    """Return the kind of each layer."""
    return [S if isinstance(layer.caches[0].lifecycle, SlidingWindow) else F for layer in spec.layers]


def windows(spec: ModelSpec) -> list[int | None]:
    """Return the window of each layer."""
    lifecycles = [layer.caches[0].lifecycle for layer in spec.layers]
    return [life.window if isinstance(life, SlidingWindow) else None for life in lifecycles]


def shapes(spec: ModelSpec) -> set[tuple[int, ...]]:
    """Return the distinct shapes of cache tensors."""
    return {tensor.shape for _, _, cache in spec.owned_caches() for tensor in cache.tensors}


def as_fact(cache: LayerCache) -> Config:
    """Write a layer cache the way the facts do."""
    key, value = cache.tensors
    num_bytes = int(cache.bytes_per_token)
    fact: Config = {
        "kind": F,
        "type": "kv",
        "dtype": key.dtype,
        "num_kv_heads": key.shape[0],
        "head_dim": key.shape[1],
        "v_head_dim": value.shape[1],
        "bytes_per_token": num_bytes,
    }
    if isinstance(cache.lifecycle, SlidingWindow):
        fact |= {"kind": S, "window": cache.lifecycle.window, "cap_bytes": cache.lifecycle.window * num_bytes}
    return fact
