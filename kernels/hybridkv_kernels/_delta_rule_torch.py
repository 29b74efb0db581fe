"""Torch path of the gated delta rule, with a decay per head or per key channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import unflatten

from hybridkv_kernels._chunked_rows import causal_decay, decay_factor, sum_log_decays, take_tokens

__all__ = ["L2_EPSILON", "DeltaRule", "l2_normalize"]

L2_EPSILON = 1e-6


def l2_normalize(vectors: torch.Tensor) -> torch.Tensor:
    """Divide each vector of the last dimension by sqrt(its squared length + 1e-6); returns the same shape."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + L2_EPSILON)


@dataclass(frozen=True)
class _Chunk:
    """What one chunk's tokens do to each other and to the state.

    Shapes: key_scores, query_scores [S, H, C, C], decays between both tokens included, 0 above the diagonal;
    key_in, query_in, key_out [S, H, C, Dk], decayed from the chunk's start or to its end; decay broadcasts over the
    states [S, H, Dv, Dk].
    """

    key_scores: torch.Tensor
    query_scores: torch.Tensor
    key_in: torch.Tensor
    query_in: torch.Tensor
    key_out: torch.Tensor
    decay: torch.Tensor


def _head_decay_chunk(query: torch.Tensor, key: torch.Tensor, log_decay: torch.Tensor) -> _Chunk:
    """Prepare a chunk whose decay is per head.

    Shapes: query, key [S, Hk, C, Dk]; log_decay [S, Hv, C].
    """
    groups = (query.shape[1], -1)
    total, between = causal_decay(log_decay)
    by_group = unflatten(between, 1, groups)
    scores = (by_group * (matrix @ key.mT).unsqueeze(2) for matrix in (key, query))
    key_scores, query_scores = (part.flatten(1, 2) for part in scores)
    from_start = unflatten(decay_factor(total), 1, groups).unsqueeze(-1)
    to_end = unflatten(decay_factor(total[..., -1:] - total), 1, groups).unsqueeze(-1)
    return _Chunk(
        key_scores=key_scores,
        query_scores=query_scores,
        key_in=(key.unsqueeze(2) * from_start).flatten(1, 2),
        query_in=(query.unsqueeze(2) * from_start).flatten(1, 2),
        key_out=(key.unsqueeze(2) * to_end).flatten(1, 2),
        decay=decay_factor(total[..., -1])[..., None, None],
    )


def _channel_decay_chunk(query: torch.Tensor, key: torch.Tensor, log_decay: torch.Tensor) -> _Chunk:
    """Prepare a chunk whose decay is per key channel.

    A pair's decay differs in each channel, so it cannot be taken out of the product of q and k. It is split at a
    token between both instead: the pairs of neighbouring halves of 2, 4, ... tokens at the first half's last token.
    Both factors are then at most 1, however strong the decay.

    Shapes: query, key, log_decay [S, H, C, Dk]; C is a power of two.
    """
    num_tokens = query.shape[2]
    total = sum_log_decays(log_decay, 2)
    key_scores = query.new_zeros(*query.shape[:2], num_tokens, num_tokens)
    query_scores = torch.diag_embed((query * key).sum(-1))
    half = 1
    while half < num_tokens:
        pairs = (num_tokens // (2 * half), 2, half)
        totals = unflatten(total, 2, pairs)
        split = totals[:, :, :, 0, -1:]
        left = unflatten(key, 2, pairs)[:, :, :, 0] * decay_factor(split - totals[:, :, :, 0])
        right = decay_factor(totals[:, :, :, 1] - split)
        for scores, matrix in ((key_scores, key), (query_scores, query)):
            blocks = unflatten(unflatten(scores, 3, pairs), 2, pairs).diagonal(dim1=2, dim2=5)
            product = (unflatten(matrix, 2, pairs)[:, :, :, 1] * right) @ left.mT  # [S, H, C/2h, h, h]
            blocks[:, :, 1, :, 0].copy_(product.permute(0, 1, 3, 4, 2))
        half *= 2
    from_start = decay_factor(total)
    return _Chunk(
        key_scores=key_scores,
        query_scores=query_scores,
        key_in=key * from_start,
        query_in=query * from_start,
        key_out=key * decay_factor(total[:, :, -1:] - total),
        decay=decay_factor(total[:, :, -1]).unsqueeze(2),
    )


@dataclass(frozen=True)
class DeltaRule:
    """S = exp(g) S; S += beta (v - S k) k^T; o = scale S q; a `RowMath` over states [S, Hv, Dv, Dk].

    Shapes:
        query, key  [T, Hk, Dk]  any float dtype
        value       [T, Hv, Dv]  any float dtype
        log_decay   [T, Hv] or [T, Hv, Dk], any float dtype, <= 0
        beta        [T, Hv]      any float dtype
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    scale: float
    normalize: bool

    def _prepare(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.normalize:
            query, key = l2_normalize(query), l2_normalize(key)
        return query * self.scale, key

    def step(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Advance each row by one token; see `RowMath`."""
        value, beta = self.value[tokens].float(), self.beta[tokens].float().unsqueeze(-1)
        repeats = value.shape[1] // self.key.shape[1]
        query, key = self._prepare(self.query[tokens].float(), self.key[tokens].float())
        query, key = query.repeat_interleave(repeats, 1), key.repeat_interleave(repeats, 1)  # [S, Hv, Dk]
        decay = decay_factor(self.log_decay[tokens])
        decay = decay.unsqueeze(-1) if decay.dim() == 2 else decay  # [S, Hv, 1 or Dk]
        # One pass over the states answers both: what the decayed state holds under the key, under the query.
        held = states @ (torch.stack([key, query], -1) * decay.unsqueeze(-1))  # [S, Hv, Dv, 2]
        change = beta * (value - held[..., 0])
        states.mul_(decay.unsqueeze(2)).addcmul_(change.unsqueeze(-1), key.unsqueeze(2))
        return torch.addcmul(held[..., 1], change, (key * query).sum(-1, keepdim=True)), states

    def chunk(
        self, tokens: torch.Tensor, is_token: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advance each row by one chunk; see `RowMath`."""
        tensors = (self.query, self.key, self.value, self.log_decay, self.beta)
        query, key, value, log_decay, beta = (take_tokens(part, tokens, is_token).transpose(1, 2) for part in tensors)
        query, key = self._prepare(query, key)
        beta = beta.unsqueeze(-1)  # [S, Hv, C, 1]
        if log_decay.dim() == 3:
            part = _head_decay_chunk(query, key, log_decay)
        else:
            repeats = value.shape[1] // key.shape[1]
            query, key = query.repeat_interleave(repeats, 1), key.repeat_interleave(repeats, 1)
            part = _channel_decay_chunk(query, key, log_decay)
        # Each token's change depends on those before it in the chunk: a triangular system, whose diagonal is 1.
        wanted = beta * (value - part.key_in @ states.mT)
        change = torch.linalg.solve_triangular(part.key_scores * beta, wanted, upper=False, unitriangular=True)
        out = part.query_in @ states.mT + part.query_scores @ change  # [S, Hv, C, Dv]
        return out.transpose(1, 2), (states * part.decay).add_(change.mT @ part.key_out)
