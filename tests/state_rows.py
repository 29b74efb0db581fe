"""Rows, state arenas, a table of ops for tests of recurrent ops; everything that an op must not look at is NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from hybridkv_kernels.state_batch import StateBatch

Tokens = dict[str, torch.Tensor]
NUM_SLOTS = 12
UNTOUCHED = 12345.0


@dataclass(frozen=True)
class Row:
    """One row; `read` None is a zero start, `write` -1 a skipped row."""

    num_tokens: int
    read: int | None
    write: int


# An empty row, steps, a row that leaves a checkpoint, a skipped row, zero starts, in place, odd lengths.
MIXED_ROWS = (
    Row(3, 3, 3),
    Row(0, 4, 5),
    Row(1, 6, 6),
    Row(2, 7, -1),
    Row(1, None, 2),
    Row(7, None, 8),
    Row(1, 9, 10),
    Row(0, None, 11),
)


def num_tokens(rows: Sequence[Row]) -> int:
    return sum(row.num_tokens for row in rows)


def make_batch(rows: Sequence[Row], device: torch.device, ignored_slot: int = 1) -> StateBatch:
    """Make the batch of `rows`; the read slot of a zero start is `ignored_slot`."""
    starts = list(accumulate((row.num_tokens for row in rows), initial=0))
    return StateBatch(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        read_slots=torch.tensor(
            [ignored_slot if r.read is None else r.read for r in rows], dtype=torch.int64, device=device
        ),
        write_slots=torch.tensor([r.write for r in rows], dtype=torch.int64, device=device),
        zero_start=torch.tensor([r.read is None for r in rows], dtype=torch.bool, device=device),
        max_query_len=max((row.num_tokens for row in rows), default=0),
    )


def make_state(
    shape: Sequence[int], rows: Sequence[Row], device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Make a state `[NUM_SLOTS, *shape]` with gaps between slots; NaN wherever no row reads."""
    size = torch.Size(shape).numel()
    arena = torch.full((NUM_SLOTS, size + 5), torch.nan, device=device, dtype=dtype)
    state = arena[:, 2 : size + 2].unflatten(1, tuple(shape))
    generator = torch.Generator().manual_seed(size)
    for row in rows:
        if row.read is not None and row.write != -1:
            state[row.read] = torch.randn(*shape, generator=generator).to(device, dtype)
    return state


def whole_arena(state: torch.Tensor) -> torch.Tensor:
    """View everything a state is cut from, gaps included."""
    return state.as_strided((state.untyped_storage().nbytes() // state.element_size(),), (1,), 0)


def poison_idle_tokens(tokens: Tokens, rows: Sequence[Row]) -> None:
    """Fill the tokens of skipped rows, the padding with NaN."""
    starts = list(accumulate((row.num_tokens for row in rows), initial=0))
    for tensor in tokens.values():
        tensor[starts[-1] :] = torch.nan
        for row, start in zip(rows, starts, strict=False):
            if row.write == -1:
                tensor[start : start + row.num_tokens] = torch.nan


@dataclass(frozen=True)
class StateOp:
    """One op with fixed weights.

    `make_tokens(T, device)` makes its inputs by name, each `[T, ...]`; `out_of` names the one `out` looks like.
    `paths` run the op on (tokens, state, batch, out).
    """

    name: str
    state_shape: tuple[int, ...]
    out_of: str
    make_tokens: Callable[[int, torch.device], Tokens]
    reference: Callable[[Tokens, torch.Tensor, StateBatch, torch.Tensor], None]
    torch_path: Callable[[Tokens, torch.Tensor, StateBatch, torch.Tensor], None]
    launcher: Callable[[Tokens, torch.Tensor, StateBatch, torch.Tensor], None]

    def path(self, name: str) -> Callable[[Tokens, torch.Tensor, StateBatch, torch.Tensor], None]:
        return {"reference": self.reference, "torch": self.torch_path, "triton": self.launcher}[name]

    def run(self, path: str, tokens: Tokens, state: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """Run one path, then return the outputs, `UNTOUCHED` where nothing was written."""
        out = torch.full_like(tokens[self.out_of], UNTOUCHED)
        self.path(path)(tokens, state, batch, out)
        return out
