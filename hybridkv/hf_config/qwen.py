"""Families whose window reaches a run of layers bounded by `max_window_layers`."""

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
    window,
)
from hybridkv.hf_config.fields import ConfigFields

QWEN2 = Defaults(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=32768,
    sliding_window=4096,
)
QWEN2_VL = Defaults(
    hidden_size=8192,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=32768,
    sliding_window=4096,
)
QWEN3 = Defaults(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=32768,
    sliding_window=4096,
    null_derives=frozenset({"num_key_value_heads"}),
)
QWEN2_MOE = Defaults(
    hidden_size=2048,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    max_position_embeddings=32768,
    sliding_window=4096,
    null_derives=frozenset({"head_dim"}),
)
QWEN3_MOE = Defaults(
    hidden_size=2048,
    num_hidden_layers=24,
    num_attention_heads=32,
    num_key_value_heads=4,
    max_position_embeddings=32768,
    sliding_window=4096,
    null_derives=frozenset({"head_dim"}),
)
DOTS1 = Defaults(
    hidden_size=4608,
    num_hidden_layers=62,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=2048,
    sliding_window=4096,
)


def qwen2(fields: ConfigFields) -> Decoder:
    """Qwen2, Qwen2.5: behind `use_sliding_window`, the layers from `max_window_layers` on slide."""
    return _slides_from(fields, QWEN2, gated_window(fields, QWEN2), default_bound=28)


def qwen2_vl_text(fields: ConfigFields) -> Decoder:
    """The text part of Qwen2-VL, Qwen2.5-VL: Qwen2 with other defaults."""
    return _slides_from(fields, QWEN2_VL, gated_window(fields, QWEN2_VL), default_bound=80)


def qwen3(fields: ConfigFields) -> Decoder:
    """Qwen3: Qwen2 with an explicit head_dim."""
    return _slides_from(fields, QWEN3, gated_window(fields, QWEN3), default_bound=28)


def dots1(fields: ConfigFields) -> Decoder:
    """dots.llm1: the layers from `max_window_layers` on slide, without a gate."""
    return _slides_from(fields, DOTS1, window(fields, DOTS1), default_bound=62)


def qwen2_moe(fields: ConfigFields) -> Decoder:
    """Qwen2-MoE: even layers below `max_window_layers` slide."""
    tokens = gated_window(fields, QWEN2_MOE)
    bound = _bound(fields, tokens, 28)
    pattern: list[LayerKind] = [
        SLIDING if layer % 2 == 0 and layer < bound else FULL for layer in range(num_layers(fields, QWEN2_MOE))
    ]
    kinds = layer_kinds(fields, QWEN2_MOE, tokens, pattern)
    return decoder(fields, QWEN2_MOE, window_tokens=tokens, kinds=kinds)


def qwen3_moe(fields: ConfigFields) -> Decoder:
    """Qwen3-MoE: behind `use_sliding_window`, all layers slide."""
    return decoder(fields, QWEN3_MOE, window_tokens=gated_window(fields, QWEN3_MOE), kinds=None)


def _slides_from(fields: ConfigFields, defaults: Defaults, window_tokens: int | None, *, default_bound: int) -> Decoder:
    bound = _bound(fields, window_tokens, default_bound)
    pattern: list[LayerKind] = [FULL if layer < bound else SLIDING for layer in range(num_layers(fields, defaults))]
    kinds = layer_kinds(fields, defaults, window_tokens, pattern)
    return decoder(fields, defaults, window_tokens=window_tokens, kinds=kinds)


def _bound(fields: ConfigFields, window_tokens: int | None, default: int) -> int:
    return default if window_tokens is None else fields.integer("max_window_layers", default, at_least=0)
