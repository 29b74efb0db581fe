"""Reports as dictionaries, ready for JSON."""

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

OPTIONAL = {"in_document": "unless_none"}
"""Metadata of a field that is left out where it does not apply."""
HIDDEN = {"in_document": "never"}
"""Metadata of a field that is for callers alone."""


def to_dict(report: "DataclassInstance") -> dict[str, Json]:
    """Return a frozen dataclass as a dictionary: its fields in order, then its properties, reports inside it likewise.

    Raises: TypeError for a value that JSON has no word for.
    """
    document: dict[str, Json] = {}
    for field in fields(report):
        value = getattr(report, field.name)
        shown = field.metadata.get("in_document")
        if shown == "never" or (shown == "unless_none" and value is None):
            continue
        document[field.name] = _convert(value)
    properties = (name for name, member in vars(type(report)).items() if isinstance(member, property))
    return document | {name: _convert(getattr(report, name)) for name in properties}


def whole(number: float) -> int | float:
    """Return an integer where the number is one, so that JSON shows `256` instead of `256.0`."""
    return int(number) if number == int(number) else number


def _convert(value: object) -> Json:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_convert(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    raise TypeError(f"got a {type(value).__name__}, expected a number, a text, a sequence or a report")
