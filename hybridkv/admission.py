"""What `admit` and `reserve` answer."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hybridkv.units import RowId


class Verdict(IntEnum):
    """Whether a row's blocks were reserved: yes, not now, or not even with the whole pool to itself."""

    OK = 0
    LATER = 1
    NEVER = 2


@dataclass(frozen=True)
class Reservation:
    """The outcome of `reserve`.

    Shapes:
        verdicts   [num_rows] int8, a `Verdict` per row in the order asked
        shortfall  [num_groups, num_rows] int64, blocks missing for this row and those before it
    """

    verdicts: NDArray[np.int8]
    shortfall: NDArray[np.int64]

    @property
    def num_ok(self) -> int:
        """How many rows, from the first on, got their blocks."""
        return len(self.verdicts) - int(np.count_nonzero(self.verdicts))


@dataclass(frozen=True)
class Admission:
    """The outcome of `admit`.

    Attributes:
        row: the sequence's row; None unless the verdict is OK.
        num_hit_tokens: tokens from the front that are in the cache already.
        shortfall: blocks missing by group, where the verdict is LATER or NEVER.
        reason: one sentence: how long the hit is and what limits it, or what is missing.
    """

    verdict: Verdict
    row: RowId | None
    num_hit_tokens: int
    shortfall: tuple[int, ...]
    reason: str

    @property
    def admitted_row(self) -> RowId:
        """The row of a sequence that was admitted.

        Raises: ValueError if it was not.
        """
        if self.row is None:
            raise ValueError(f"admission: the verdict is {self.verdict.name}: {self.reason}")
        return self.row
