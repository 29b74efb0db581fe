"""Prompts from arguments, stdin or a file."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridkv.errors import InvalidRequest

_KEYS = ("prompt", "token_ids", "max_new_tokens")


@dataclass(frozen=True)
class Prompt:
    """A text or its token ids, exactly one of them, with the limit of this prompt alone if it has one."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    max_new_tokens: int | None = None


def read_prompts(arguments: Sequence[str], prompts_file: Path | None) -> list[Prompt]:
    """Return the prompts of the command line, then those of the file.

    Raises: InvalidRequest if there is none, or one is malformed; for a file it names the line.
    """
    prompts = [Prompt(text=_read_stdin() if text == "-" else _checked(text)) for text in arguments]
    if prompts_file is not None:
        prompts += _read_file(prompts_file)
    if not prompts:
        raise InvalidRequest(
            "no prompt: give prompts as arguments after MODEL, - to read one from stdin, or --prompts-file FILE"
        )
    return prompts


def _checked(text: str) -> str:
    if not text:
        raise InvalidRequest("prompt: got an empty text, expected at least one character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"prompt: {text!r} is not valid UTF-8") from None
    return text


def _read_stdin() -> str:
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError:
        raise InvalidRequest("prompt: stdin is not valid UTF-8") from None
    return _checked(text.removesuffix("\n").removesuffix("\r"))


def _read_file(path: Path) -> list[Prompt]:
    """Read a prompt a line; JSON lines if the name ends in .jsonl or the first line begins with a brace."""
    where = f"prompts file {str(path)!r}"
    try:
        raw_lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise InvalidRequest(f"{where}: cannot be read ({error.strerror})") from None
    lines: list[tuple[int, str]] = []
    for number, raw in enumerate(raw_lines, start=1):
        try:
            line = raw.decode().removesuffix("\r")
        except UnicodeDecodeError:
            raise InvalidRequest(f"{where}, line {number}: is not valid UTF-8") from None
        if line.strip():
            lines.append((number, line))
    if not lines:
        raise InvalidRequest(f"{where}: is empty, expected a prompt a line")
    if path.suffix == ".jsonl" or lines[0][1].lstrip().startswith("{"):
        return [_from_json(line, f"{where}, line {number}") for number, line in lines]
    return [Prompt(text=line) for _, line in lines]


def _from_json(line: str, where: str) -> Prompt:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}: is no JSON ({error})") from None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"{where}: got {line:.60}, expected an object with prompt or token_ids")
    unknown = [key for key in fields if key not in _KEYS]
    if unknown:
        raise InvalidRequest(f"{where}: unknown key {unknown[0]!r}, expected {', '.join(_KEYS)}")
    if ("prompt" in fields) == ("token_ids" in fields):
        raise InvalidRequest(f"{where}: expected either prompt or token_ids")
    limit = fields.get("max_new_tokens")
    if limit is not None and not (_is_integer(limit) and limit >= 1):
        raise InvalidRequest(f"{where}: max_new_tokens: got {limit!r}, expected an integer of at least 1")
    if "prompt" in fields:
        text = fields["prompt"]
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}: prompt: got {text!r:.60}, expected a text")
        try:
            return Prompt(text=_checked(text), max_new_tokens=limit)
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error}") from None
    ids = fields["token_ids"]
    if not isinstance(ids, list) or not ids or not all(_is_integer(i) and i >= 0 for i in ids):
        raise InvalidRequest(f"{where}: token_ids: got {ids!r:.60}, expected a list of at least one integer from 0 on")
    return Prompt(token_ids=tuple(ids), max_new_tokens=limit)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
