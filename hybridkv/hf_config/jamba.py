"""Jamba: one attention layer a period, Mamba between."""

from hybridkv.hf_config.attention import Decoder, Defaults, max_model_len, num_layers
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
from hybridkv.hf_config.states import kernel_size, mamba1_state
from hybridkv.specs import LayerCache

JAMBA = Defaults(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=262144,
    null_derives=frozenset({"head_dim"}),
)


def jamba(fields: ConfigFields) -> Decoder:
    """Jamba: layer i attends where `i % attn_layer_period == attn_layer_offset`."""

    def state(layer: ConfigFields) -> LayerCache:
        return mamba1_state(
            layer.integer("mamba_expand", 2) * layer.integer("hidden_size", JAMBA.hidden_size),
            layer.integer("mamba_d_state", 16),
            kernel_size(layer, "mamba_d_conv", 4),
        )

    count = num_layers(fields, JAMBA)
    periodic = _periodic(fields, count)
    lists = ("layers_block_type", "layer_types")
    listed = {name: listed_layers(fields, name, LAYER_NAMES, count) for name in lists}
    stated_layers(fields, {"attn_layer_period": periodic, **listed})
    return hybrid_decoder(
        fields,
        periodic,
        attention=lambda layer: full_attention(layer, JAMBA),
        state=state,
        max_len=max_model_len(fields, JAMBA.max_position_embeddings),
    )


def _periodic(fields: ConfigFields, count: int) -> tuple[Keeps, ...]:
    period = fields.integer("attn_layer_period", 8)
    offset = fields.integer("attn_layer_offset", 4, at_least=0)
    if offset >= period:
        raise fields.error("attn_layer_offset", f"{offset} must be below attn_layer_period {period}", "correct it")
    return tuple(ATTENTION if layer % period == offset else STATE for layer in range(count))
