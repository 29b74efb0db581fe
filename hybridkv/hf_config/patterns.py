"""Patterns of layer kinds, and the lists that say them."""

from hybridkv.hf_config.attention import FULL, SLIDING, Defaults, LayerKind, explicit_kinds
from hybridkv.hf_config.fields import ConfigFields


def last_of_period_full(num_layers: int, period: int) -> tuple[LayerKind, ...]:
    """Every `period`-th layer is full, counted from 1; layers after the last whole period slide."""
    return tuple(SLIDING if (layer + 1) % period else FULL for layer in range(num_layers))


def first_of_period_full(num_layers: int, period: int) -> tuple[LayerKind, ...]:
    """Every `period`-th layer is full, counted from 0."""
    return tuple(SLIDING if layer % period else FULL for layer in range(num_layers))


def int_pattern(fields: ConfigFields, defaults: Defaults, count: int, default_period: int) -> tuple[LayerKind, ...]:
    """Return the kinds that `sliding_window_pattern` or its default gives.

    Raises: SpecError if the field is wrong, or contradicts `layer_types`. A period equal to the default contradicts
        nothing: config classes write it into every saved file, whatever `layer_types` says.
    """
    name = "sliding_window_pattern"
    explicit = explicit_kinds(fields, defaults)
    if explicit is not None and fields.raw(name) is None:
        return explicit
    period = fields.integer(name, default_period)
    kinds = last_of_period_full(count, period)
    if explicit is not None and period != default_period:
        check_pattern(fields, name, kinds, explicit)
    return kinds


def check_pattern(
    fields: ConfigFields, name: str, pattern: tuple[LayerKind, ...], explicit: tuple[LayerKind, ...]
) -> None:
    """Refuse a pattern that the config states beside a `layer_types` that differs."""
    for layer, (stated, listed) in enumerate(zip(pattern, explicit, strict=True)):
        if stated != listed:
            raise fields.error(
                name,
                f"contradicts layer_types: layer {layer} would be {stated!r}, layer_types says {listed!r}",
                "remove the wrong one",
            )


def layer_marks(
    fields: ConfigFields, name: str, count: int, *, empty_is_missing: bool = False
) -> tuple[bool, ...] | None:
    """Return for each layer whether a list marks it 1, not 0; None where the list is missing or null."""
    marks = fields.optional_list(name)
    if marks is None or (empty_is_missing and not marks):
        return None
    if len(marks) != count or any(type(mark) is not int or mark not in (0, 1) for mark in marks):
        raise fields.error(name, f"must be {count} (num_hidden_layers) entries of 0 or 1", "correct the list")
    return tuple(mark == 1 for mark in marks)
