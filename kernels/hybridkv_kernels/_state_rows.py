"""How recurrent ops pick the rows of a `StateBatch`, load their start states, store their end states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridkv_kernels._triton import jit, tl
from hybridkv_kernels.constants import NULL_BLOCK_ID
from hybridkv_kernels.state_batch import StateBatch

__all__ = [
    "LOWEST_LOG_DECAY",
    "LiveRow",
    "SplitRows",
    "live_rows",
    "load_read_slot",
    "load_states",
    "rows_by_length",
    "split_rows",
    "store_states",
]

# Below exp(-87) = 1.6e-38 float32 loses precision, soon everything: a stronger decay of one token counts as this one.
LOWEST_LOG_DECAY = -87.0


@dataclass(frozen=True)
class LiveRow:
    """A row that is not skipped, on the host: its tokens `[begin, end)`, its slots; no read slot is a zero start."""

    begin: int
    end: int
    read_slot: int | None
    write_slot: int

    def start_state(self, state: torch.Tensor) -> torch.Tensor:
        """Return a copy of the state the row starts from, in the state's dtype."""
        if self.read_slot is None:
            return torch.zeros_like(state[NULL_BLOCK_ID])
        return state[self.read_slot].clone()


@dataclass(frozen=True)
class SplitRows:
    """Rows that are not skipped, by length: one token (batched), any other number (one at a time).

    Shapes: steps [S] int64, row of each step; step_tokens [S] int64, its token.
    """

    steps: torch.Tensor
    step_tokens: torch.Tensor
    scans: tuple[LiveRow, ...]


def live_rows(batch: StateBatch) -> tuple[LiveRow, ...]:
    """Return the rows that are not skipped; syncs."""
    starts, zeros = batch.query_start_loc.tolist(), batch.zero_start.tolist()
    slots = zip(batch.read_slots.tolist(), batch.write_slots.tolist(), strict=True)
    return tuple(
        LiveRow(starts[row], starts[row + 1], None if zeros[row] else read, write)
        for row, (read, write) in enumerate(slots)
        if write > NULL_BLOCK_ID
    )


def rows_by_length(batch: StateBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows `[S]` int64 that are not skipped: those of one token, those of any other number; syncs."""
    is_live, is_step = batch.write_slots > NULL_BLOCK_ID, batch.query_start_loc.diff() == 1
    return (is_live & is_step).nonzero().squeeze(1), (is_live & ~is_step).nonzero().squeeze(1)


def split_rows(batch: StateBatch) -> SplitRows:
    """Split the rows that are not skipped by length; syncs."""
    steps, others = rows_by_length(batch)
    scans: tuple[LiveRow, ...] = ()
    if others.numel():
        scans = tuple(row for row in live_rows(batch) if row.end - row.begin != 1)
    return SplitRows(steps, batch.query_start_loc.long()[steps], scans)


def load_states(state: torch.Tensor, batch: StateBatch, rows: torch.Tensor) -> torch.Tensor:
    """Return a copy `[S, ...]` of the states that rows `[S]` start from, in the state's dtype."""
    zero = batch.zero_start[rows]
    # The read slot of a zero start may be anything, -1 included.
    states = state.index_select(0, batch.read_slots[rows].masked_fill_(zero, NULL_BLOCK_ID))
    return states.masked_fill_(zero.view(-1, *(1,) * (state.dim() - 1)), 0.0) if bool(zero.any()) else states


def store_states(state: torch.Tensor, batch: StateBatch, rows: torch.Tensor, end_states: torch.Tensor) -> None:
    """Write the states `[S, ...]` that rows `[S]` end with, cast to the state's dtype."""
    state.index_copy_(0, batch.write_slots[rows], end_states.to(state.dtype))


@jit
def load_read_slot(
    read_slots_ptr: tl.tensor,  # [R] int64
    zero_start_ptr: tl.tensor,  # [R] bool
    row: tl.tensor,
    NULL_BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the slot that a row starts from, the null block for a zero start: its state must not be loaded."""
    return tl.where(tl.load(zero_start_ptr + row) != 0, NULL_BLOCK, tl.load(read_slots_ptr + row))
