"""The base of all frozen specs: strict, closed, with errors a person can act on."""

import re
from typing import ClassVar, NoReturn, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

_READABLE = "hybridkv"
_FIXES_BY_TYPE = {
    "missing": "add the field",
    "extra_forbidden": "remove it or correct its spelling",
    "int_type": "give an integer",
    "string_type": "give a string",
    "tuple_type": "give a list",
    "literal_error": "choose one of the listed values",
    "union_tag_invalid": "choose one of the listed kinds",
    "union_tag_not_found": "add the field `kind`",
    "json_invalid": "check that the file is complete JSON",
    "model_type": "give an object",
}


class Frozen(BaseModel):
    """A frozen, strict model that refuses unknown fields.

    A subclass lists in `fixes` what to do about a wrong value of a field; every line of the resulting
    `ValidationError` names the field, the value, the rule and the fix.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    fixes: ClassVar[dict[str, str]] = {}

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            details = [cls._readable(line) for line in error.errors(include_url=False)]
            raise ValidationError.from_exception_data(cls.__name__, details) from None

    @classmethod
    def _readable(cls, line: "object") -> InitErrorDetails:
        assert isinstance(line, dict)
        loc, value = tuple(line["loc"]), line["input"]
        if line["type"] == _READABLE:
            return InitErrorDetails(
                type=PydanticCustomError(_READABLE, "{text}", {"text": line["msg"]}), loc=loc, input=value
            )
        field = next((part for part in reversed(loc) if isinstance(part, str)), cls.__name__)
        known = f" (known fields: {', '.join(cls.model_fields)})" if line["type"] == "extra_forbidden" else ""
        fix = cls.fixes.get(field) or _FIXES_BY_TYPE.get(line["type"], "correct the value")
        rule = line["msg"][0].lower() + line["msg"][1:]
        got = "nothing" if line["type"] == "missing" else short_repr(value)
        text = f"{field}: got {got}, {rule}{known}; {fix}"
        return InitErrorDetails(type=PydanticCustomError(_READABLE, "{text}", {"text": text}), loc=loc, input=value)


def fail(field: str, rule: str, fix: str) -> NoReturn:
    """Raise from a validator an error that names the field, the broken rule and the fix."""
    raise PydanticCustomError(_READABLE, "{text}", {"text": f"{field}: {rule}; {fix}"})


def readable_errors(error: ValidationError) -> list[str]:
    """Return one line per problem, with the path to the field first."""
    lines = []
    for line in error.errors(include_url=False):
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in line["loc"]).lstrip(".")
        field, colon, rest = line["msg"].partition(": ")
        same_field = colon and re.sub(r"(\[\d+\])+$", "", path).endswith(field)
        lines.append(f"{path}: {rest}" if same_field else f"{path}: {line['msg']}" if path else line["msg"])
    return lines


def short_repr(value: object, limit: int = 80) -> str:
    """Return the repr of a value, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
