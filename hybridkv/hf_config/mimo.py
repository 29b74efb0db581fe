"""MiMo-V2-Flash, whose sliding layers have KV heads of their own and whose V is narrower than K."""

from hybridkv.hf_config.attention import (
    FULL,
    SLIDING,
    Decoder,
    Defaults,
    LayerKind,
    decoder,
    explicit_kinds,
    num_layers,
    window,
)
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.overrides import layer_overrides
from hybridkv.hf_config.patterns import check_pattern, layer_marks

MIMO_V2_FLASH = Defaults(
    hidden_size=4096,
    num_hidden_layers=48,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=192,
    v_head_dim=128,
    max_position_embeddings=131072,
    sliding_window=129,
    null_derives=frozenset(),
)
_PATTERN = "hybrid_layer_pattern"


def mimo_v2_flash(fields: ConfigFields) -> Decoder:
    """MiMo-V2-Flash: 1 in `hybrid_layer_pattern` slides; by default layer 0 and every sixth are full.

    `sliding_window_size` counts the tokens before the current one, `sliding_window` the current one too;
    `attention_chunk_size` is a leftover.
    """
    kinds = _kinds(fields)
    before = fields.optional_integer("sliding_window_size", None, null_means="sliding_window")
    tokens = window(fields, MIMO_V2_FLASH) if before is None else before + 1
    overrides = _overrides(fields, kinds)
    return decoder(fields, MIMO_V2_FLASH, window_tokens=tokens, kinds=kinds, overrides=overrides)


def _kinds(fields: ConfigFields) -> tuple[LayerKind, ...]:
    count = num_layers(fields, MIMO_V2_FLASH)
    explicit = explicit_kinds(fields, MIMO_V2_FLASH)
    marks = layer_marks(fields, _PATTERN, count)
    if marks is None:
        default: list[LayerKind] = [FULL if layer == 0 or (layer + 1) % 6 == 0 else SLIDING for layer in range(count)]
        return explicit or tuple(default)
    pattern: tuple[LayerKind, ...] = tuple(SLIDING if mark else FULL for mark in marks)
    if explicit is not None:
        check_pattern(fields, _PATTERN, pattern, explicit)
    return pattern


def _overrides(fields: ConfigFields, kinds: tuple[LayerKind, ...]) -> dict[int, ConfigFields]:
    """Return what the sliding layers have of their own; `per_layer_config` goes before it."""
    heads = fields.integer("num_attention_heads", MIMO_V2_FLASH.num_attention_heads)
    num_kv_heads = fields.integer("num_key_value_heads", MIMO_V2_FLASH.num_key_value_heads)
    sliding = {
        "num_attention_heads": fields.integer("swa_num_attention_heads", heads),
        "num_key_value_heads": fields.integer("swa_num_key_value_heads", 2 * num_kv_heads),
        "head_dim": fields.integer("swa_head_dim", fields.integer("head_dim", MIMO_V2_FLASH.head_dim)),
        "v_head_dim": fields.integer("swa_v_head_dim", fields.integer("v_head_dim", MIMO_V2_FLASH.v_head_dim)),
    }
    explicit = layer_overrides(fields, len(kinds))
    overrides = {}
    for layer, kind in enumerate(kinds):
        own = explicit.get(layer)
        values = (sliding if kind == SLIDING else {}) | dict(own.values if own is not None else {})
        overrides[layer] = ConfigFields(own.where if own is not None else f"{fields.where}{kind}: ", values)
    return overrides
