"""Blocks that nobody holds while a step in flight may still touch them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import InvariantError
from hybridkv.slabs import distinct

Waiting = tuple[int, NDArray[np.int64]]


class DrainQueue:
    """Which blocks drain, and the step each one waits for.

    Steps are numbered from 1 in the order of `launch`. A block's last step to wait for stays known when the block is
    held again, so that letting it go once more never frees it early.

    Attributes:
        draining: `[num_flat]` bool.
        launched, settled: the last step launched, the last one known to have finished.
    """

    def __init__(self, num_flat: int) -> None:
        self.draining = np.zeros(num_flat, dtype=np.bool_)
        self.launched = 0
        self.settled = 0
        self._until = np.zeros(num_flat, dtype=np.int64)
        self._queue: list[Waiting] = []
        self._last_until = 0

    def launch(self) -> int:
        """Count a step that was launched and return its number."""
        self.launched += 1
        return self.launched

    @property
    def any_waits(self) -> bool:
        """Whether a block that was held again may still wait for a step."""
        return self._last_until > self.settled

    def waits(self, flat: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which blocks were let go once and still wait for a step, `[n]`."""
        waits: NDArray[np.bool_] = self._until[flat] > self.settled
        return waits

    def add(self, flat: NDArray[np.int64], step: int) -> None:
        """Let distinct blocks drain until `step` has settled, or a later step that they waited for already.

        The array is kept.
        """
        until = np.maximum(self._until[flat], step) if self._last_until > step else step
        self._queue.append((step, flat))
        self._until[flat] = until
        self._last_until = max(self._last_until, step)
        self.draining[flat] = True

    def ready(self, step: int) -> tuple[NDArray[np.int64], list[Waiting]]:
        """Return the blocks, rising, that no longer drain once `step` has settled, and the queue that is left.

        Raises: ValueError if the step has settled already or was never launched.
        """
        if not self.settled < step <= self.launched:
            raise ValueError(
                f"step: got {step}, expected one of those in flight: {self.settled + 1}..{self.launched}"
                if self.settled < self.launched
                else f"step: got {step}, but no step is in flight; launch first"
            )
        queued = [flat for queued_step, flat in self._queue if queued_step <= step]
        left = [waiting for waiting in self._queue if waiting[0] > step]
        if not queued:
            return np.empty(0, dtype=np.int64), left
        flat = np.concatenate(queued)
        flat = flat[self.draining[flat] & (self._until[flat] <= step)]
        return distinct(flat), left

    def settle(self, step: int, ready: NDArray[np.int64], left: list[Waiting]) -> None:
        """Count steps up to `step` as finished, with what `ready` returned."""
        self.draining[ready] = False
        self.settled = step
        self._queue = left

    def check(self) -> None:
        """Check that every draining block is queued for the step that it waits for, one that has not settled.

        Raises: InvariantError if not.
        """
        queued = np.zeros_like(self._until)
        for step, flat in self._queue:
            queued[flat] = np.maximum(queued[flat], step)
        until = self._until[self.draining]
        if (until <= self.settled).any() or (queued[self.draining] != until).any() or self.settled > self.launched:
            raise InvariantError("a draining block waits for a step that has settled, or is not queued for its step")
