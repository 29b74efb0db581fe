"""SmolLM3, where layers without rotary embedding may slide."""

from hybridkv.hf_config.attention import (
    FULL,
    SLIDING,
    Decoder,
    Defaults,
    LayerKind,
    decoder,
    gated_window,
    layer_kinds,
    num_layers,
)
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.patterns import layer_marks

SMOLLM3 = Defaults(
    hidden_size=2048, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=32768
)


def smollm3(fields: ConfigFields) -> Decoder:
    """SmolLM3: behind `use_sliding_window`, the layers marked 0 in `no_rope_layers` slide."""
    tokens = gated_window(fields, SMOLLM3)
    count = num_layers(fields, SMOLLM3)
    pattern = _slides_without_rope(fields, count) if tokens is not None else [FULL] * count
    kinds = layer_kinds(fields, SMOLLM3, tokens, pattern)
    return decoder(fields, SMOLLM3, window_tokens=tokens, kinds=kinds)


def _slides_without_rope(fields: ConfigFields, count: int) -> list[LayerKind]:
    marks = layer_marks(fields, "no_rope_layers", count)
    if marks is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        return [FULL if (layer + 1) % interval else SLIDING for layer in range(count)]
    return [FULL if mark else SLIDING for mark in marks]
