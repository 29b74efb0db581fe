"""LFM2: gated short convolutions between full attention."""

from hybridkv.hf_config.attention import Decoder, Defaults, max_model_len, num_layers
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.hybrid import (
    ATTENTION,
    STATE,
    Keeps,
    full_attention,
    hybrid_decoder,
    indexed_layers,
    listed_layers,
    stated_layers,
)
from hybridkv.hf_config.states import kernel_size, short_conv_state
from hybridkv.specs import LayerCache

LFM2 = Defaults(
    hidden_size=2560,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=128000,
    null_derives=frozenset({"head_dim"}),
)
LFM2_MOE = Defaults(
    hidden_size=2048,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=128000,
    null_derives=frozenset({"head_dim"}),
)
_NAMES: dict[object, Keeps] = {"conv": STATE, "attention": ATTENTION, "full_attention": ATTENTION}


def lfm2(fields: ConfigFields) -> Decoder:
    """LFM2."""
    return _decoder(fields, LFM2)


def lfm2_moe(fields: ConfigFields) -> Decoder:
    """LFM2 with experts."""
    return _decoder(fields, LFM2_MOE)


def _layers(fields: ConfigFields, count: int) -> tuple[Keeps, ...]:
    """Return the layers: `layer_types`, else `full_attn_idxs`; without both, every layer attends."""
    stated = {
        "layer_types": listed_layers(fields, "layer_types", _NAMES, count),
        "full_attn_idxs": indexed_layers(fields, "full_attn_idxs", count, ATTENTION, STATE),
    }
    return stated_layers(fields, stated) or (ATTENTION,) * count


def _decoder(fields: ConfigFields, defaults: Defaults) -> Decoder:
    def state(layer: ConfigFields) -> LayerCache:
        channels = layer.optional_integer("conv_dim", None, null_means="hidden_size")
        if channels is None:
            channels = layer.integer("hidden_size", defaults.hidden_size)
        return short_conv_state(channels, kernel_size(layer, "conv_L_cache", 3))

    return hybrid_decoder(
        fields,
        _layers(fields, num_layers(fields, defaults)),
        attention=lambda layer: full_attention(layer, defaults),
        state=state,
        max_len=max_model_len(fields, defaults.max_position_embeddings),
    )
