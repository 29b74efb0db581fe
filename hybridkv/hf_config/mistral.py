"""Families with one `sliding_window` for all layers, of which only Ministral lists layer types."""

from hybridkv.hf_config.attention import SLIDING, Decoder, Defaults, decoder, layer_kinds, num_layers, window
from hybridkv.hf_config.fields import ConfigFields

MISTRAL = Defaults(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    sliding_window=4096,
)
MINISTRAL3 = Defaults(
    hidden_size=4096,
    num_hidden_layers=34,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=262144,
)
MIXTRAL = Defaults(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
)
PHI3 = Defaults(
    hidden_size=3072,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    max_position_embeddings=4096,
)
STARCODER2 = Defaults(
    hidden_size=3072,
    num_hidden_layers=30,
    num_attention_heads=24,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    null_derives=frozenset({"head_dim"}),
)


def mistral(fields: ConfigFields) -> Decoder:
    """Mistral: all layers slide unless the window is null; a missing window means 4096."""
    return _one_window(fields, MISTRAL)


def ministral(fields: ConfigFields) -> Decoder:
    """Ministral: Mistral with `layer_types`."""
    tokens = window(fields, MISTRAL)
    kinds = layer_kinds(fields, MISTRAL, tokens, (SLIDING,) * num_layers(fields, MISTRAL))
    return decoder(fields, MISTRAL, window_tokens=tokens, kinds=kinds)


def ministral3(fields: ConfigFields) -> Decoder:
    """Ministral 3: no window by default, head_dim 128 whatever the hidden size."""
    return _one_window(fields, MINISTRAL3)


def mixtral(fields: ConfigFields) -> Decoder:
    """Mixtral, Phi-3.5-MoE: Mistral without a window by default."""
    return _one_window(fields, MIXTRAL)


def phi3(fields: ConfigFields) -> Decoder:
    """Phi-3, Phi-4-mini: all layers slide, with a window that may exceed the longest context."""
    return _one_window(fields, PHI3)


def starcoder2(fields: ConfigFields) -> Decoder:
    """StarCoder2: all layers slide if there is a window."""
    return _one_window(fields, STARCODER2)


def _one_window(fields: ConfigFields, defaults: Defaults) -> Decoder:
    return decoder(fields, defaults, window_tokens=window(fields, defaults), kinds=None)
