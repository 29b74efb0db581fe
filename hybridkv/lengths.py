"""Lengths in tokens, as people write them, as traces record them."""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hybridkv.errors import InvalidRequest
from hybridkv.units import INT32_MAX

_TOKEN_UNITS = {"": 1, "k": 2**10, "m": 2**20}
_JSON_KEYS = ("input_length", "output_length")
_CSV_COLUMNS = (("ContextTokens", "GeneratedTokens"), ("num_prefill_tokens", "num_decode_tokens"))
_GZIP_MAGIC = b"\x1f\x8b"
_EXPECTED = (
    f"expected JSON lines with {' and '.join(_JSON_KEYS)}, or CSV with the columns "
    f"{' or '.join(','.join(columns) for columns in _CSV_COLUMNS)}"
)


class RequestLength(NamedTuple):
    """Tokens of one request: its prompt, its answer."""

    input_tokens: int
    output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence when it ends."""
        return self.input_tokens + self.output_tokens


def parse_tokens(text: str, name: str = "length") -> int:
    """Parse `"8192"`, `"8K"` or `"1M"` into tokens.

    K is 2^10 and M is 2^20 tokens: 8K = 8192. `name` is what an error calls it.

    Raises: InvalidRequest if the text is no positive number of tokens of at most 2^31 - 1.
    """
    match = re.fullmatch(r"\s*([0-9]{1,10})\s*([kKmM]?)\s*", text, re.ASCII)
    num_tokens = int(match[1]) * _TOKEN_UNITS[match[2].lower()] if match else 0
    if not 1 <= num_tokens <= INT32_MAX:
        raise InvalidRequest(f"{name}: got {text!r:.40}, expected a positive number of tokens such as 8192, 8K or 1M")
    return num_tokens


def format_tokens(num_tokens: int) -> str:
    """Return a length as `"8K"` or `"1M"` where that is exact, such as `"131,000"` otherwise."""
    for suffix, unit in (("M", 2**20), ("K", 2**10)):
        if num_tokens % unit == 0:
            return f"{num_tokens // unit}{suffix}"
    return f"{num_tokens:,}"


def read_lengths(path: Path) -> list[RequestLength]:
    """Return the requests of a trace, in its order.

    Traces are JSON lines with `input_length` and `output_length`, or CSV with a header that names `ContextTokens` and
    `GeneratedTokens` or `num_prefill_tokens` and `num_decode_tokens`; either may be gzipped. Other keys and columns
    are ignored, as are empty lines.

    Raises: InvalidRequest, which names file, line and what was expected.
    """
    where = f"trace {str(path)!r}"
    lines = _lines(path, where)
    if not lines:
        raise InvalidRequest(f"{where}: is empty, {_EXPECTED}")
    if lines[0][1].lstrip().startswith("{"):
        return [_from_json(line, f"{where}, line {number}") for number, line in lines]
    return list(_from_csv(lines, where))


def _lines(path: Path, where: str) -> list[tuple[int, str]]:
    """Return the lines that are not empty, with their numbers."""
    try:
        raw = path.read_bytes()
        if raw.startswith(_GZIP_MAGIC):
            raw = gzip.decompress(raw)
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{where}: is not valid UTF-8, {_EXPECTED}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InvalidRequest(f"{where}: is no complete gzip file; fetch it again") from None
    except OSError as error:
        raise InvalidRequest(f"{where}: cannot be read ({error.strerror}); give a file") from None
    return [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]


def _from_json(line: str, where: str) -> RequestLength:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{where}: got {line:.60}, which is no JSON; {_EXPECTED}") from None
    if not isinstance(fields, dict) or not all(key in fields for key in _JSON_KEYS):
        raise InvalidRequest(f"{where}: got {line:.60}, {_EXPECTED}")
    return _request((fields[key] for key in _JSON_KEYS), _JSON_KEYS, where)


def _from_csv(lines: list[tuple[int, str]], where: str) -> Iterator[RequestLength]:
    first, header = lines[0]
    names = [name.strip() for name in _cells(header)]
    columns = next((pair for pair in _CSV_COLUMNS if set(pair) <= set(names)), None)
    if columns is None:
        raise InvalidRequest(f"{where}, line {first}: got {header:.60}, {_EXPECTED}")
    positions = [names.index(column) for column in columns]
    for number, line in lines[1:]:
        cells = _cells(line)
        if len(cells) != len(names):
            raise InvalidRequest(f"{where}, line {number}: got {len(cells)} columns, expected {len(names)}: {line:.60}")
        yield _request((cells[position] for position in positions), columns, f"{where}, line {number}")


def _cells(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def _request(values: Iterable[object], names: tuple[str, str], where: str) -> RequestLength:
    request = RequestLength(*(_count(value, f"{where}: {name}") for value, name in zip(values, names, strict=True)))
    if not 1 <= request.num_tokens <= INT32_MAX:
        raise InvalidRequest(f"{where}: got a request of {request.num_tokens} tokens, expected 1 to {INT32_MAX}")
    return request


def _count(value: object, where: str) -> int:
    """Return a count of tokens; a whole number may have been written as a float."""
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise InvalidRequest(f"{where}: got {value!r}, expected a whole number of tokens")
    return number
