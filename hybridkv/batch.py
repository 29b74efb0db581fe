"""What all groups share in one step: which tokens of which rows are computed.

    batch position   0        1              2
    row              3        0              5
    token            | 0 1 2 | 3            | 4 5 |          query_start_loc = [0, 3, 4, 6]
    position         | 7 8 9 | 41           | 0 1 |          num_computed_tokens = [7, 41, 0]
                                                             seq_lens = [10, 42, 2]

Groups differ in their block tables only, so positions, lengths and the map of tokens to rows are made once a step.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv._torch import torch
from hybridkv.units import INT32_MAX, int_array
from hybridkv_kernels.constants import PAD_SLOT_ID


@dataclass(frozen=True)
class BatchGeometry:
    """The shape of one step's flat batch, on the host and on the device.

    Shapes (R requests and T tokens, padding included):
        rows                 [R] int32, table row of each batch position; -1 for padding
        query_start_loc      [R+1] int32, token range of each batch position; flat in the padding
        seq_lens             [R] int32, tokens in the cache after this step; 0 for padding
        num_computed_tokens  [R] int64 (host), tokens in the cache before this step
        token_rows           [T] int32, table row of each token; -1 for padding
        positions            [T] int64, position of each token in its sequence; 0 for padding
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    rows_cpu: NDArray[np.int32]
    query_start_loc_cpu: NDArray[np.int32]
    seq_lens_cpu: NDArray[np.int32]
    num_computed_tokens_cpu: NDArray[np.int64]
    token_rows_cpu: NDArray[np.int32]
    positions_cpu: NDArray[np.int64]
    rows: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
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

        Shapes: rows, num_scheduled_tokens, num_computed_tokens [num_reqs]
        Raises: ValueError if the shapes differ, a row schedules less than one token, a length passes int32 or a padded
            size is too small.
        """
        row_ids = int_array("rows", rows)
        scheduled = int_array("num_scheduled_tokens", num_scheduled_tokens)
        computed = int_array("num_computed_tokens", num_computed_tokens)
        if not row_ids.shape == scheduled.shape == computed.shape:
            raise ValueError(
                f"rows, scheduled and computed tokens: got shapes {row_ids.shape}, {scheduled.shape} and "
                f"{computed.shape}, expected equal, flat ones"
            )
        if (scheduled < 1).any() or (computed < 0).any() or (row_ids < 0).any():
            raise ValueError("got a negative row or length or a row without tokens, expected at least one token a row")
        if row_ids.max(initial=0) > INT32_MAX or np.unique(row_ids).size != row_ids.size:
            raise ValueError(f"rows: got {row_ids.tolist()}, expected distinct rows that fit int32")
        num_reqs, num_tokens = len(row_ids), int(scheduled.sum())
        size_r, size_t = max(num_reqs_padded, num_reqs), max(num_tokens_padded, num_tokens)
        if 0 < num_reqs_padded < num_reqs or 0 < num_tokens_padded < num_tokens:
            raise ValueError(
                f"padded sizes: got {num_reqs_padded} rows and {num_tokens_padded} tokens for {num_reqs} rows "
                f"and {num_tokens} tokens"
            )
        seq_lens = computed + scheduled
        if max(seq_lens.max(initial=0), num_tokens) > INT32_MAX:
            raise ValueError(
                f"lengths: got a row of {seq_lens.max()} tokens and a batch of {num_tokens} tokens, expected at most "
                f"{INT32_MAX}: lengths on the device are int32"
            )
        starts = np.concatenate([[0], scheduled.cumsum()])
        token_positions = np.repeat(computed - starts[:-1], scheduled) + np.arange(num_tokens)
        host = (
            _padded(row_ids, size_r, PAD_SLOT_ID, np.int32),
            _padded(starts, size_r + 1, num_tokens, np.int32),
            _padded(seq_lens, size_r, 0, np.int32),
            _padded(computed, size_r, 0, np.int64),
            _padded(np.repeat(row_ids, scheduled), size_t, PAD_SLOT_ID, np.int32),
            _padded(token_positions, size_t, 0, np.int64),
        )
        on_device = [torch.from_numpy(host[i]).to(device, non_blocking=True) for i in (0, 1, 2, 4, 5)]
        return cls(
            num_reqs,
            num_tokens,
            int(scheduled.max(initial=0)),
            int(seq_lens.max(initial=0)),
            *host,
            *on_device,
        )

    @property
    def last_token_indices(self) -> NDArray[np.int64]:
        """Return `[num_reqs]`: each batch position's last token in the flat batch."""
        return self.query_start_loc_cpu[1 : self.num_reqs + 1].astype(np.int64) - 1


_Scalar = TypeVar("_Scalar", bound=np.generic)


def _padded(values: NDArray[np.generic], size: int, fill: int, dtype: type[_Scalar]) -> NDArray[_Scalar]:
    out: NDArray[_Scalar] = np.full(size, fill, dtype=dtype)
    out[: len(values)] = values
    return out
