"""Families with a fixed period of full layers among sliding ones."""

from collections.abc import Sequence

from hybridkv.hf_config.attention import Decoder, Defaults, LayerKind, decoder, layer_kinds, num_layers, window
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.patterns import first_of_period_full, int_pattern, last_of_period_full

GPT_OSS = Defaults(
    hidden_size=2880,
    num_hidden_layers=36,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    sliding_window=128,
)
COHERE2 = Defaults(
    hidden_size=8192,
    num_hidden_layers=40,
    num_attention_heads=64,
    num_key_value_heads=None,
    max_position_embeddings=8192,
    sliding_window=4096,
)
OLMO3 = Defaults(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    max_position_embeddings=2048,
    sliding_window=4096,
)
CWM = Defaults(
    hidden_size=6144,
    num_hidden_layers=64,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    sliding_window=8192,
)
GRANITE_SWA = Defaults(
    hidden_size=2560,
    num_hidden_layers=24,
    num_attention_heads=20,
    num_key_value_heads=4,
    max_position_embeddings=8192,
    sliding_window=128,
)


def gpt_oss(fields: ConfigFields) -> Decoder:
    """gpt-oss: even layers slide; its attention sinks are weights, not cache."""
    return _periodic(fields, GPT_OSS, last_of_period_full(num_layers(fields, GPT_OSS), 2))


def olmo3(fields: ConfigFields) -> Decoder:
    """OLMo 3: three layers slide, the fourth is full."""
    return _periodic(fields, OLMO3, last_of_period_full(num_layers(fields, OLMO3), 4))


def cwm(fields: ConfigFields) -> Decoder:
    """Code World Model: layers 0, 4, 8, ... are full."""
    return _periodic(fields, CWM, first_of_period_full(num_layers(fields, CWM), 4))


def granite_swa(fields: ConfigFields) -> Decoder:
    """Granite with sliding windows: layers 0, 4, 8, ... are full."""
    return _periodic(fields, GRANITE_SWA, first_of_period_full(num_layers(fields, GRANITE_SWA), 4))


def cohere2(fields: ConfigFields) -> Decoder:
    """Command R7B: `sliding_window_pattern` layers a period."""
    pattern = int_pattern(fields, COHERE2, num_layers(fields, COHERE2), default_period=4)
    return _periodic(fields, COHERE2, pattern)


def _periodic(fields: ConfigFields, defaults: Defaults, pattern: Sequence[LayerKind]) -> Decoder:
    tokens = window(fields, defaults)
    kinds = layer_kinds(fields, defaults, tokens, pattern)
    return decoder(fields, defaults, window_tokens=tokens, kinds=kinds)
