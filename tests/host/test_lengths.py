"""Claims about lengths in tokens: as text, in traces."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from hybridkv.errors import InvalidRequest
from hybridkv.lengths import format_tokens, parse_tokens, read_lengths

MOONCAKE = (
    b'{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
    b'{"input_length": 1, "output_length": 0}\n'
)
AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.03,3180,8\n"
VATTENTION = (
    b"num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n7564.0,192.0,7756.0,39.3958\n5,6,11,0.8\n"
)


def read(tmp_path: Path, content: bytes, name: str = "trace") -> list[tuple[int, int]]:
    """Read a trace with this content."""
    (tmp_path / name).write_bytes(content)
    return [tuple(request) for request in read_lengths(tmp_path / name)]


@pytest.mark.parametrize(
    ("text", "num_tokens"),
    [
        ("1", 1),
        ("8192", 8192),
        ("8K", 8192),
        ("8k", 8192),
        (" 128K ", 131072),
        ("1M", 2**20),
        ("2147483647", 2**31 - 1),
    ],
)
def test_lengths_are_parsed_in_powers_of_two(text: str, num_tokens: int) -> None:
    """K is 1,024 tokens and M is 1,048,576, in either case; plain numbers are tokens."""
    assert parse_tokens(text) == num_tokens


@pytest.mark.parametrize(
    "text", ["", "0", "0K", "8Q", "8KB", "-1", "1.5K", "K", "8 K K", "2M,", "2048M", "٣", "1e3", "9" * 5000]
)
def test_what_is_no_length_is_refused(text: str) -> None:
    """A text that is no positive number of tokens within 32 bits is refused with an example of one that is."""
    with pytest.raises(InvalidRequest, match="such as 8192, 8K or 1M"):
        parse_tokens(text)


@pytest.mark.parametrize(
    ("num_tokens", "text"),
    [(1, "1"), (448, "448"), (8192, "8K"), (131072, "128K"), (131000, "131,000"), (2**20, "1M"), (3 * 2**19, "1536K")],
)
def test_round_lengths_are_short(num_tokens: int, text: str) -> None:
    """Whole multiples of K or M are written with it, others in full; the short ones are parsed back."""
    assert format_tokens(num_tokens) == text
    assert parse_tokens(text.replace(",", "")) == num_tokens


@pytest.mark.parametrize(
    ("content", "lengths"),
    [
        (MOONCAKE, [(6758, 500), (1, 0)]),
        (AZURE, [(4808, 10), (3180, 8)]),
        (VATTENTION, [(7564, 192), (5, 6)]),
        (AZURE.replace(b"\n", b"\r\n"), [(4808, 10), (3180, 8)]),
        (AZURE + b"\n\n", [(4808, 10), (3180, 8)]),
        (b"\xef\xbb\xbf" + MOONCAKE, [(6758, 500), (1, 0)]),
    ],
    ids=["mooncake", "azure", "vattention", "crlf", "empty lines", "bom"],
)
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
def test_known_traces_are_read(tmp_path: Path, content: bytes, lengths: list[tuple[int, int]], zipped: bool) -> None:
    """The formats give input and output lengths in order, plain or gzipped; a sequence ends at their sum."""
    assert read(tmp_path, gzip.compress(content) if zipped else content) == lengths
    assert [request.num_tokens for request in read_lengths(tmp_path / "trace")] == [sum(pair) for pair in lengths]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": is empty, expected JSON lines with input_length and output_length, or CSV"),
        (b"\n \n", "is empty"),
        (b"\xff\xfe", "is not valid UTF-8"),
        (b"\x1f\x8b\x08broken", "is no complete gzip file"),
        (
            b"conversation,turn,role,tokens\n0,0,user,33\n",
            "line 1: got conversation,turn,role,tokens, expected JSON lines",
        ),
        (b'{"input_length": 1}\n', "line 1: got"),
        (MOONCAKE + b"{broken\n", "line 3: got {broken, which is no JSON"),
        (MOONCAKE + b"[1, 2]\n", "line 3: got [1, 2], expected"),
        (b'{"input_length": 1, "output_length": "2x"}', "line 1: output_length: got '2x', expected a whole number"),
        (b'{"input_length": true, "output_length": 2}', "line 1: input_length: got True"),
        (b'{"input_length": 0, "output_length": 0}', "line 1: got a request of 0 tokens"),
        (b'{"input_length": 3000000000, "output_length": 0}', "line 1: got a request of 3000000000 tokens"),
        (AZURE + b"2023,1\n", "line 4: got 2 columns, expected 3"),
        (AZURE + b"2023,1,-1\n", "line 4: GeneratedTokens: got '-1'"),
        (AZURE + b"2023,1.5,1\n", "line 4: ContextTokens: got '1.5'"),
        (AZURE + b"2023,nan,1\n", "line 4: ContextTokens: got 'nan'"),
        (AZURE + b"2023,inf,1\n", "line 4: ContextTokens: got 'inf'"),
        (AZURE + b"2023,,1\n", "line 4: ContextTokens: got ''"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """Anything else is refused in one line that names the file, the line and what was expected."""
    with pytest.raises(InvalidRequest) as error:
        read(tmp_path, content)
    text = str(error.value)
    assert message in text
    assert text.startswith(f"trace {str(tmp_path / 'trace')!r}")
    assert "\n" not in text


@pytest.mark.parametrize("name", [".", "missing"])
def test_unreadable_files_are_refused(tmp_path: Path, name: str) -> None:
    """A folder or a missing file is refused as one that cannot be read."""
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_lengths(tmp_path / name)
