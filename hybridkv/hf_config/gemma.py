"""Gemma 2, VaultGemma, the text part of Gemma 3."""

from hybridkv.hf_config.attention import Decoder, Defaults, decoder, layer_kinds, num_layers, window
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.patterns import int_pattern, last_of_period_full

GEMMA2 = Defaults(
    hidden_size=2304,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=8192,
    sliding_window=4096,
    null_derives=frozenset(),
)
GEMMA3 = Defaults(
    hidden_size=2304,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131072,
    sliding_window=4096,
    null_derives=frozenset(),
)


def gemma2(fields: ConfigFields) -> Decoder:
    """Gemma 2, VaultGemma: even layers slide."""
    tokens = window(fields, GEMMA2)
    kinds = layer_kinds(fields, GEMMA2, tokens, last_of_period_full(num_layers(fields, GEMMA2), 2))
    return decoder(fields, GEMMA2, window_tokens=tokens, kinds=kinds)


def gemma3_text(fields: ConfigFields) -> Decoder:
    """Gemma 3: five layers slide, one is full; the layers after the last whole six slide."""
    tokens = window(fields, GEMMA3)
    name = "use_bidirectional_attention"
    if tokens is not None and fields.raw(name) is not None and fields.flag(name, False):
        tokens = half_window(tokens)
    pattern = int_pattern(fields, GEMMA3, num_layers(fields, GEMMA3), default_period=6)
    kinds = layer_kinds(fields, GEMMA3, tokens, pattern)
    return decoder(fields, GEMMA3, window_tokens=tokens, kinds=kinds)


def half_window(tokens: int) -> int:
    """Bidirectional attention (embedding models) looks both ways: half the window lies behind the current token."""
    return tokens // 2 + 1
