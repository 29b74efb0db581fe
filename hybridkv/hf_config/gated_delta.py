"""Qwen3-Next, Qwen3.5, OLMo Hybrid: Gated DeltaNet between full attention."""

from collections.abc import Callable

from hybridkv.hf_config.attention import Decoder, Defaults, max_model_len, num_layers
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.hybrid import (
    ATTENTION,
    LAYER_NAMES,
    Keeps,
    every_nth_attends,
    full_attention,
    hybrid_decoder,
    listed_layers,
    stated_layers,
)
from hybridkv.hf_config.states import GatedDeltaSizes, gated_delta_state, kernel_size
from hybridkv.specs import LayerCache

QWEN3_NEXT = Defaults(
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    max_position_embeddings=32768,
    null_derives=frozenset(),
)
QWEN3_5 = Defaults(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=32768,
    null_derives=frozenset(),
)
QWEN3_5_MOE = Defaults(
    hidden_size=2048,
    num_hidden_layers=40,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    max_position_embeddings=32768,
    null_derives=frozenset(),
)
OLMO_HYBRID = Defaults(
    hidden_size=3840,
    num_hidden_layers=32,
    num_attention_heads=30,
    num_key_value_heads=None,
    max_position_embeddings=65536,
)
_INTERVAL = "full_attention_interval"


def qwen3_next(fields: ConfigFields) -> Decoder:
    """Qwen3-Next."""
    return _qwen(fields, QWEN3_NEXT)


def qwen3_5_text(fields: ConfigFields) -> Decoder:
    """Qwen3.5, dense."""
    return _qwen(fields, QWEN3_5)


def qwen3_5_moe_text(fields: ConfigFields) -> Decoder:
    """Qwen3.5 with experts."""
    return _qwen(fields, QWEN3_5_MOE)


def olmo_hybrid(fields: ConfigFields) -> Decoder:
    """OLMo Hybrid: the sizes of its states follow from the attention's where the config leaves them open."""
    layers = _layers(fields, num_layers(fields, OLMO_HYBRID))
    if ATTENTION not in layers:  # a default rule that reaches no fourth layer gives the last one attention
        if fields.raw("layer_types") is not None:
            raise fields.error("layer_types", "must have a 'full_attention' layer", "correct the list")
        layers = (*layers[:-1], ATTENTION)
    return _decoder(fields, OLMO_HYBRID, layers, _olmo_sizes)


def _qwen(fields: ConfigFields, defaults: Defaults) -> Decoder:
    return _decoder(fields, defaults, _layers(fields, num_layers(fields, defaults)), _qwen_sizes)


def _layers(fields: ConfigFields, count: int) -> tuple[Keeps, ...]:
    """Return the layers: `layer_types`, else every `full_attention_interval`-th attends."""
    listed = listed_layers(fields, "layer_types", LAYER_NAMES, count)
    periodic = None
    if listed is None or fields.raw(_INTERVAL) is not None:
        periodic = every_nth_attends(count, fields.integer(_INTERVAL, 4))
    layers = stated_layers(fields, {"layer_types": listed, _INTERVAL: periodic})
    assert layers is not None  # one of the two is given
    return layers


def _decoder(
    fields: ConfigFields,
    defaults: Defaults,
    layers: tuple[Keeps, ...],
    sizes: Callable[[ConfigFields], GatedDeltaSizes],
) -> Decoder:
    return hybrid_decoder(
        fields,
        layers,
        attention=lambda layer: full_attention(layer, defaults),
        state=lambda layer: _state(layer, sizes(layer)),
        max_len=max_model_len(fields, defaults.max_position_embeddings),
    )


def _state(layer: ConfigFields, sizes: GatedDeltaSizes) -> LayerCache:
    if sizes.num_value_heads % sizes.num_key_heads:
        rule = f"{sizes.num_value_heads} must be a multiple of linear_num_key_heads {sizes.num_key_heads}"
        raise layer.error("linear_num_value_heads", rule, "correct one of them")
    return gated_delta_state(sizes)


def _qwen_sizes(layer: ConfigFields) -> GatedDeltaSizes:
    return GatedDeltaSizes(
        num_key_heads=layer.integer("linear_num_key_heads", 16),
        num_value_heads=layer.integer("linear_num_value_heads", 32),
        key_head_dim=layer.integer("linear_key_head_dim", 128),
        value_head_dim=layer.integer("linear_value_head_dim", 128),
        kernel=kernel_size(layer, "linear_conv_kernel_dim", 4),
    )


def _olmo_sizes(layer: ConfigFields) -> GatedDeltaSizes:
    """Return the sizes; a null or missing head_dim of the keys is 3/4 of an even share of hidden_size, rounded down."""

    def given_or(name: str, derived: int) -> int:
        value = layer.optional_integer(name, None, null_means=str(derived))
        return derived if value is None else value

    heads = layer.integer("num_attention_heads", OLMO_HYBRID.num_attention_heads)
    key_heads = given_or("linear_num_key_heads", heads)
    share = 3 * layer.integer("hidden_size", OLMO_HYBRID.hidden_size) // (4 * key_heads)
    key_head_dim = given_or("linear_key_head_dim", share)
    if key_head_dim < 1:
        raise layer.error("linear_key_head_dim", f"has no default with {key_heads} key heads", "give it")
    return GatedDeltaSizes(
        num_key_heads=key_heads,
        num_value_heads=given_or("linear_num_value_heads", heads),
        key_head_dim=key_head_dim,
        value_head_dim=given_or("linear_value_head_dim", 2 * key_head_dim),
        kernel=kernel_size(layer, "linear_conv_kernel_dim", 4),
    )
