"""The compiled helper of the host's block tables, which an installation may lack.

It does in one call what numpy does in many. Where it was not built, for want of a compiler, or the environment says
`HYBRIDKV_NATIVE=0` when tables are made, numpy does the same work; results and errors are equal.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from hybridkv_kernels.group_meta import GroupMeta

if TYPE_CHECKING:
    from hybridkv_kernels._host import Tables

__all__ = ["VARIABLE", "ids_of", "is_built", "native_tables"]

Int64Array: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

VARIABLE = "HYBRIDKV_NATIVE"
"""Environment variable: `0` turns the helper off for tables made from then on."""


def is_built() -> bool:
    """Return whether this installation has the compiled helper."""
    return _tables_type() is not None


def native_tables(
    words: npt.NDArray[np.int32],
    metas: Sequence[GroupMeta],
    is_ring: Sequence[bool],
    log: tuple[Int64Array, Int64Array, BoolArray, BoolArray],
) -> Tables | None:
    """Return the helper for tables, None where it is not built, turned off or does not know such tables.

    Shapes: words [num_words]; log: low, high, is_dirty [num_groups * num_rows], has_spans [1]
    """
    tables_type = None if os.environ.get(VARIABLE) == "0" else _tables_type()
    if tables_type is None:
        return None
    rows = np.array([meta.as_row() for meta in metas], dtype=np.int64)
    try:
        return tables_type(words, rows, np.array(is_ring, dtype=np.bool_), *log)
    except ValueError:
        return None


def _tables_type() -> type[Tables] | None:
    try:
        from hybridkv_kernels._host import Tables
    except ImportError:
        return None
    return Tables


def ids_of(held: bytearray) -> npt.NDArray[np.int32]:
    """Return the ids of a helper's answer as an array that the caller owns."""
    ids: npt.NDArray[np.int32] = np.frombuffer(held, dtype=np.int32)
    return ids
