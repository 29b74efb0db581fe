"""The least numpy work for a decode step of a block manager: no validation, no eviction, no hashing."""

from collections.abc import Sequence

import numpy as np
from manager_workloads import BLOCK_SIZE, MAX_ROW_TOKENS, NUM_ROWS, Shape, StepTokens
from numpy.typing import NDArray

_SPARE_BLOCKS = 4096


class Floor:
    """Tables of one group of full attention, one of the window; states stay where they are.

    Every row runs, in order; block ids come from a stack on which those that leave a window are put back.
    """

    name = "numpy floor"
    block_size = BLOCK_SIZE

    def __init__(self, shape: Shape) -> None:
        self._windows = [None] if shape.window is None else [None, shape.window]
        width = MAX_ROW_TOKENS // BLOCK_SIZE
        self.tables = [np.zeros((NUM_ROWS, width), dtype=np.int32) for _ in self._windows]
        num_blocks = NUM_ROWS * width * len(self._windows) + _SPARE_BLOCKS
        self._free = np.arange(num_blocks, 0, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._lengths = np.zeros(NUM_ROWS, dtype=np.int64)

    def fill_rows(self, prompts: Sequence[NDArray[np.int32]]) -> None:
        """Give the rows the blocks of their prompts."""
        self._lengths = np.array([len(prompt) for prompt in prompts])
        ordinals = np.arange(self.tables[0].shape[1])
        for table, window in zip(self.tables, self._windows, strict=True):
            first = 0 if window is None else np.maximum(self._lengths - window + 1, 0) // BLOCK_SIZE
            live = (ordinals * BLOCK_SIZE < self._lengths[:, None]) & (ordinals >= np.reshape(first, (-1, 1)))
            table[live] = self._pop(int(live.sum()))

    def fill_cache(self) -> None:
        """Do nothing: there is no cache."""

    def _pop(self, count: int) -> NDArray[np.int32]:
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count]

    def decode_step(self, _tokens: StepTokens) -> None:
        """Append a block to each row at a block's end, free the blocks that no later query can see."""
        lengths = self._lengths
        rows = np.flatnonzero(lengths % BLOCK_SIZE == 0)
        columns = lengths[rows] // BLOCK_SIZE
        for table in self.tables:
            table[rows, columns] = self._pop(len(rows))
        lengths += 1
        for table, window in zip(self.tables[1:], self._windows[1:], strict=True):
            first = lengths - window + 1
            rows = np.flatnonzero(first % BLOCK_SIZE == 0)
            columns = first[rows] // BLOCK_SIZE - 1
            self._free[self._num_free : self._num_free + len(rows)] = table[rows, columns]
            self._num_free += len(rows)
            table[rows, columns] = 0

    def settle(self, tokens: StepTokens) -> None:
        """Do nothing: the step has done it all."""

    def num_full_blocks(self) -> int:
        """Count the entries of the first table."""
        return int(np.count_nonzero(self.tables[0]))

    def num_window_blocks(self) -> int:
        """Count the entries of the window's table."""
        return int(np.count_nonzero(self.tables[1])) if len(self.tables) > 1 else 0
