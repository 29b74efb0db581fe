"""How ops with a matrix state advance their rows on a CPU: single tokens in one batch, longer rows chunk by chunk."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import unflatten

from hybridkv_kernels._checks import expect, expect_dtype
from hybridkv_kernels._state_rows import LOWEST_LOG_DECAY, load_states, rows_by_length, store_states
from hybridkv_kernels._triton import next_power_of_2
from hybridkv_kernels.state_batch import MATRIX_STATE_DTYPES, StateBatch

__all__ = [
    "RowMath",
    "advance_rows",
    "causal_decay",
    "decay_factor",
    "expect_matrix_state",
    "sum_log_decays",
    "take_tokens",
]

_CHUNK_TOKENS = 64


class RowMath(Protocol):
    """One op's formula for S rows at once; states are float32 copies, which it may overwrite."""

    def step(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Advance each row by one token.

        Shapes: tokens [S] int64; states [S, ...]; returns outputs [S, ...] with the new states.
        """

    def chunk(
        self, tokens: torch.Tensor, is_token: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advance each row by the tokens of one chunk, a power of two; where `is_token` is false there is none.

        Shapes: tokens [S, C] int64; is_token [S, C] bool; states [S, ...]; returns outputs [S, C, ...] with the new
        states.
        """


def advance_rows(batch: StateBatch, state: torch.Tensor, out: torch.Tensor, math: RowMath) -> None:
    """Advance all rows of a batch that are not skipped; syncs.

    Shapes: state [num_slots, ...], any strides; out [T, ...].
    """
    starts, lengths = batch.query_start_loc[:-1].long(), batch.query_start_loc.diff()
    steps, rows = rows_by_length(batch)
    if steps.numel():
        tokens = starts[steps]
        outputs, states = math.step(tokens, load_states(state, batch, steps).float())
        out[tokens] = outputs.to(out.dtype)
        store_states(state, batch, steps, states)
    if rows.numel():
        # The longest rows first: those that still have tokens are then always a prefix.
        rows = rows[lengths[rows].argsort(descending=True)]
        states = load_states(state, batch, rows).float()
        _advance_chunks(starts[rows], lengths[rows], states, out, math)
        store_states(state, batch, rows, states)


def _advance_chunks(
    starts: torch.Tensor, lengths: torch.Tensor, states: torch.Tensor, out: torch.Tensor, math: RowMath
) -> None:
    """Advance rows `[S]`, longest first; `states` `[S, ...]` are updated in place."""
    longest = int(lengths[0])
    for first in range(0, longest, _CHUNK_TOKENS):
        num_rows = int((lengths > first).sum())
        width = min(_CHUNK_TOKENS, next_power_of_2(longest - first))
        position = torch.arange(first, first + width, device=starts.device)
        is_token = position < lengths[:num_rows, None]
        # Where a row has ended, its first token stands in: a token of its own, whatever padding holds.
        tokens = starts[:num_rows, None] + position.where(is_token, 0)
        outputs, states[:num_rows] = math.chunk(tokens, is_token, states[:num_rows])
        kept = is_token.flatten().nonzero().squeeze(1)
        outputs = outputs.flatten(0, 1).index_select(0, kept)
        out.index_copy_(0, tokens.flatten().index_select(0, kept), outputs.to(out.dtype))


def take_tokens(source: torch.Tensor, tokens: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
    """Return float32 `[S, C, ...]` of a source `[T, ...]`, zero where `is_token` is false.

    Shapes: tokens [S, C] int64; is_token [S, C] bool.
    """
    taken = unflatten(source.index_select(0, tokens.flatten()).float(), 0, tokens.shape)
    if bool(is_token.all()):
        return taken
    return taken.masked_fill_(~is_token.view(*is_token.shape, *(1,) * (source.dim() - 1)), 0.0)


def decay_factor(log_decay: torch.Tensor) -> torch.Tensor:
    """Return float32 exp(log_decay) of values <= 0 in the same shape; no factor is below exp(-87) = 1.6e-38.

    So what should be forgotten may leave 1.6e-38 of itself behind. On CPUs, an exp that underflows, that of -inf too,
    takes 50 times as long as one that does not.
    """
    return log_decay.float().clamp(min=LOWEST_LOG_DECAY).exp_()


def sum_log_decays(log_decay: torch.Tensor, dim: int) -> torch.Tensor:
    """Return float64 sums of log decays from the start of `dim` to each token, in the same shape.

    Sums are there to be subtracted: float64 keeps the precision of a small difference of two large ones, the lowest log
    decay keeps -inf - -inf away.
    """
    return log_decay.double().clamp(min=LOWEST_LOG_DECAY).cumsum(dim)


def causal_decay(log_decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log decays from the chunk's start `[..., C]`, decays between tokens `[..., C, C]`, 0 above the diagonal.

    Shapes: log_decay [..., C], that of each token.
    """
    total = sum_log_decays(log_decay, -1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril_()
    return total, decay_factor(between).tril_()


def expect_matrix_state(state: torch.Tensor, inner_shape: tuple[int, int, int]) -> None:
    """Check a state `[num_slots, *inner_shape]`: dtype, shape, contiguous inner dimensions.

    Raises: ValueError naming what was expected, what was given.
    """
    expect_dtype("state", state, MATRIX_STATE_DTYPES)
    fits = state.dim() == 4 and tuple(state.shape[1:]) == inner_shape
    expect(fits, "state.shape", ["num_slots", *inner_shape], list(state.shape))
    expect(state[:1].is_contiguous(), "state.stride()[1:]", "contiguous inner dimensions", state.stride()[1:])
