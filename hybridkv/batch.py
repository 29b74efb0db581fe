"""What all groups share in one step: which tokens of which rows are computed.

    batch position   0        1              2
    row              3        0              5
    token            | 0 1 2 | 3            | 4 5 |          query_start_loc = [0, 3, 4, 6]
    position         | 7 8 9 | 41           | 0 1 |          num_computed_tokens = [7, 41, 0]
                                                             seq_lens = [10, 42, 2]

Groups differ in their block tables only, so positions, lengths and the map of tokens to rows are made once a step.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv._torch import torch
from hybridkv.step_batch import StepBatch
from hybridkv_kernels.constants import PAD_SLOT_ID


@dataclass(frozen=True)
class BatchGeometry:
    """The shape of one step's flat batch, on the host and on the device.

    `max_query_len` and `max_seq_len` are upper bounds where the device knows of more computed tokens than the host.

    Everything `*_cpu` is what the host knows, without tokens that only the device knows of, on every device.

    Shapes (R requests and T tokens, padding included):
        rows                     [R] int32, table row of each batch position; -1 for padding
        query_start_loc          [R+1] int32, token range of each batch position; flat in the padding
        seq_lens                 [R] int32, tokens in the cache after this step; 0 for padding
        zero_start               [R] bool, nothing of the row is in the cache before this step; false for padding
        token_rows               [T] int32, table row of each token; -1 for padding
        positions                [T] int64, position of each token in its sequence; 0 for padding
        num_computed_tokens_cpu  [R] int64, tokens in the cache before this step; 0 for padding
    """

    batch: StepBatch
    max_query_len: int
    max_seq_len: int
    rows: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    zero_start: torch.Tensor
    token_rows: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def build(
        cls,
        rows: ArrayLike,
        num_scheduled_tokens: ArrayLike,
        num_computed_tokens: ArrayLike,
        *,
        device: str | torch.device = "cpu",
        num_reqs_padded: int = 0,
        num_tokens_padded: int = 0,
    ) -> "BatchGeometry":
        """Build the geometry of a step in which row `rows[i]` computes `num_scheduled_tokens[i]` tokens.

        A step of `MultiGroupBlockTable` makes its own, without copies of its own; this is for a batch without tables.

        Shapes: rows, num_scheduled_tokens, num_computed_tokens [num_reqs]
        Raises: ValueError if the shapes differ, a row schedules less than one token, a length passes int32 or a padded
            size is too small.
        """
        batch = StepBatch.of(rows, num_scheduled_tokens, num_computed_tokens)
        size_r, size_t = batch.padded_sizes(num_reqs_padded, num_tokens_padded)
        token_rows, positions = np.empty(size_t, dtype=np.int32), np.empty(size_t, dtype=np.int64)
        batch.write_tokens(token_rows, positions)
        host = (
            _padded(batch.rows, size_r, PAD_SLOT_ID, np.int32),
            _padded(batch.query_starts, size_r + 1, batch.num_tokens, np.int32),
            _padded(batch.seq_lens, size_r, 0, np.int32),
            _padded(batch.computed == 0, size_r, 0, np.bool_),
            token_rows,
            positions,
        )
        on_device = [torch.from_numpy(array).to(device, non_blocking=True) for array in host]
        return cls(batch, batch.max_query_len, batch.max_seq_len, *on_device)

    @property
    def num_reqs(self) -> int:
        """Batch positions without padding."""
        return self.batch.num_reqs

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return self.batch.num_tokens

    @property
    def last_token_indices(self) -> NDArray[np.int64]:
        """Return `[num_reqs]`: each batch position's last token in the flat batch."""
        return self.batch.query_starts[1:] - 1

    @cached_property
    def rows_cpu(self) -> NDArray[np.int32]:
        """Return `rows` on the host."""
        return _padded(self.batch.rows, len(self.rows), PAD_SLOT_ID, np.int32)

    @cached_property
    def query_start_loc_cpu(self) -> NDArray[np.int32]:
        """Return `query_start_loc` on the host."""
        return _padded(self.batch.query_starts, len(self.rows) + 1, self.num_tokens, np.int32)

    @cached_property
    def seq_lens_cpu(self) -> NDArray[np.int32]:
        """Return `seq_lens` on the host, lower bounds where the device knows of more computed tokens."""
        return _padded(self.batch.seq_lens, len(self.rows), 0, np.int32)

    @cached_property
    def num_computed_tokens_cpu(self) -> NDArray[np.int64]:
        """Return `[R]` int64: tokens in the cache before each batch position's step, 0 for padding."""
        return _padded(self.batch.computed, len(self.rows), 0, np.int64)

    @cached_property
    def token_rows_cpu(self) -> NDArray[np.int32]:
        """Return `token_rows` on the host."""
        return self._tokens_cpu[0]

    @cached_property
    def positions_cpu(self) -> NDArray[np.int64]:
        """Return `positions` on the host."""
        return self._tokens_cpu[1]

    @cached_property
    def _tokens_cpu(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        size = len(self.positions)
        token_rows, positions = np.empty(size, dtype=np.int32), np.empty(size, dtype=np.int64)
        self.batch.write_tokens(token_rows, positions)
        return token_rows, positions


_Scalar = TypeVar("_Scalar", bound=np.generic)


def _padded(values: NDArray[np.generic], size: int, fill: int, dtype: type[_Scalar]) -> NDArray[_Scalar]:
    out: NDArray[_Scalar] = np.full(size, fill, dtype=dtype)
    out[: len(values)] = values
    return out
