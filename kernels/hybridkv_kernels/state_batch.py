"""Which rows a recurrent op works on: their tokens, the state each starts from, the slot each writes.

    tokens          | row 0      | row 1 | row 2            |        query_start_loc = [0, 4, 5, 11]
    start state       read 3       zero    read 7                    read_slots  = [3, -1, 7], zero_start = [0, 1, 0]
    end state         write 3      write 5 write 9                   write_slots = [3,  5, 9]

A row reads the state of slot `read_slots[r]`, or starts from zeros where `zero_start[r]`, advances it over its tokens
and writes it to slot `write_slots[r]`. Reading one slot and writing another is how a sequence leaves a checkpoint
behind or forks. A slot indexes the first dimension of a state tensor, a view of all blocks of the cache.

Invariants
    S1  query_start_loc starts at 0, never falls, and ends at most at T; tokens past its end are padding, whose outputs
        are not written
    S2  a row with `write_slots[r] == PAD_SLOT_ID` is skipped: it reads and writes no state and no output
    S3  a row that is not skipped and does not start from zeros has a read slot in [1, num_slots)
    S4  write slots are PAD_SLOT_ID or in [1, num_slots), distinct, and no row's write slot is another row's read slot;
        slot 0 is the null block and is never written
    S5  a row without tokens copies its start state
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from hybridkv_kernels._checks import expect, expect_one_device, expect_tensor
from hybridkv_kernels.constants import NULL_BLOCK_ID, PAD_SLOT_ID

__all__ = ["INPUT_DTYPES", "MATRIX_STATE_DTYPES", "MAX_MATRIX_DIM", "StateBatch", "check_state_batch"]

# Of the tokens of every op.
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of states that are matrices, with the longest side that kernels serve which keep a whole row of the state at hand.
MATRIX_STATE_DTYPES = (torch.float32, torch.bfloat16)
MAX_MATRIX_DIM = 256


@dataclass(frozen=True)
class StateBatch:
    """The rows of one call of a recurrent op.

    Shapes:
        query_start_loc  [R+1] int32, token range of each row
        read_slots       [R] int64, slot of the state to start from; ignored where zero_start
        write_slots      [R] int64, slot the state is written to; PAD_SLOT_ID skips the row
        zero_start       [R] bool, the row starts from zeros
    `max_query_len` is a host integer, an upper bound of the tokens of a row: grids follow it.
    """

    query_start_loc: torch.Tensor
    read_slots: torch.Tensor
    write_slots: torch.Tensor
    zero_start: torch.Tensor
    max_query_len: int

    def __post_init__(self) -> None:
        num_rows = self.num_rows
        expect_tensor("query_start_loc", self.query_start_loc, torch.int32, (num_rows + 1,))
        expect_tensor("read_slots", self.read_slots, torch.int64, (num_rows,))
        expect_tensor("write_slots", self.write_slots, torch.int64, (num_rows,))
        expect_tensor("zero_start", self.zero_start, torch.bool, (num_rows,))
        expect_one_device(
            (
                ("query_start_loc", self.query_start_loc),
                ("read_slots", self.read_slots),
                ("write_slots", self.write_slots),
                ("zero_start", self.zero_start),
            )
        )

    @property
    def num_rows(self) -> int:
        """Number of rows, skipped ones included."""
        return int(self.write_slots.shape[0])


def check_state_batch(batch: StateBatch, num_slots: int, num_tokens: int) -> None:
    """Check the invariants S1 to S4; syncs, for tests and debugging.

    Raises: ValueError naming the argument, what was expected, what was given.
    """
    starts = batch.query_start_loc.tolist()
    lengths = [b - a for a, b in pairwise(starts)]
    expect(
        starts[0] == 0 and min(lengths, default=0) >= 0 and starts[-1] <= num_tokens,
        "query_start_loc",
        f"0 first, rising, at most {num_tokens} last",
        starts,
    )
    expect(
        max(lengths, default=0) <= batch.max_query_len,
        "max_query_len",
        f"at least {max(lengths, default=0)}",
        batch.max_query_len,
    )
    reads, writes, zeros = batch.read_slots.tolist(), batch.write_slots.tolist(), batch.zero_start.tolist()
    live = [row for row, write in enumerate(writes) if write != PAD_SLOT_ID]
    for row in live:
        inside = NULL_BLOCK_ID < writes[row] < num_slots
        expect(inside, f"write_slots[{row}]", f"{PAD_SLOT_ID} or 1..{num_slots - 1}", writes[row])
        inside = zeros[row] or NULL_BLOCK_ID < reads[row] < num_slots
        expect(inside, f"read_slots[{row}]", f"1..{num_slots - 1} or a zero start", reads[row])
    written = [writes[row] for row in live]
    expect(len(set(written)) == len(written), "write_slots", "distinct slots", written)
    for row in live:
        foreign = not zeros[row] and reads[row] in written and writes[row] != reads[row]
        expect(not foreign, f"read_slots[{row}]", "no other row's write slot", reads[row])
