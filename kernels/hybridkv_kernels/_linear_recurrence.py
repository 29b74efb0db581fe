"""The recurrence h[t] = decay[t] * h[t-1] + gain[t], element by element."""

from __future__ import annotations

import torch

from hybridkv_kernels._triton import jit, tl

__all__ = ["combine_steps", "run_recurrence"]


def run_recurrence(decay: torch.Tensor, gain: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Turn `gain` `[L, ...]` into the states after each token, in place, then return the last one (or `start`).

    One fused operation a token, each over all elements of the state: forms without the loop either divide by products
    of decays, which underflow, or do several times the work.

    Shapes: decay, gain [L, ...] float32; start [...] float32.
    """
    state = start
    for decay_t, gain_t in zip(decay.unbind(0), gain.unbind(0), strict=True):
        state = torch.addcmul(gain_t, decay_t, state, out=gain_t)
    return state


@jit
def combine_steps(
    decay: tl.tensor, gain: tl.tensor, next_decay: tl.tensor, next_gain: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Compose two steps of the recurrence; decays in [0, 1] only shrink, so nothing overflows."""
    return decay * next_decay, gain * next_decay + next_gain
