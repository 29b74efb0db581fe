"""Layers that read another layer's cache."""

from collections.abc import Mapping, Sequence

from hybridkv.hf_config.attention import LayerKind
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.specs import LayerCache, LayerSpec


def share_caches(layers: Sequence[LayerSpec], owner_by_layer: Mapping[int, int]) -> tuple[LayerSpec, ...]:
    """Return the layers, each one of `owner_by_layer` reading the caches of its owner instead of keeping its own."""

    def shared(layer: LayerSpec) -> LayerSpec:
        if layer.layer not in owner_by_layer:
            return layer
        owner = owner_by_layer[layer.layer]
        caches = [LayerCache(lifecycle=cache.lifecycle, shares_kv_with=owner) for cache in layers[owner].caches]
        return LayerSpec(layer=layer.layer, caches=tuple(caches))

    return tuple(shared(layer) for layer in layers)


def last_of_kind_owners(fields: ConfigFields, kinds: Sequence[LayerKind], default: int) -> dict[int, int]:
    """Return the owner of each of the last `num_kv_shared_layers`: the last earlier layer of the same kind that owns.

    Raises: SpecError if no layer is left to own a kind.
    """
    name = "num_kv_shared_layers"
    first_shared = len(kinds) - fields.integer(name, default, at_least=0)
    if first_shared < 1:
        raise fields.error(name, f"must leave at least one of {len(kinds)} layers with caches", "correct it")
    last_of_kind = {kind: layer for layer, kind in enumerate(kinds[:first_shared])}
    for layer in range(first_shared, len(kinds)):
        if kinds[layer] not in last_of_kind:
            rule = f"layer {layer} would share with a {kinds[layer]!r} layer, but none of the first {first_shared} is"
            raise fields.error(name, rule, "correct it, or layer_types")
    return {layer: last_of_kind[kinds[layer]] for layer in range(first_shared, len(kinds))}
