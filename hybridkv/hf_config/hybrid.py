"""Decoders whose layers differ in what they keep: attention, a recurrent state, both, nothing.

The pipeline of every family:

    lists, patterns, periods of the config -> kind per layer     a config may state it twice, but not in contradiction
    kind + the family's builders           -> caches of a layer   `per_layer_config` of a layer wins over the config
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from hybridkv.hf_config.attention import MAX_LAYERS, Decoder, Defaults, kv_geometry, refuse_spans
from hybridkv.hf_config.caches import kv_cache
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.overrides import layer_overrides
from hybridkv.specs import FullAttention, LayerCache, LayerSpec

Keeps = Literal["attention", "state", "attention and state", "nothing"]
ATTENTION: Keeps = "attention"
STATE: Keeps = "state"
BOTH: Keeps = "attention and state"
NOTHING: Keeps = "nothing"

# what configs call the layers: first the older names, then the canonical ones that transformers writes
LAYER_NAMES: Mapping[object, Keeps] = {
    "mamba": STATE,
    "attention": ATTENTION,
    "linear_attention": STATE,
    "full_attention": ATTENTION,
}
_ONE_IS_WRONG = "remove the wrong one"
CacheBuilder = Callable[[ConfigFields], LayerCache]


def listed_layers(
    fields: ConfigFields, name: str, names: Mapping[object, Keeps], count: int | None
) -> tuple[Keeps, ...] | None:
    """Return the layers a list names one by one, None where the config has no such list.

    `count` is the number of layers, None where the list alone decides it.
    """
    entries = fields.optional_list(name)
    if entries is None:
        return None
    for layer, entry in enumerate(entries):
        if not isinstance(entry, str | int) or isinstance(entry, bool) or entry not in names:
            allowed = ", ".join(map(repr, names))
            raise fields.error(name, f"entry {layer} must be one of {allowed}, is {entry!r:.60}", "correct the entry")
    if count is not None and len(entries) != count:
        raise fields.error(
            name, f"has {len(entries)} entries, num_hidden_layers is {count}", "give one entry per layer"
        )
    if not 1 <= len(entries) <= MAX_LAYERS:
        raise fields.error(name, f"must have 1..{MAX_LAYERS} entries", "give one entry per layer")
    return tuple(names[entry] for entry in entries)


def indexed_layers(
    fields: ConfigFields, name: str, count: int, inside: Keeps, outside: Keeps
) -> tuple[Keeps, ...] | None:
    """Return `inside` for the layers whose indices a list holds, `outside` for the others; None without a list."""
    indices = fields.layer_indices(name, count)
    if indices is None:
        return None
    return tuple(inside if layer in indices else outside for layer in range(count))


def every_nth_attends(count: int, period: int) -> tuple[Keeps, ...]:
    """Every `period`-th layer has attention, counted from 1, the others a state."""
    return tuple(STATE if (layer + 1) % period else ATTENTION for layer in range(count))


def stated_layers(fields: ConfigFields, stated: Mapping[str, tuple[Keeps, ...] | None]) -> tuple[Keeps, ...] | None:
    """Return what the config states about its layers, by field name; None if it states nothing.

    Raises: SpecError if two fields contradict each other: one of them is wrong, and nothing says which.
    """
    given = [(name, layers) for name, layers in stated.items() if layers is not None]
    if not given:
        return None
    first_name, first = given[0]
    for name, layers in given[1:]:
        rule = f"contradicts {first_name}"
        if len(layers) != len(first):
            raise fields.error(name, f"{rule}: {len(layers)} layers, {first_name} has {len(first)}", _ONE_IS_WRONG)
        for layer, (own, other) in enumerate(zip(layers, first, strict=True)):
            if own != other:
                found = f"layer {layer} would keep {own}, {first_name} says {other}"
                raise fields.error(name, f"{rule}: {found}", _ONE_IS_WRONG)
    return first


def full_attention(fields: ConfigFields, defaults: Defaults) -> LayerCache:
    """Return K and V of a layer with full attention, the only attention of these families."""
    if fields.raw("use_sliding_window") is not False:
        refuse_spans(fields)
    num_kv_heads, head_dim = kv_geometry(fields, defaults)
    return kv_cache(FullAttention(), num_kv_heads, head_dim)


def hybrid_decoder(
    fields: ConfigFields,
    layers: Sequence[Keeps],
    *,
    attention: CacheBuilder | None = None,
    state: CacheBuilder,
    max_len: int | None,
) -> Decoder:
    """Build every layer; a builder gets the config with the layer's own overrides laid over it.

    A layer with attention and a state keeps them in this order.
    """
    overrides = layer_overrides(fields, len(layers))
    specs = []
    for layer, keeps in enumerate(layers):
        source = fields
        if layer in overrides:
            own = overrides[layer]
            source = ConfigFields(own.where, {**fields.values, **own.values}, fields)
        caches = []
        if attention is not None and keeps in (ATTENTION, BOTH):
            caches.append(attention(source))
        if keeps in (STATE, BOTH):
            caches.append(state(source))
        specs.append(LayerSpec(layer=layer, caches=tuple(caches)))
    return Decoder(max_len, tuple(specs))
