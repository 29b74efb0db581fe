"""The text part of Llama 4, whose layers with rotary embedding see their chunk only."""

from hybridkv.hf_config.attention import (
    CHUNKED,
    FULL,
    Decoder,
    Defaults,
    LayerKind,
    chunk_size,
    decoder,
    explicit_kinds,
    num_layers,
)
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.patterns import check_pattern, layer_marks

LLAMA4 = Defaults(
    hidden_size=5120,
    num_hidden_layers=48,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    attention_chunk_size=8192,
)


def llama4_text(fields: ConfigFields) -> Decoder:
    """Llama 4: the layers marked 1 in `no_rope_layers`, or all but every fourth, are chunked; null chunks: all full."""
    explicit = explicit_kinds(fields, LLAMA4, (FULL, CHUNKED))
    count = num_layers(fields, LLAMA4)
    interval = fields.integer("no_rope_layer_interval", 4)
    default = tuple(FULL if (layer + 1) % interval == 0 else CHUNKED for layer in range(count))
    marks = layer_marks(fields, "no_rope_layers", count, empty_is_missing=True)
    pattern: tuple[LayerKind, ...] = default
    if marks is not None:
        pattern = tuple(CHUNKED if mark else FULL for mark in marks)
    # saved files have the default marks whatever layer_types says
    if explicit is not None and pattern != default:
        check_pattern(fields, "no_rope_layers", pattern, explicit)
    kinds = explicit or pattern
    if explicit is None and chunk_size(fields, LLAMA4) is None:
        kinds = (FULL,) * count
    return decoder(fields, LLAMA4, window_tokens=None, kinds=kinds)
