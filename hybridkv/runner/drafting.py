"""Guesses of what follows, for a step that verifies several tokens at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import InvalidRequest

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class PromptLookup:
    """Guesses that what followed the last tokens where they stood before follows them again.

    Attributes:
        num_drafts: most tokens to guess.
        max_ngram: how many of the last tokens to look for; fewer, down to one, where they did not stand before.
    """

    num_drafts: int = 4
    max_ngram: int = 3

    def __post_init__(self) -> None:
        if self.num_drafts < 1 or self.max_ngram < 1:
            raise InvalidRequest(f"drafts: got {self.num_drafts} of {self.max_ngram}, expected at least 1 of each")

    def __call__(self, tokens: Int64) -> Sequence[int]:
        """Return what followed the latest earlier place of the last tokens `[n]`, nothing if there is none."""
        for length in range(min(self.max_ngram, len(tokens) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
            places = np.flatnonzero((windows == tokens[-length:]).all(axis=1))
            if places.size:
                begin = int(places[-1]) + length
                drafts: list[int] = tokens[begin : begin + self.num_drafts].tolist()
                return drafts
        return []
