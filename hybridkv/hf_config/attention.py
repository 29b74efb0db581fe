"""K and V caches of decoders whose layers are full, sliding or chunked attention.

The pipeline of every attention-only family:

    defaults + config -> geometry          how many layers, KV heads, head_dim
    the family's rule -> kind per layer    `layer_types`, else the family's pattern
    overrides         -> single layers     `per_layer_config`, or what the family says about one kind of layer
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hybridkv.errors import SpecError
from hybridkv.hf_config.caches import kv_cache
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.overrides import layer_overrides
from hybridkv.specs import ChunkedAttention, FullAttention, LayerSpec, Lifecycle, SlidingWindow

LayerKind = Literal["full_attention", "sliding_attention", "chunked_attention"]
FULL: LayerKind = "full_attention"
SLIDING: LayerKind = "sliding_attention"
CHUNKED: LayerKind = "chunked_attention"
MAX_LAYERS = 4096  # no model is near; refuses a typo before it becomes a million layers

_KIND_BY_NAME: dict[object, LayerKind] = {
    "full_attention": FULL,
    "attention": FULL,  # written by older versions of transformers
    "sliding_attention": SLIDING,
    "chunked_attention": CHUNKED,
}
_NO_WINDOW = "a layer without a window"
_NO_CHUNK = "a layer without chunks"


@dataclass(frozen=True)
class Defaults:
    """What a family's config class assumes for a missing key.

    `num_key_value_heads=None` means as many as query heads, `head_dim=None` means hidden_size / num_attention_heads.
    `null_derives` lists the fields for which an explicit null means the same. `v_head_dim=None` means that V is as wide
    as K, whatever the config says; `max_position_embeddings=None` that the family knows no longest context.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    max_position_embeddings: int | None
    head_dim: int | None = None
    v_head_dim: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    null_derives: frozenset[str] = frozenset({"num_key_value_heads", "head_dim"})


@dataclass(frozen=True)
class Decoder:
    """What a family reader makes of a config."""

    max_model_len: int | None
    layers: tuple[LayerSpec, ...]


def num_layers(fields: ConfigFields, defaults: Defaults) -> int:
    """Return `num_hidden_layers`."""
    return layer_count(fields, "num_hidden_layers", defaults.num_hidden_layers)


def layer_count(fields: ConfigFields, name: str, default: int | None) -> int:
    """Return the number of layers, under the name the family has for it."""
    count = fields.integer(name, default)
    if count > MAX_LAYERS:
        raise fields.error(name, f"must be at most {MAX_LAYERS}", "correct it")
    return count


def max_model_len(fields: ConfigFields, default: int | None, name: str = "max_position_embeddings") -> int | None:
    """Return the longest context, None for a family without a default where the key is missing or null."""
    if default is None and fields.raw(name) is None:
        return None
    return fields.integer(name, default)


def window(fields: ConfigFields, defaults: Defaults) -> int | None:
    """Return `sliding_window`, None where null switches it off."""
    return fields.optional_integer("sliding_window", defaults.sliding_window, null_means=_NO_WINDOW)


def chunk_size(fields: ConfigFields, defaults: Defaults) -> int | None:
    """Return `attention_chunk_size`, None where null switches it off."""
    return fields.optional_integer("attention_chunk_size", defaults.attention_chunk_size, null_means=_NO_CHUNK)


def refuse_spans(fields: ConfigFields) -> None:
    """Refuse a window or a chunk size in a family that attends to every token."""
    for name in ("sliding_window", "attention_chunk_size"):
        if fields.raw(name) is not None:
            raise fields.error(name, "this family attends to every token", "set it to null, or correct model_type")


def gated_window(fields: ConfigFields, defaults: Defaults) -> int | None:
    """Return `sliding_window` if `use_sliding_window`, else None: behind a closed gate the field is inert."""
    return window(fields, defaults) if fields.flag("use_sliding_window", False) else None


def explicit_kinds(
    fields: ConfigFields, defaults: Defaults, allowed: Sequence[LayerKind] = (FULL, SLIDING)
) -> tuple[LayerKind, ...] | None:
    """Return `layer_types` checked for names and length, None where the config has none."""
    names = fields.optional_list("layer_types")
    if names is None:
        return None
    count = num_layers(fields, defaults)
    kinds = [_KIND_BY_NAME.get(name) if isinstance(name, str) else None for name in names]
    for layer, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if kind not in allowed:
            raise fields.error(
                "layer_types",
                f"entry {layer} must be one of {', '.join(map(repr, allowed))}, is {name!r:.60}",
                "correct the entry",
            )
    if len(names) != count:
        source = "" if fields.has("num_hidden_layers") else ", the default of the family"
        raise fields.error(
            "layer_types", f"has {len(names)} entries, num_hidden_layers is {count}{source}", "give one entry per layer"
        )
    return tuple(kind for kind in kinds if kind is not None)


def layer_kinds(
    fields: ConfigFields, defaults: Defaults, window_tokens: int | None, pattern: Sequence[LayerKind]
) -> tuple[LayerKind, ...]:
    """Return the kind of each layer: `layer_types` if present, else the family's pattern.

    Without a window the pattern means nothing, so all layers are full; a `layer_types` that says otherwise is an error.
    """
    explicit = explicit_kinds(fields, defaults)
    if explicit is None:
        return tuple(pattern) if window_tokens is not None else (FULL,) * len(pattern)
    return explicit


