"""RecurrentGemma: recurrent blocks between sliding windows."""

from hybridkv.hf_config.attention import Decoder, Defaults, kv_geometry, max_model_len, num_layers
from hybridkv.hf_config.caches import kv_cache
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.hybrid import (
    ATTENTION,
    STATE,
    Keeps,
    hybrid_decoder,
    listed_layers,
    stated_layers,
)
from hybridkv.hf_config.states import kernel_size, rglru_state
from hybridkv.specs import LayerCache, SlidingWindow

RECURRENT_GEMMA = Defaults(
    hidden_size=2560,
    num_hidden_layers=26,
    num_attention_heads=10,
    num_key_value_heads=None,
    max_position_embeddings=None,
)
_BLOCKS: dict[object, Keeps] = {"recurrent": STATE, "attention": ATTENTION}
_NAMES: dict[object, Keeps] = {**_BLOCKS, "linear_attention": STATE, "sliding_attention": ATTENTION}


def recurrent_gemma(fields: ConfigFields) -> Decoder:
    """RecurrentGemma: `block_types` repeats over the layers, and every attention slides."""
    count = num_layers(fields, RECURRENT_GEMMA)
    stated = {name: _tiled(fields, name, count) for name in ("block_types", "_block_types")}
    stated |= {name: listed_layers(fields, name, _NAMES, count) for name in ("layers_block_type", "layer_types")}
    default = _repeat((STATE, STATE, ATTENTION), count)
    return hybrid_decoder(
        fields,
        stated_layers(fields, stated) or default,
        attention=lambda layer: _attention(layer),
        state=lambda layer: _state(layer),
        max_len=max_model_len(fields, RECURRENT_GEMMA.max_position_embeddings),
    )


def _tiled(fields: ConfigFields, name: str, count: int) -> tuple[Keeps, ...] | None:
    period = listed_layers(fields, name, _BLOCKS, None)
    return None if period is None else _repeat(period, count)


def _repeat(period: tuple[Keeps, ...], count: int) -> tuple[Keeps, ...]:
    return tuple(period[layer % len(period)] for layer in range(count))


def _attention(layer: ConfigFields) -> LayerCache:
    name = "sliding_window" if layer.raw("sliding_window") is not None else "attention_window_size"
    num_kv_heads, head_dim = kv_geometry(layer, RECURRENT_GEMMA)
    return kv_cache(SlidingWindow(window=layer.integer(name, 2048)), num_kv_heads, head_dim)


def _state(layer: ConfigFields) -> LayerCache:
    width = layer.optional_integer("lru_width", None, null_means="hidden_size")
    if width is None:
        width = layer.integer("hidden_size", RECURRENT_GEMMA.hidden_size)
    return rglru_state(width, kernel_size(layer, "conv1d_width", 4))
