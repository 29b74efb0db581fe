"""Row ids, integer arithmetic, byte sizes."""

import re
from decimal import Decimal
from typing import NewType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv.errors import SpecError

RowId = NewType("RowId", int)

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
_BYTE_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}


def cdiv(a: int, b: int) -> int:
    """Return `a / b` rounded up, for `a >= 0` and `b > 0`."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `a`."""
    return cdiv(a, multiple) * multiple


def int_array(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """Return flat integers as an array `[n]` int64.

    Raises: ValueError if they are not flat or not integers; a float is not rounded.
    """
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name}: got {array.dtype} of shape {array.shape}, expected a flat list of integers")
    return array.astype(np.int64)


def distinct_bounds(values: NDArray[np.int64]) -> tuple[int, int] | None:
    """Return the lowest and the highest of distinct values, None if one occurs twice; (0, -1) without values.

    Rising values, the usual order of rows, take one pass.
    """
    if len(values) < 2 or bool((values[1:] > values[:-1]).all()):
        return (int(values[0]), int(values[-1])) if len(values) else (0, -1)
    return None if np.unique(values).size < values.size else (int(values.min()), int(values.max()))


def check_integer(name: str, value: object, least: int = 1, most: int = INT64_MAX) -> int:
    """Return `value` if it is an integer from `least` to `most`.

    Raises: SpecError that names it; true and false are no integers.
    """
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not least <= value <= most:
        bound = f"from {least} to {most}" if most < INT64_MAX else f"of at least {least}"
        raise SpecError(f"{name}: got {value!r}, expected an integer {bound}")
    return int(value)


def parse_bytes(text: str) -> int:
    """Parse `"80GiB"`, `"512 MB"` or `"1073741824"` into bytes.

    GiB is 2^30 bytes, GB is 10^9 bytes.

    Raises: SpecError if the text is no positive byte size.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _BYTE_UNITS:
        raise SpecError(f"byte size: got {text!r}, expected a number with a unit such as 512MiB, 80GiB or 40GB")
    num_bytes = int(Decimal(match.group(1)) * _BYTE_UNITS[unit])
    if num_bytes <= 0:
        raise SpecError(f"byte size: got {text!r}, expected more than 0 bytes")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Return a size in binary units, such as `"1.50 GiB"`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
