"""MiniMax-Text-01: lightning attention between full attention."""

from hybridkv.hf_config.attention import Decoder, Defaults, kv_geometry, max_model_len, num_layers
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.hybrid import (
    ATTENTION,
    LAYER_NAMES,
    STATE,
    Keeps,
    full_attention,
    hybrid_decoder,
    listed_layers,
    stated_layers,
)
from hybridkv.hf_config.states import lightning_state
from hybridkv.specs import LayerCache

MINIMAX = Defaults(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    null_derives=frozenset({"head_dim"}),
)
_NUMBERS: dict[object, Keeps] = {0: STATE, 1: ATTENTION}


def minimax(fields: ConfigFields) -> Decoder:
    """MiniMax as transformers writes it: without `layer_types`, layers 0, 2, 4, ... attend."""
    count = num_layers(fields, MINIMAX)
    default = tuple(STATE if layer % 2 else ATTENTION for layer in range(count))
    return _decoder(fields, _stated(fields, count) or default)


def minimax_text_01(fields: ConfigFields) -> Decoder:
    """MiniMax as released: `attn_type_list` says 0 for lightning, 1 for attention."""
    layers = _stated(fields, num_layers(fields, MINIMAX))
    if layers is None:
        raise fields.error("attn_type_list", "must say what each layer is", "give one entry of 0 or 1 per layer")
    return _decoder(fields, layers)


def _stated(fields: ConfigFields, count: int) -> tuple[Keeps, ...] | None:
    stated = {
        "layer_types": listed_layers(fields, "layer_types", LAYER_NAMES, count),
        "attn_type_list": listed_layers(fields, "attn_type_list", _NUMBERS, count),
    }
    return stated_layers(fields, stated)


def _decoder(fields: ConfigFields, layers: tuple[Keeps, ...]) -> Decoder:
    def state(layer: ConfigFields) -> LayerCache:
        _, head_dim = kv_geometry(layer, MINIMAX)
        num_heads = layer.integer("num_attention_heads", MINIMAX.num_attention_heads)  # not the KV heads
        return lightning_state(num_heads, head_dim)

    return hybrid_decoder(
        fields,
        layers,
        attention=lambda layer: full_attention(layer, MINIMAX),
        state=state,
        max_len=max_model_len(fields, MINIMAX.max_position_embeddings),
    )
