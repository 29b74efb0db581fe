"""Nemotron-H: Mamba-2, attention, MLP or experts, one of them a layer."""

from dataclasses import replace

from hybridkv.hf_config.attention import MAX_LAYERS, Decoder, Defaults, max_model_len
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.hybrid import (
    ATTENTION,
    LAYER_NAMES,
    NOTHING,
    STATE,
    Keeps,
    full_attention,
    hybrid_decoder,
    listed_layers,
    stated_layers,
)
from hybridkv.hf_config.states import Mamba2Sizes, kernel_size, mamba2_state
from hybridkv.specs import LayerCache

NEMOTRON_H = Defaults(
    hidden_size=4096,
    num_hidden_layers=4,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=4096,
    null_derives=frozenset(),
)
_NAMES: dict[object, Keeps] = {**LAYER_NAMES, "mlp": NOTHING, "moe": NOTHING}
_LETTERS = {"M": STATE, "*": ATTENTION, "-": NOTHING, "E": NOTHING}
_DEFAULT_LAYERS = (STATE, NOTHING, ATTENTION, NOTHING)  # of a config that says nothing about its layers
_PATTERN = "hybrid_override_pattern"


def nemotron_h(fields: ConfigFields) -> Decoder:
    """Nemotron-H: the pattern or the list decides how many layers there are; saved again, only the list is left."""
    layers = _layers(fields)
    return hybrid_decoder(
        fields,
        layers,
        attention=lambda layer: _attention(layer),
        state=lambda layer: _state(layer),
        max_len=max_model_len(fields, NEMOTRON_H.max_position_embeddings),
    )


def _layers(fields: ConfigFields) -> tuple[Keeps, ...]:
    count = fields.optional_integer("num_hidden_layers", None, null_means="as many as the list has")
    stated = {
        "layers_block_type": listed_layers(fields, "layers_block_type", _NAMES, count),
        "layer_types": listed_layers(fields, "layer_types", _NAMES, count),
        _PATTERN: _pattern(fields, count),
    }
    layers = stated_layers(fields, stated) or _DEFAULT_LAYERS
    if count not in (None, len(layers)):
        rule = f"must say what each of the {count} layers is: the default pattern has {len(layers)}"
        raise fields.error(_PATTERN, rule, "give one letter per layer")
    if all(keeps == NOTHING for keeps in layers):
        name = next(name for name, value in stated.items() if value)
        raise fields.error(name, "has no layer that keeps anything", "a model without caches needs no spec")
    return layers


def _pattern(fields: ConfigFields, count: int | None) -> tuple[Keeps, ...] | None:
    """Return the layers that the pattern spells, one letter each."""
    if fields.raw(_PATTERN) is None:
        return None
    letters = fields.text(_PATTERN)
    for layer, letter in enumerate(letters):
        if letter not in _LETTERS:
            rule = f"letter {layer} must be one of {', '.join(map(repr, _LETTERS))}, is {letter!r}"
            raise fields.error(_PATTERN, rule, "correct the pattern")
    if count is not None and len(letters) != count:
        rule = f"has {len(letters)} letters, num_hidden_layers is {count}"
        raise fields.error(_PATTERN, rule, "give one letter per layer")
    if len(letters) > MAX_LAYERS:
        raise fields.error(_PATTERN, f"must have at most {MAX_LAYERS} letters", "correct it")
    return tuple(_LETTERS[letter] for letter in letters)


def _attention(layer: ConfigFields) -> LayerCache:
    """Return K and V; `head_dim` has an older name, and neither follows from hidden_size."""
    old = "attention_head_dim"
    if not layer.has(old):
        return full_attention(layer, NEMOTRON_H)
    head_dim = layer.integer(old)
    if layer.has("head_dim") and layer.integer("head_dim") != head_dim:
        raise layer.error(old, f"contradicts head_dim {layer.integer('head_dim')}", "remove the wrong one")
    return full_attention(layer, replace(NEMOTRON_H, head_dim=head_dim))


def _state(layer: ConfigFields) -> LayerCache:
    """Return a Mamba-2 state as wide as its heads; `expand` decides nothing."""
    groups = "mamba_n_groups" if layer.has("mamba_n_groups") else "n_groups"
    kernel = "mamba_d_conv" if layer.has("mamba_d_conv") else "conv_kernel"
    sizes = Mamba2Sizes(
        num_heads=layer.integer("mamba_num_heads", 128),
        head_dim=layer.integer("mamba_head_dim", 64),
        state_size=layer.integer("ssm_state_size", 128),
        num_groups=layer.integer(groups, 8),
        kernel=kernel_size(layer, kernel, 4),
    )
    return mamba2_state(sizes)
