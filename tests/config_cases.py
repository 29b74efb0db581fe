"""Configs to read: recorded ones, tiny ones; specs written the way the records are."""

import json
from pathlib import Path

from hybridkv.hf_config import CacheOptions, model_spec_from_config
from hybridkv.specs import (
    ChunkedAttention,
    CrossAttention,
    LayerCache,
    LayerSpec,
    ModelSpec,
    SlidingWindow,
    State,
)

ROOT = Path(__file__).parents[1]
FACTS = ROOT / "tests" / "data" / "model_facts"
FACT_NAMES = sorted(path.stem for path in FACTS.glob("*.json"))
RESAVED_NAMES = sorted(path.stem for path in FACTS.glob("resaved/*.json"))
F, S, C = "full", "sliding", "chunked"
TYPE_NAMES = {F: "full_attention", S: "sliding_attention", C: "chunked_attention"}
Config = dict[str, object]

# shipped models without a record: what their published config.json says about caches
UNRECORDED: dict[str, Config] = {
    "gemma-3-270m": {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "num_attention_heads": 4,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "_sliding_window_pattern": 6,
    },
    "Qwen3-8B": {
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
    },
}


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
    """Return the kind of each layer as the facts write it; a layer that reads layer j is `=j`."""
    return [_kind(layer) for layer in spec.layers]


def _kind(layer: LayerSpec) -> str:
    names = [_cache_kind(cache) if cache.tensors else f"={cache.shares_kv_with}" for cache in layer.caches]
    return "+".join(names) or "none"


def _cache_kind(cache: LayerCache) -> str:
    if isinstance(cache.lifecycle, State):
        return cache.lifecycle.family.replace("gated_delta_net", "gated_delta")
    by_tensor = {"latent": "mla", "index_k": "indexer"}
    kind = cache.lifecycle.kind.removesuffix("_attention").removesuffix("_window")
    return by_tensor.get(cache.tensors[0].name, kind)


def windows(spec: ModelSpec) -> list[int | None]:
    """Return the window or the chunk of each layer."""
    spans = {SlidingWindow: "window", ChunkedAttention: "chunk"}
    lifecycles = [layer.caches[0].lifecycle for layer in spec.layers]
    return [getattr(life, spans[type(life)]) if type(life) in spans else None for life in lifecycles]


def shapes(spec: ModelSpec) -> set[tuple[int, ...]]:
    """Return the distinct shapes of cache tensors."""
    return {tensor.shape for _, _, cache in spec.owned_caches() for tensor in cache.tensors}


def layer_as_fact(layer: LayerSpec) -> list[Config]:
    """Write what a layer keeps the way the facts do."""
    shares = [cache.shares_kv_with for cache in layer.caches if cache.shares_kv_with is not None]
    return [{"kind": "shares_kv_with", "layer": j} for j in shares] + [as_fact(c) for c in layer.caches if c.tensors]


def as_fact(cache: LayerCache) -> Config:
    """Write a layer cache the way the facts do."""
    kind = _cache_kind(cache)
    if isinstance(cache.lifecycle, State):
        states = [
            {"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "bytes": t.entry_bytes} for t in cache.tensors
        ]
        return {"kind": kind, "type": "state", "states": states, "bytes_per_seq": cache.bytes_per_sequence}
    key, *value = cache.tensors
    num_bytes = int(cache.bytes_per_token)
    fact: Config = {
        "kind": kind,
        "type": "kv",
        "dtype": key.dtype,
        "num_kv_heads": key.shape[0],
        "head_dim": key.shape[1],
        "v_head_dim": value[0].shape[1] if value else 0,
        "bytes_per_token": num_bytes,
    }
    if isinstance(cache.lifecycle, SlidingWindow):
        fact |= {"window": cache.lifecycle.window, "cap_bytes": cache.lifecycle.window * num_bytes}
    if isinstance(cache.lifecycle, ChunkedAttention):
        fact |= {"chunk": cache.lifecycle.chunk, "cap_bytes": cache.lifecycle.chunk * num_bytes}
    if isinstance(cache.lifecycle, CrossAttention):
        source = cache.lifecycle.max_source_tokens
        fact |= {"encoder_tokens": source, "fixed_bytes": source * num_bytes}
    return fact


def expected_layers(expected: Config) -> list[list[Config]]:
    """Return what the facts say about each layer, without what they say twice."""
    by_kind, layers = expected["caches_by_kind"], expected["layers"]
    assert isinstance(by_kind, dict)
    assert isinstance(layers, list)
    twice = ("kv_lora_rank", "qk_rope_head_dim", "bytes_per_token_fp8")
    plain = {
        kind: [{key: value for key, value in cache.items() if key not in twice} for cache in caches]
        for kind, caches in by_kind.items()
    }
    return [[kind] if isinstance(kind, dict) else plain[kind] for kind in layers]


def totals(spec: ModelSpec) -> Config:
    """Return the totals of a spec under the names of the facts."""
    caches = [as_fact(cache) for _, _, cache in spec.owned_caches()]

    def total(field: str, *only: str) -> int:
        return sum(int(str(cache.get(field, 0))) for cache in caches if cache["kind"] in only or not only)

    counts: dict[str, int] = {}
    for kind in kinds(spec):
        name = "shares_kv_with" if kind.startswith("=") else kind
        counts[name] = counts.get(name, 0) + 1
    growing = total("bytes_per_token", F, "mla", "indexer")
    state, cross = total("bytes_per_seq"), total("fixed_bytes")

    def at(context: int) -> int:
        spans = [(int(str(c.get("window", c.get("chunk")))), c) for c in caches if c["kind"] in (S, C)]
        windowed = sum(min(context, span) * int(str(cache["bytes_per_token"])) for span, cache in spans)
        return growing * context + windowed + state + cross

    return {
        "growing_kv_bytes_per_token": growing,
        "windowed_kv_bytes_per_token": total("bytes_per_token", S, C),
        "windowed_kv_cap_bytes": total("cap_bytes"),
        "state_bytes_per_seq": state,
        "cross_kv_fixed_bytes": cross,
        "layer_kind_counts": counts,
        "bytes_at_context": {str(context): at(context) for context in (4096, 32768, 131072)},
    }
