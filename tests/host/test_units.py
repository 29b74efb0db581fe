"""Claims about integer arithmetic and byte sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import SpecError
from hybridkv.units import cdiv, format_bytes, int_array, parse_bytes, round_up


@given(a=st.integers(0, 2**70), b=st.integers(1, 2**40))
def test_cdiv_is_the_least_count_that_covers(a: int, b: int) -> None:
    """`cdiv(a, b)` pieces of b cover a, one piece fewer does not, in exact integers of any size."""
    pieces = cdiv(a, b)
    assert pieces * b >= a > (pieces - 1) * b


@given(a=st.integers(0, 2**70), multiple=st.integers(1, 2**40))
def test_round_up_is_the_next_multiple(a: int, multiple: int) -> None:
    """`round_up` gives a multiple that is at least the number and less than one multiple above it."""
    rounded = round_up(a, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - a < multiple


def test_int_array_takes_integers_only() -> None:
    """Flat integers become int64; floats are refused instead of rounded, and so is a nested list."""
    assert int_array("rows", [3, 2**40]).tolist() == [3, 2**40]
    assert int_array("rows", []).tolist() == []
    for wrong in ([0.9], [[1]], ["1"], [True]):
        with pytest.raises(ValueError, match="rows"):
            int_array("rows", wrong)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1073741824", 2**30),
        ("7 b", 7),
        ("80GiB", 80 * 2**30),
        ("80 GB", 80 * 10**9),
        ("512mib", 512 * 2**20),
        (" 1.5KiB ", 1536),
        (".5 kB", 500),
        ("2TiB", 2**41),
        ("3tb", 3 * 10**12),
    ],
)
def test_byte_sizes_parse(text: str, num_bytes: int) -> None:
    """Binary units are powers of 1024, decimal ones of 1000; case and spaces do not matter."""
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "0.4", "1.2.3", "5 XB", "1e9", "1 GiB!", "nan"])
def test_bad_byte_sizes_are_refused_with_their_text(text: str) -> None:
    """A text that is no positive byte size raises a `SpecError` that quotes it."""
    with pytest.raises(SpecError, match="byte size: got") as raised:
        parse_bytes(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (491_520, "480.00 KiB"),
        (2**20, "1.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (5 * 2**40, "5.00 TiB"),
        (2**51, "2048.00 TiB"),
    ],
)
def test_byte_sizes_format(num_bytes: int, text: str) -> None:
    """Sizes print in the largest binary unit that keeps the number at least 1."""
    assert format_bytes(num_bytes) == text
