"""Gemma 3n, Gemma 4: the last layers read the caches of earlier ones."""

from dataclasses import replace

from hybridkv.hf_config.attention import FULL, Decoder, Defaults, LayerKind, decoder, layer_kinds, num_layers, window
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.gemma import half_window
from hybridkv.hf_config.overrides import layer_overrides
from hybridkv.hf_config.patterns import last_of_period_full
from hybridkv.hf_config.sharing import last_of_kind_owners, share_caches

GEMMA3N = Defaults(
    hidden_size=2048,
    num_hidden_layers=35,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    max_position_embeddings=32768,
    sliding_window=512,
    null_derives=frozenset(),
)
GEMMA4 = Defaults(
    hidden_size=2304,
    num_hidden_layers=30,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131072,
    sliding_window=512,
    null_derives=frozenset(),
)
GEMMA4_UNIFIED = replace(GEMMA4, max_position_embeddings=262144, sliding_window=1024)


def gemma3n_text(fields: ConfigFields) -> Decoder:
    """Gemma 3n: four layers slide, one is full; the last `num_kv_shared_layers` (15 by default) own nothing."""
    tokens = window(fields, GEMMA3N)
    kinds = layer_kinds(fields, GEMMA3N, tokens, last_of_period_full(num_layers(fields, GEMMA3N), 5))
    owners = last_of_kind_owners(fields, kinds, default=15)
    plain = decoder(fields, GEMMA3N, window_tokens=tokens, kinds=kinds)
    return replace(plain, layers=share_caches(plain.layers, owners))


def gemma4_text(fields: ConfigFields) -> Decoder:
    """Gemma 4: five layers slide, one is full, the last always; full layers have their own head_dim, KV heads.

    `attention_k_eq_v` shares the projection only: K and V are both kept, normalised differently.
    """
    return _gemma4(fields, GEMMA4)


def gemma4_unified_text(fields: ConfigFields) -> Decoder:
    """Gemma 4 unified: Gemma 4 with a longer window by default."""
    return _gemma4(fields, GEMMA4_UNIFIED)


def _gemma4(fields: ConfigFields, defaults: Defaults) -> Decoder:
    tokens = window(fields, defaults)
    if tokens is not None and _is_bidirectional(fields):
        tokens = half_window(tokens)
    kinds = layer_kinds(fields, defaults, tokens, last_of_period_full(num_layers(fields, defaults), 6))
    kinds = (*kinds[:-1], FULL)
    owners = last_of_kind_owners(fields, kinds, default=0)
    overrides = _overrides(fields, kinds)
    plain = decoder(fields, defaults, window_tokens=tokens, kinds=kinds, overrides=overrides)
    return replace(plain, layers=share_caches(plain.layers, owners))


def _is_bidirectional(fields: ConfigFields) -> bool:
    name = "use_bidirectional_attention"
    if fields.raw(name) is not None and fields.raw(name) not in ("all", "vision"):
        raise fields.error(name, "must be 'all', 'vision' or null", "correct it")
    return fields.raw(name) == "all"


def _overrides(fields: ConfigFields, kinds: tuple[LayerKind, ...]) -> dict[int, ConfigFields]:
    """Return `per_layer_config`, which saved files have instead of the fields of the full layers, or these fields."""
    if fields.has("per_layer_config"):
        return layer_overrides(fields, len(kinds))
    values: dict[str, object] = {"head_dim": fields.integer("global_head_dim", 512)}
    name = "num_global_key_value_heads"
    if fields.flag("attention_k_eq_v", False):
        num_kv_heads = fields.optional_integer(name, None, null_means="as many as in the sliding layers")
        heads = fields.integer("num_attention_heads", GEMMA4.num_attention_heads)
        if num_kv_heads is not None:
            if heads % num_kv_heads:
                raise fields.error(name, f"must divide num_attention_heads {heads}", "correct one of them")
            values["num_key_value_heads"] = num_kv_heads
    own = ConfigFields(f"{fields.where}full layers: ", values)
    return {layer: own for layer, kind in enumerate(kinds) if kind == FULL}
