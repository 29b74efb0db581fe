"""Torch path of linear attention whose state decays by one number a head and token (Mamba-2, lightning attention)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import unflatten

from hybridkv_kernels._chunked_rows import causal_decay, decay_factor, take_tokens

__all__ = ["DecayScan", "TransposedDecayScan"]


@dataclass(frozen=True)
class DecayScan:
    """S = exp(log_decay) S + weight v k^T; y = S q + skip v; a `RowMath` over states [S, H, P, N].

    Shapes:
        query, key  [T, G, N]  any float dtype; a group serves H / G heads that follow one another
        value       [T, H, P]  any float dtype
        log_decay   [T, H]     float32, <= 0
        weight      [T, H]     float32, or None for 1
        skip        [H]        float32, or None for 0
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    weight: torch.Tensor | None
    skip: torch.Tensor | None

    def step(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Advance each row by one token; see `RowMath`."""
        groups = (self.key.shape[1], -1)
        value = self.value[tokens].float()
        update = value if self.weight is None else value * self.weight[tokens].unsqueeze(-1)
        states.mul_(decay_factor(self.log_decay[tokens])[..., None, None])
        key = self.key[tokens].float()[:, :, None, None, :]
        grouped = unflatten(states, 1, groups)  # [S, G, H/G, P, N]
        by_group = grouped.addcmul_(unflatten(update, 1, groups).unsqueeze(-1), key).flatten(2, 3)
        out = (by_group @ self.query[tokens].float().unsqueeze(-1)).view(value.shape)
        return (out if self.skip is None else out.addcmul_(value, self.skip[:, None])), states

    def chunk(
        self, tokens: torch.Tensor, is_token: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advance each row by one chunk; see `RowMath`."""
        groups = (self.key.shape[1], -1)
        query = take_tokens(self.query, tokens, is_token).transpose(1, 2)  # [S, G, C, N]
        key = take_tokens(self.key, tokens, is_token).transpose(1, 2)
        value = take_tokens(self.value, tokens, is_token)  # [S, C, H, P]
        update = value
        if self.weight is not None:
            update = value * take_tokens(self.weight, tokens, is_token).unsqueeze(-1)
        total, weights = causal_decay(take_tokens(self.log_decay, tokens, is_token).transpose(1, 2))
        # Scores are per group, decays per head: the product of q and k is made once a group.
        unflatten(weights, 1, groups).mul_((query @ key.mT).unsqueeze(2))
        inside = weights @ update.transpose(1, 2)  # [S, H, C, P]
        by_group = unflatten(states, 1, groups).flatten(2, 3)  # [S, G, H/G*P, N]
        out = (query @ by_group.mT).transpose(1, 2).reshape(value.shape)
        out.mul_(decay_factor(total).transpose(1, 2).unsqueeze(-1)).add_(inside.transpose(1, 2))
        if self.skip is not None:
            out.addcmul_(value, self.skip[:, None])
        to_end = decay_factor(total[..., -1:] - total).transpose(1, 2)
        update = update * to_end.unsqueeze(-1)
        gained = unflatten(update, 2, groups).flatten(3, 4).permute(0, 2, 3, 1) @ key  # [S, G, H/G*P, N]
        kept = states * decay_factor(total[..., -1])[..., None, None]
        return out, kept.add_(gained.view(states.shape))


@dataclass(frozen=True)
class TransposedDecayScan:
    """The same over states stored as [S, H, N, P]: they are gathered as they lie, which a transposed gather is not."""

    scan: DecayScan

    def step(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Advance each row by one token; see `RowMath`."""
        out, states = self.scan.step(tokens, states.mT)
        return out, states.mT

    def chunk(
        self, tokens: torch.Tensor, is_token: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advance each row by one chunk; see `RowMath`."""
        out, states = self.scan.chunk(tokens, is_token, states.mT)
        return out, states.mT
