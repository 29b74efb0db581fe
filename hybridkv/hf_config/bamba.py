"""Bamba, Granite 4.0 H, Falcon-H1: Mamba-2 under one set of field names."""

from collections.abc import Callable

from hybridkv.hf_config.attention import Decoder, Defaults, max_model_len, num_layers
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.hybrid import (
    ATTENTION,
    BOTH,
    LAYER_NAMES,
    STATE,
    Keeps,
    full_attention,
    hybrid_decoder,
    indexed_layers,
    listed_layers,
    stated_layers,
)
from hybridkv.hf_config.states import Mamba2Sizes, kernel_size, mamba2_state
from hybridkv.specs import LayerCache

BAMBA = Defaults(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=262144,
)
GRANITE_HYBRID = Defaults(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    max_position_embeddings=2048,
)
FALCON_H1 = Defaults(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)


def bamba(fields: ConfigFields) -> Decoder:
    """Bamba: the layers in `attn_layer_indices` attend, all others have a state."""
    count = num_layers(fields, BAMBA)
    indexed = indexed_layers(fields, "attn_layer_indices", count, ATTENTION, STATE)
    lists = ("layers_block_type", "layer_types")
    listed = {name: listed_layers(fields, name, LAYER_NAMES, count) for name in lists}
    layers = stated_layers(fields, {"attn_layer_indices": indexed, **listed}) or (STATE,) * count
    return _decoder(fields, BAMBA, layers)


def granitemoehybrid(fields: ConfigFields) -> Decoder:
    """Granite 4.0: `layer_types`; without them every layer has a state."""
    count = num_layers(fields, GRANITE_HYBRID)
    lists = ("layer_types", "layers_block_type")
    listed = {name: listed_layers(fields, name, LAYER_NAMES, count) for name in lists}
    return _decoder(fields, GRANITE_HYBRID, stated_layers(fields, listed) or (STATE,) * count)


def falcon_h1(fields: ConfigFields) -> Decoder:
    """Falcon-H1: every layer runs attention and Mamba-2 side by side, `mamba_d_ssm` wide if that is not null."""
    count = num_layers(fields, FALCON_H1)
    stated = {
        "model_type": (BOTH,) * count,
        "attn_layer_indices": indexed_layers(fields, "attn_layer_indices", count, BOTH, STATE),
        "layers_block_type": listed_layers(fields, "layers_block_type", {"hybrid": BOTH}, count),
        "layer_types": listed_layers(fields, "layer_types", {"hybrid": BOTH}, count),
    }
    stated_layers(fields, stated)
    return _decoder(fields, FALCON_H1, (BOTH,) * count, state_width=_falcon_width)


def _falcon_width(layer: ConfigFields) -> int:
    width = layer.optional_integer("mamba_d_ssm", 1024, null_means="mamba_expand * hidden_size")
    return _expanded_width(layer) if width is None else width


def _expanded_width(layer: ConfigFields) -> int:
    return layer.integer("mamba_expand", 2) * layer.integer("hidden_size", 4096)  # 4096 in all three families


def _decoder(
    fields: ConfigFields,
    defaults: Defaults,
    layers: tuple[Keeps, ...],
    state_width: Callable[[ConfigFields], int] = _expanded_width,
) -> Decoder:
    return hybrid_decoder(
        fields,
        layers,
        attention=lambda layer: full_attention(layer, defaults),
        state=lambda layer: _state(layer, state_width(layer)),
        max_len=max_model_len(fields, defaults.max_position_embeddings),
    )


def _state(layer: ConfigFields, width: int) -> LayerCache:
    """Return a Mamba-2 state whose heads fill `width` exactly; `mamba_d_head` "auto" is what then follows."""
    num_heads = layer.integer("mamba_n_heads", 128)
    if width % num_heads:
        raise layer.error("mamba_n_heads", f"{num_heads} must divide the width {width} of the state", "correct it")
    head_dim = width // num_heads
    if layer.raw("mamba_d_head") != "auto" and layer.integer("mamba_d_head", head_dim) != head_dim:
        rule = f"must be the width {width} of the state / mamba_n_heads {num_heads}"
        raise layer.error("mamba_d_head", rule, f"use {head_dim}, or 'auto'")
    sizes = Mamba2Sizes(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=layer.integer("mamba_d_state", 256),
        num_groups=layer.integer("mamba_n_groups", 1),
        kernel=kernel_size(layer, "mamba_d_conv", 4),
    )
    return mamba2_state(sizes)
