"""Zamba, Zamba 2: a state in every layer, attention beside it in some."""

from dataclasses import replace

from hybridkv.hf_config.attention import Decoder, Defaults, max_model_len, num_layers
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.hybrid import (
    BOTH,
    STATE,
    Keeps,
    full_attention,
    hybrid_decoder,
    indexed_layers,
    listed_layers,
    stated_layers,
)
from hybridkv.hf_config.states import Mamba2Sizes, kernel_size, mamba2_state, multi_head_mamba1_state
from hybridkv.specs import LayerCache

ZAMBA = Defaults(
    hidden_size=3712,
    num_hidden_layers=76,
    num_attention_heads=16,
    num_key_value_heads=16,
    max_position_embeddings=4096,
    null_derives=frozenset({"head_dim"}),
)
ZAMBA2 = Defaults(
    hidden_size=2560,
    num_hidden_layers=54,
    num_attention_heads=32,
    num_key_value_heads=None,
    max_position_embeddings=4096,
)
_NAMES: dict[object, Keeps] = {"mamba": STATE, "linear_attention": STATE, "hybrid": BOTH}
_ZAMBA2_HYBRID = frozenset({6, 12, 18, 24, 30, 36, 42, 47, 51})  # of the 54 layers of a config that lists none
_ZAMBA2_LONG_CONTEXT = 16384
_ZAMBA2_OLD_NAMES = {
    "state_size": "mamba_d_state",
    "conv_dimension": "mamba_d_conv",
    "expansion_factor": "mamba_expand",
}


def zamba(fields: ConfigFields) -> Decoder:
    """Zamba: `layers_block_type`, else a period after the first three layers; Mamba-1 in several heads."""

    def state(layer: ConfigFields) -> LayerCache:
        num_heads = layer.integer("n_mamba_heads", 2)
        return multi_head_mamba1_state(
            num_heads,
            _width(layer, ZAMBA, "n_mamba_heads", num_heads) // num_heads,
            layer.integer("mamba_d_state", 16),
            kernel_size(layer, "mamba_d_conv", 4),
        )

    count = num_layers(fields, ZAMBA)
    lists = ("layers_block_type", "layer_types")
    listed = {name: listed_layers(fields, name, _NAMES, count) for name in lists}
    layers = stated_layers(fields, {**listed, "attn_layer_period": _stated_period(fields, count, listed)})
    return hybrid_decoder(
        fields,
        layers or _periodic(fields, count),
        attention=lambda layer: _attention(layer, ZAMBA),
        state=state,
        max_len=max_model_len(fields, ZAMBA.max_position_embeddings),
    )


def zamba2(fields: ConfigFields) -> Decoder:
    """Zamba 2: `layers_block_type` or `hybrid_layer_ids`; attention shares weights among layers, but not K and V."""
    count = num_layers(fields, ZAMBA2)
    stated = {
        "layers_block_type": listed_layers(fields, "layers_block_type", _NAMES, count),
        "layer_types": listed_layers(fields, "layer_types", _NAMES, count),
        "hybrid_layer_ids": indexed_layers(fields, "hybrid_layer_ids", count, BOTH, STATE),
    }
    layers = stated_layers(fields, stated)
    if layers is None:
        if count != ZAMBA2.num_hidden_layers:
            rule = f"must say what each of the {count} layers is: the default list is for {ZAMBA2.num_hidden_layers}"
            raise fields.error("layers_block_type", rule, "give one entry per layer")
        layers = tuple(BOTH if layer in _ZAMBA2_HYBRID else STATE for layer in range(count))
    long_context = fields.flag("use_long_context", False)
    return hybrid_decoder(
        fields,
        layers,
        attention=lambda layer: _attention(layer, ZAMBA2),
        state=lambda layer: mamba2_state(_zamba2_sizes(layer)),
        max_len=_ZAMBA2_LONG_CONTEXT if long_context else max_model_len(fields, ZAMBA2.max_position_embeddings),
    )


def _periodic(fields: ConfigFields, count: int) -> tuple[Keeps, ...]:
    """Return the default rule: layer 2, then one layer a period of those from layer 3."""
    period = fields.integer("attn_layer_period", 6)
    offset = fields.integer("attn_layer_offset", 4, at_least=0)
    return tuple(
        BOTH if layer == 2 or (layer > 2 and (layer - 3) % period == offset) else STATE for layer in range(count)
    )


def _stated_period(
    fields: ConfigFields, count: int, listed: dict[str, tuple[Keeps, ...] | None]
) -> tuple[Keeps, ...] | None:
    """Return the periodic rule if the config means it: the defaults are written into every saved file."""
    period, offset = fields.integer("attn_layer_period", 6), fields.integer("attn_layer_offset", 4, at_least=0)
    return _periodic(fields, count) if (period, offset) != (6, 4) or not any(listed.values()) else None


def _attention(layer: ConfigFields, defaults: Defaults) -> LayerCache:
    """Return K and V of heads that read the layer's input beside the embeddings: twice hidden_size."""
    name = "attention_head_dim"
    head_dim = layer.optional_integer(name, None, null_means="2 * hidden_size / num_attention_heads")
    if head_dim is None:
        width = 2 * layer.integer("hidden_size", defaults.hidden_size)
        heads = layer.integer("num_attention_heads", defaults.num_attention_heads)
        if width % heads:
            raise layer.error("num_attention_heads", f"{heads} must divide 2 * hidden_size {width}", f"give {name}")
        head_dim = width // heads
    return full_attention(layer, replace(defaults, head_dim=head_dim))


def _width(layer: ConfigFields, defaults: Defaults, name: str, divisor: int) -> int:
    """Return the width of the state, a multiple of what the field `name` divides it by."""
    width = layer.integer("mamba_expand", 2) * layer.integer("hidden_size", defaults.hidden_size)
    if width % divisor:
        raise layer.error(name, f"{divisor} must divide mamba_expand * hidden_size {width}", "correct it")
    return width


def _zamba2_sizes(layer: ConfigFields) -> Mamba2Sizes:
    """Return the sizes of a state; of `n_mamba_heads` and `mamba_headdim`, one follows from the other."""
    for old, new in _ZAMBA2_OLD_NAMES.items():
        if layer.has(old) and not layer.has(new):
            raise layer.error(old, f"is not a field of this family, {new} is", f"rename it to {new}")
    if layer.has("mamba_headdim"):
        head_dim = layer.integer("mamba_headdim")
        num_heads = _width(layer, ZAMBA2, "mamba_headdim", head_dim) // head_dim
        if layer.has("n_mamba_heads") and layer.integer("n_mamba_heads") != num_heads:
            rule = f"times mamba_headdim {head_dim} must be mamba_expand * hidden_size {num_heads * head_dim}"
            raise layer.error("n_mamba_heads", rule, f"use {num_heads}, or correct mamba_headdim")
    else:
        num_heads = layer.integer("n_mamba_heads", 8)
        head_dim = _width(layer, ZAMBA2, "n_mamba_heads", num_heads) // num_heads
    return Mamba2Sizes(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=layer.integer("mamba_d_state", 64),
        num_groups=layer.integer("mamba_ngroups", 1),
        kernel=kernel_size(layer, "mamba_d_conv", 4),
    )
