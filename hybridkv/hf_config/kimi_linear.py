"""Kimi Linear: Kimi delta attention between latent attention."""

from collections.abc import Mapping

from hybridkv.hf_config.attention import Decoder, layer_count, max_model_len
from hybridkv.hf_config.caches import mla_cache
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.hybrid import (
    ATTENTION,
    LAYER_NAMES,
    STATE,
    Keeps,
    hybrid_decoder,
    listed_layers,
    stated_layers,
)
from hybridkv.hf_config.states import kda_state, kernel_size
from hybridkv.specs import LayerCache

_LINEAR = "linear_attn_config"
_MAX_LEN = 1048576


def kimi_linear(fields: ConfigFields) -> Decoder:
    """Kimi Linear: the lists in `linear_attn_config` count layers from 1."""
    count = layer_count(fields, "num_hidden_layers", 27)
    stated = {
        "layer_types": listed_layers(fields, "layer_types", LAYER_NAMES, count),
        _LINEAR: _numbered_layers(fields, count),
    }
    return hybrid_decoder(
        fields,
        stated_layers(fields, stated) or _default_layers(count),
        attention=lambda layer: _latent(layer),
        state=lambda layer: _state(layer),
        max_len=_max_len(fields),
    )


def _max_len(fields: ConfigFields) -> int | None:
    name = "model_max_length" if fields.has("model_max_length") else "max_position_embeddings"
    return max_model_len(fields, _MAX_LEN, name)


def _default_layers(count: int) -> tuple[Keeps, ...]:
    """Return the config class's rule, which counts from 0 and starts with a state."""
    return tuple(ATTENTION if layer and layer % 4 == 0 else STATE for layer in range(count))


def _numbered_layers(fields: ConfigFields, count: int) -> tuple[Keeps, ...] | None:
    """Return what `full_attn_layers` and `kda_layers` say; together they name every layer once."""
    if not fields.has(_LINEAR):
        return None
    nested = fields.child(_LINEAR)
    full = nested.layer_indices("full_attn_layers", count, first=1)
    linear = nested.layer_indices("kda_layers", count, first=1)
    if full is None and linear is None:
        return None
    if full is None or linear is None:
        missing = "kda_layers" if linear is None else "full_attn_layers"
        raise nested.error(missing, "must list the layers that the other list leaves", "give both lists")
    if full & linear:
        rule = f"layer {min(full & linear) + 1} is in full_attn_layers too"
        raise nested.error("kda_layers", rule, "remove it from one of them")
    if len(full) + len(linear) < count:
        absent = min(set(range(count)) - full - linear) + 1
        raise nested.error("kda_layers", f"layer {absent} is in neither list", "name every layer 1..num_hidden_layers")
    return tuple(ATTENTION if layer in full else STATE for layer in range(count))


def _latent(layer: ConfigFields) -> LayerCache:
    """Return the latent; `head_dim` and `num_key_value_heads` decide nothing, nor does `mla_use_nope`."""
    return mla_cache(layer.integer("kv_lora_rank", 512), layer.integer("qk_rope_head_dim", 64))


def _state(layer: ConfigFields) -> LayerCache:
    num_heads = _nested_integer(layer, "num_heads", "linear_num_heads", 32)
    head_dim = _nested_integer(layer, "head_dim", "linear_head_dim", 128)
    nested, name = _holder(layer, "short_conv_kernel_size", "linear_conv_kernel_dim")
    return kda_state(num_heads, head_dim, kernel_size(nested, name, 4))


def _nested_integer(layer: ConfigFields, nested_name: str, name: str, default: int) -> int:
    holder, field = _holder(layer, nested_name, name)
    return holder.integer(field, default)


def _holder(layer: ConfigFields, nested_name: str, name: str) -> tuple[ConfigFields, str]:
    """Return where a size stands: in `linear_attn_config`, else in the config itself."""
    nested = layer.raw(_LINEAR)
    if isinstance(nested, Mapping) and nested_name in nested:
        return layer.child(_LINEAR), nested_name
    return layer, name
