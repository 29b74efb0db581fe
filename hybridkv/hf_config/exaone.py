"""EXAONE 4, whose pattern is a number or a string."""

from hybridkv.hf_config.attention import (
    FULL,
    SLIDING,
    Decoder,
    Defaults,
    LayerKind,
    decoder,
    explicit_kinds,
    layer_kinds,
    num_layers,
    window,
)
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.patterns import check_pattern, int_pattern

EXAONE4 = Defaults(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=2048,
    sliding_window=4096,
    null_derives=frozenset({"head_dim"}),
)
_PATTERN = "sliding_window_pattern"


def exaone4(fields: ConfigFields) -> Decoder:
    """EXAONE 4: `sliding_window_pattern` layers a period, or letters: L slides, G is full.

    Without a window or with a null pattern all layers are full.
    """
    tokens = window(fields, EXAONE4)
    count = num_layers(fields, EXAONE4)
    if tokens is None or (fields.has(_PATTERN) and fields.raw(_PATTERN) is None):
        pattern: tuple[LayerKind, ...] = (FULL,) * count
    elif isinstance(fields.raw(_PATTERN), str):
        pattern = _letters(fields, count)
    else:
        pattern = int_pattern(fields, EXAONE4, count, default_period=4)
    kinds = layer_kinds(fields, EXAONE4, tokens, pattern)
    return decoder(fields, EXAONE4, window_tokens=tokens, kinds=kinds)


def _letters(fields: ConfigFields, count: int) -> tuple[LayerKind, ...]:
    text = fields.text(_PATTERN)
    if set(text) - {"L", "G"}:
        raise fields.error(_PATTERN, "must hold only the letters L (sliding), G (full)", "correct it")
    explicit = explicit_kinds(fields, EXAONE4)
    if count % len(text):
        if explicit is not None:
            return explicit
        raise fields.error(
            _PATTERN,
            f"its length {len(text)} does not divide num_hidden_layers {count}",
            "give layer_types for the open tail",
        )
    # the config class documents the last layer as full, whatever the letters say
    tiled = text * (count // len(text))
    pattern: list[LayerKind] = [SLIDING if letter == "L" else FULL for letter in tiled]
    pattern[-1] = FULL
    if explicit is not None:
        check_pattern(fields, _PATTERN, tuple(pattern), explicit)
    return tuple(pattern)
