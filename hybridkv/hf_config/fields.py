"""Typed access to the fields of one config, with errors a person can act on.

A missing key, `null` and `0` are three different statements: a missing key means the default of the family's config
class, `null` switches something off or asks for a derived value, `0` is a value like any other (mostly a wrong one).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from hybridkv.errors import SpecError
from hybridkv.spec_base import short_repr
from hybridkv.units import INT32_MAX


@dataclass(frozen=True)
class ConfigFields:
    """The fields of one JSON object.

    `where` is the path that precedes a field's name in errors: `"config of 'x': text_config."`; `parent` is the config
    that nests this one; `max_source_tokens` is what the caller says about cross attention where the config is silent.
    """

    where: str
    values: Mapping[str, object] = field(repr=False)
    parent: "ConfigFields | None" = field(default=None, repr=False)
    max_source_tokens: int | None = None

    def has(self, name: str) -> bool:
        """Return whether the key is present, `null` included."""
        return name in self.values

    def raw(self, name: str) -> object:
        """Return the value as it stands, None for a missing key."""
        return self.values.get(name)

    def error(self, name: str, rule: str, fix: str) -> SpecError:
        """Return the error that names the field, its value, the broken rule and the fix."""
        got = short_repr(_json_words(self.values[name])) if name in self.values else "nothing"
        return SpecError(f"{self.where}{name}: got {got}, {rule}; {fix}")

    def integer(self, name: str, default: int | None = None, *, at_least: int = 1) -> int:
        """Return an integer field, the default for a missing key; `null` is an error, as is a missing default."""
        value = self.values.get(name, default)
        if not _is_integer(value) or not at_least <= value <= INT32_MAX:
            fix = "give it" if default is None else f"correct it, or remove it for {default}"
            raise self.error(name, _integer_rule(value, at_least), fix)
        return value

    def optional_integer(self, name: str, default: int | None, *, null_means: str) -> int | None:
        """Return an integer field of at least 1, None for `null`, the default for a missing key."""
        value = self.values.get(name, default)
        if value is None:
            return None
        if not _is_integer(value) or not 1 <= value <= INT32_MAX:
            raise self.error(name, _integer_rule(value, 1), f"correct it, or use null for {null_means}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a true/false field, the default for a missing key."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false", f"correct it, or remove it for {str(default).lower()}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a non-empty string field, the default (if there is one) for a missing key."""
        value = self.values.get(name, default)
        if not isinstance(value, str) or not value:
            raise self.error(name, "must be a non-empty string", "add or correct it")
        return value

    def optional_list(self, name: str) -> list[object] | None:
        """Return a list field, None for `null` or a missing key."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self.error(name, "must be a list", "give one entry per layer, or remove it")
        return list(value)

    def layer_indices(self, name: str, num_layers: int, *, first: int = 0) -> frozenset[int] | None:
        """Return a list of layers as indices from 0, None for `null` or a missing key.

        `first` is the number the list gives to layer 0.

        Raises: SpecError for an entry that is no layer, comes twice, or shows that the list counts from elsewhere.
        """
        entries = self.optional_list(name)
        if entries is None:
            return None
        last = first + num_layers - 1
        for entry in entries:
            if not _is_integer(entry) or not first <= entry <= last:
                rule = f"entry {entry!r:.60} must be a layer {first}..{last}: this list counts from {first}"
                raise self.error(name, rule, "correct the entry, or renumber the list")
        indices = frozenset(entry - first for entry in entries if _is_integer(entry))
        if len(indices) < len(entries):
            raise self.error(name, "has an entry twice", "list each layer once")
        return indices

    def child(self, name: str) -> "ConfigFields":
        """Return the fields of a nested object."""
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            raise self.error(name, "must be an object", f"give the nested config under {name!r}")
        return ConfigFields(f"{self.where}{name}.", value, self, self.max_source_tokens)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer_rule(value: object, at_least: int) -> str:
    too_large = _is_integer(value) and value > INT32_MAX
    return f"must be an integer of at most {INT32_MAX}" if too_large else f"must be an integer of at least {at_least}"


def _json_words(value: object) -> object:
    if value is None or isinstance(value, bool):
        return _Word({None: "null", True: "true", False: "false"}[value])
    return value


class _Word(str):
    """A string whose repr has no quotes."""

    __slots__ = ()
    __repr__ = str.__str__