def decoder(
    fields: ConfigFields,
    defaults: Defaults,
    *,
    window_tokens: int | None,
    kinds: Sequence[LayerKind] | None,
    overrides: Mapping[int, ConfigFields] | None = None,
) -> Decoder:
    """Build every layer of an attention-only decoder.

    `kinds=None`: the family has one rule for all layers, a layer slides exactly if it has a window.
    `overrides=None`: those of `per_layer_config`.
    """
    count = num_layers(fields, defaults)
    own_by_layer = layer_overrides(fields, count) if overrides is None else overrides
    layers = []
    for layer in range(count):
        own = own_by_layer.get(layer)
        lifecycle = _lifecycle(fields, own, defaults, window_tokens, None if kinds is None else (layer, kinds[layer]))
        num_kv_heads, head_dim = kv_geometry(fields, defaults, own)
        v_head_dim = None
        if defaults.v_head_dim is not None:
            v_head_dim = _source(fields, own, "v_head_dim").integer("v_head_dim", defaults.v_head_dim)
        cache = kv_cache(lifecycle, num_kv_heads, head_dim, v_head_dim=v_head_dim)
        layers.append(LayerSpec(layer=layer, caches=(cache,)))
    if kinds is None:
        _check_agrees(fields, defaults, layers)
    return Decoder(max_model_len(fields, defaults.max_position_embeddings), tuple(layers))


def _source(fields: ConfigFields, own: ConfigFields | None, name: str) -> ConfigFields:
    """Return where one layer's value of a field stands."""
    return own if own is not None and own.has(name) else fields


def _lifecycle(
    fields: ConfigFields,
    own: ConfigFields | None,
    defaults: Defaults,
    window_tokens: int | None,
    listed: tuple[int, LayerKind] | None,
) -> Lifecycle:
    """Return what one layer keeps; `listed` is its index and kind, None where the window decides."""
    if own is not None and own.has("sliding_window"):
        window_tokens = own.optional_integer("sliding_window", None, null_means=_NO_WINDOW)
    layer, kind = listed if listed is not None else (-1, FULL if window_tokens is None else SLIDING)
    if kind == CHUNKED:
        tokens = chunk_size(_source(fields, own, "attention_chunk_size"), defaults)
        if tokens is None:
            rule = f"layer {layer} is {CHUNKED!r}, but there is no attention_chunk_size"
            raise fields.error("layer_types", rule, "set the chunk size, or make the layer 'full_attention'")
        return ChunkedAttention(chunk=tokens)
    if own is not None and own.raw("attention_chunk_size") is not None:
        raise own.error("attention_chunk_size", "this layer has no chunked attention", "remove it")
    if kind == FULL:
        return FullAttention()
    if window_tokens is None:
        raise _slides_without_window(fields, own, layer)
    return SlidingWindow(window=window_tokens)


def kv_geometry(fields: ConfigFields, defaults: Defaults, own: ConfigFields | None = None) -> tuple[int, int]:
    """Return (num_kv_heads, head_dim) of one layer; `own` holds its overrides."""
    heads = _source(fields, own, "num_attention_heads").integer("num_attention_heads", defaults.num_attention_heads)
    kv_fields = _source(fields, own, "num_key_value_heads")
    num_kv_heads = _integer_or_derived(kv_fields, "num_key_value_heads", defaults.num_key_value_heads, defaults)
    if num_kv_heads is None:
        num_kv_heads = heads
    if heads % num_kv_heads:
        raise kv_fields.error("num_key_value_heads", f"must divide num_attention_heads {heads}", "correct one of them")
    head_dim = _integer_or_derived(_source(fields, own, "head_dim"), "head_dim", defaults.head_dim, defaults)
    if head_dim is None:
        head_dim = _derived_head_dim(_source(fields, own, "hidden_size"), heads, defaults)
    return num_kv_heads, head_dim


def _integer_or_derived(fields: ConfigFields, name: str, default: int | None, defaults: Defaults) -> int | None:
    if default is None or name in defaults.null_derives:
        meaning = "num_attention_heads" if name == "num_key_value_heads" else "hidden_size / num_attention_heads"
        return fields.optional_integer(name, default, null_means=meaning)
    return fields.integer(name, default)


def _derived_head_dim(fields: ConfigFields, heads: int, defaults: Defaults) -> int:
    hidden_size = fields.integer("hidden_size", defaults.hidden_size)
    if hidden_size % heads:
        raise fields.error(
            "hidden_size",
            f"must be a multiple of num_attention_heads {heads} where head_dim is absent",
            "correct one of them, or give head_dim",
        )
    return hidden_size // heads


def _check_agrees(fields: ConfigFields, defaults: Defaults, layers: list[LayerSpec]) -> None:
    """Refuse a `layer_types` that differs from the one rule of a family that does not read it."""
    explicit = explicit_kinds(fields, defaults)
    if explicit is None:
        return
    for spec, kind in zip(layers, explicit, strict=True):
        actual = SLIDING if isinstance(spec.caches[0].lifecycle, SlidingWindow) else FULL
        if kind != actual:
            raise fields.error(
                "layer_types",
                f"entry {spec.layer} is {kind!r}, but sliding_window makes all layers of this family {actual!r}",
                "correct sliding_window or remove layer_types",
            )


def _slides_without_window(fields: ConfigFields, own: ConfigFields | None, layer: int) -> SpecError:
    source = own if own is not None and own.has("sliding_window") else fields
    if source.has("sliding_window") and source.raw("sliding_window") is None:
        reason = "sliding_window is null"
    elif fields.raw("use_sliding_window") is not True:
        reason = "use_sliding_window is false"
    else:
        reason = "there is no sliding_window"
    return fields.error(
        "layer_types",
        f"layer {layer} is 'sliding_attention', but {reason}",
        "set the window, or make the layer 'full_attention'",
    )
