"""K and V caches of decoders whose layers are full or sliding attention.

The pipeline of every attention-only family:

    defaults + config -> Geometry          how many layers, KV heads, head_dim
    the family's rule -> kind per layer    `layer_types`, else the family's pattern
    per_layer_config  -> overrides         num_key_value_heads, head_dim, sliding_window of single layers
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hybridkv.errors import SpecError
from hybridkv.hf_config.caches import kv_cache
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.options import CacheOptions
from hybridkv.hf_config.overrides import layer_overrides
from hybridkv.specs import FullAttention, LayerSpec, Lifecycle, SlidingWindow

LayerKind = Literal["full_attention", "sliding_attention"]
FULL: LayerKind = "full_attention"
SLIDING: LayerKind = "sliding_attention"
MAX_LAYERS = 4096  # no model is near; refuses a typo before it becomes a million layers

_KIND_BY_NAME: dict[object, LayerKind] = {
    "full_attention": FULL,
    "attention": FULL,  # written by older versions of transformers
    "sliding_attention": SLIDING,
}
_NO_WINDOW = "a layer without a window"


@dataclass(frozen=True)
class Defaults:
    """What a family's config class assumes for a missing key.

    `num_key_value_heads=None` means as many as query heads, `head_dim=None` means hidden_size / num_attention_heads.
    `null_derives` lists the fields for which an explicit null means the same.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    max_position_embeddings: int
    head_dim: int | None = None
    sliding_window: int | None = None
    null_derives: frozenset[str] = frozenset({"num_key_value_heads", "head_dim"})


@dataclass(frozen=True)
class Decoder:
    """What a family reader makes of a config."""

    max_model_len: int
    layers: tuple[LayerSpec, ...]


def num_layers(fields: ConfigFields, defaults: Defaults) -> int:
    """Return `num_hidden_layers`."""
    count = fields.integer("num_hidden_layers", defaults.num_hidden_layers)
    if count > MAX_LAYERS:
        raise fields.error("num_hidden_layers", f"must be at most {MAX_LAYERS}", "correct it")
    return count


def window(fields: ConfigFields, defaults: Defaults) -> int | None:
    """Return `sliding_window`, None where null switches it off."""
    return fields.optional_integer("sliding_window", defaults.sliding_window, null_means=_NO_WINDOW)


def gated_window(fields: ConfigFields, defaults: Defaults) -> int | None:
    """Return `sliding_window` if `use_sliding_window`, else None: behind a closed gate the field is inert."""
    return window(fields, defaults) if fields.flag("use_sliding_window", False) else None


def explicit_kinds(fields: ConfigFields, defaults: Defaults) -> tuple[LayerKind, ...] | None:
    """Return `layer_types` checked for names and length, None where the config has none."""
    names = fields.optional_list("layer_types")
    if names is None:
        return None
    count = num_layers(fields, defaults)
    for layer, name in enumerate(names):
        if not isinstance(name, str) or name not in _KIND_BY_NAME:
            raise fields.error(
                "layer_types",
                f"entry {layer} must be one of {', '.join(map(repr, (FULL, SLIDING)))}, is {name!r:.60}",
                "correct the entry",
            )
    if len(names) != count:
        source = "" if fields.has("num_hidden_layers") else ", the default of the family"
        raise fields.error(
            "layer_types", f"has {len(names)} entries, num_hidden_layers is {count}{source}", "give one entry per layer"
        )
    return tuple(_KIND_BY_NAME[name] for name in names)


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
    options: CacheOptions,
    defaults: Defaults,
    *,
    window_tokens: int | None,
    kinds: Sequence[LayerKind] | None,
) -> Decoder:
    """Build every layer of an attention-only decoder.

    `kinds=None`: the family has one rule for all layers, a layer slides exactly if it has a window.
    """
    count = num_layers(fields, defaults)
    overrides = layer_overrides(fields, count)
    layers = []
    for layer in range(count):
        own = overrides.get(layer)
        tokens = window_tokens
        if own is not None and own.has("sliding_window"):
            tokens = own.optional_integer("sliding_window", None, null_means=_NO_WINDOW)
        slides = tokens is not None if kinds is None else kinds[layer] == SLIDING
        lifecycle: Lifecycle = FullAttention()
        if slides:
            if tokens is None:
                raise _slides_without_window(fields, own, layer)
            lifecycle = SlidingWindow(window=tokens)
        num_kv_heads, head_dim = _geometry(fields, own, defaults)
        layers.append(LayerSpec(layer=layer, caches=(kv_cache(lifecycle, num_kv_heads, head_dim, options),)))
    if kinds is None:
        _check_agrees(fields, defaults, layers)
    return Decoder(fields.integer("max_position_embeddings", defaults.max_position_embeddings), tuple(layers))


def _geometry(fields: ConfigFields, own: ConfigFields | None, defaults: Defaults) -> tuple[int, int]:
    """Return (num_kv_heads, head_dim) of one layer; `own` holds its overrides."""

    def source(name: str) -> ConfigFields:
        return own if own is not None and own.has(name) else fields

    heads = source("num_attention_heads").integer("num_attention_heads", defaults.num_attention_heads)
    kv_fields = source("num_key_value_heads")
    num_kv_heads = _integer_or_derived(kv_fields, "num_key_value_heads", defaults.num_key_value_heads, defaults)
    if num_kv_heads is None:
        num_kv_heads = heads
    if heads % num_kv_heads:
        raise kv_fields.error("num_key_value_heads", f"must divide num_attention_heads {heads}", "correct one of them")
    head_dim = _integer_or_derived(source("head_dim"), "head_dim", defaults.head_dim, defaults)
    if head_dim is None:
        head_dim = _derived_head_dim(source("hidden_size"), heads, defaults)
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
