"""Where along a sequence resume points are kept."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv.errors import SpecError
from hybridkv.units import INT64_MAX, check_integer, round_up

NO_POSITION = INT64_MAX


@dataclass(frozen=True)
class ResumePolicy:
    """Positions that a sequence goes past at which it is kept, for others to go on from.

    Attributes:
        every: tokens between points; None for none at fixed steps.
        prompt_end: keep the prompt's end, one token before it at the latest: a prompt is never hit whole.
        volatile_suffix_tokens: tokens at a prompt's end that the next prompt will not repeat, such as a chat
            template's opening of the answer: the prompt ends before them.
        branches: keep the end of what a prompt shares with a cached prefix: others branch off there too.
        finish: keep the end of a sequence when it gives its blocks up, so that a conversation goes on from there.
        max_per_path: most points along one sequence; the least valuable one goes.
    """

    every: int | None = None
    prompt_end: bool = True
    volatile_suffix_tokens: int = 0
    branches: bool = True
    finish: bool = True
    max_per_path: int = 8

    def __post_init__(self) -> None:
        if self.every is not None:
            check_integer("every", self.every, 1)
        check_integer("volatile_suffix_tokens", self.volatile_suffix_tokens, 0)
        check_integer("max_per_path", self.max_per_path, 1)
        for name in ("prompt_end", "branches", "finish"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"{name}: got {getattr(self, name)!r}, expected true or false")

    def positions(self, start: ArrayLike, num_prompt: ArrayLike, shared: ArrayLike, unit: int = 1) -> NDArray[np.int64]:
        """Return per row the first position from `start` on at which it should be kept, `NO_POSITION` without one.

        Positions are multiples of `unit`: the prompt's end and a branch are rounded down, fixed steps up.

        Shapes: start, num_prompt (tokens of the prompt), shared (tokens of it that were cached) [n]; returns [n]
        """
        begin, end, branch = (np.asarray(values, dtype=np.int64) for values in (start, num_prompt, shared))
        wanted = np.full(np.broadcast_shapes(begin.shape, end.shape, branch.shape), NO_POSITION)
        candidates = []
        if self.every is not None:
            step = round_up(self.every, unit)
            candidates.append(np.maximum(-(-begin // step), 1) * step)
        if self.prompt_end:
            candidates.append((end - max(self.volatile_suffix_tokens, 1)) // unit * unit)
        if self.branches:
            candidates.append(branch // unit * unit)
        for candidate in candidates:
            wanted = np.where((candidate >= begin) & (candidate > 0), np.minimum(wanted, candidate), wanted)
        return wanted

    def next_position(self, after: int, num_prompt: int, shared: int, unit: int = 1) -> int | None:
        """Return the first position behind `after` at which one row should be kept, None without one."""
        position = int(self.positions(after + 1, num_prompt, shared, unit))
        return None if position == NO_POSITION else position
