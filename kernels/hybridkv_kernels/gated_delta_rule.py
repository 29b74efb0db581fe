"""Gated delta rule over the rows of a batch, each from a state of its own (gated delta net, KDA).

Contract
    S_t = S_{t-1} exp(g_t)                                  g per head, or per key channel (KDA)
    S_t = S_t + beta_t (v_t - S_t k_t) k_t^T
    o_t = scale S_t q_t
    With `l2_normalize`, q and k are first divided by sqrt(their squared length + 1e-6). Value heads h * Hv/Hk ..
    (h + 1) * Hv/Hk - 1 share key head h.

Shapes
    query, key  [T, Hk, Dk]                 float32, bfloat16 or float16; Hv % Hk == 0
    value       [T, Hv, Dv]                 dtype of query; `out` likewise, [T, Hv, Dv]
    log_decay   [T, Hv] or [T, Hv, Dk]      any float dtype: g
    beta        [T, Hv]                     any float dtype
    state       [num_slots, Hv, Dv, Dk]     float32 or bfloat16, inner dimensions contiguous, any first stride;
                                            transformers keeps its transpose [.., Dk, Dv]

Invariants
    I1  S1..S5 of `state_batch`
    I2  g <= 0, -inf included; in chunks, below -87 counts as -87, a factor of 1.6e-38
    I3  0 <= beta <= 2: with unit keys, a step beyond 2 leaves a larger error than it found

All arithmetic is float32. Grid: (cdiv(Dv, BLOCK_V), Hv, R); a program walks one row, by chunks or token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridkv_kernels._checks import expect, expect_dtype, expect_one_device, expect_tensor
from hybridkv_kernels._chunked_rows import advance_rows, expect_matrix_state
from hybridkv_kernels._delta_rule_kernels import DeltaRuleTensors, prepare_delta_rule
from hybridkv_kernels._delta_rule_torch import L2_EPSILON, DeltaRule
from hybridkv_kernels._state_rows import live_rows
from hybridkv_kernels._triton import Launch
from hybridkv_kernels.state_batch import INPUT_DTYPES, StateBatch, check_state_batch

__all__ = [
    "DeltaRuleParams",
    "check_gated_delta_rule",
    "gated_delta_rule",
    "gated_delta_rule_reference",
    "gated_delta_rule_torch",
    "prepare_gated_delta_rule",
]

_MAX_BETA = 2.0


@dataclass(frozen=True)
class DeltaRuleParams:
    """Switches of one layer; models use a scale of Dk**-0.5."""

    scale: float
    l2_normalize: bool = False


def _check_shapes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    expect_tensor("query", query, None, (None, None, None))
    expect_dtype("query", query, INPUT_DTYPES)
    num_tokens, num_key_heads, key_dim = query.shape
    expect_tensor("key", key, query.dtype, query.shape)
    expect_tensor("value", value, query.dtype, (num_tokens, None, None))
    num_heads, value_dim = value.shape[1:]
    fits = num_key_heads > 0 and num_heads % num_key_heads == 0
    expect(fits, "value heads", "a multiple of key heads", (num_heads, num_key_heads))
    per_head = (num_tokens, num_heads)
    expect_tensor("log_decay", log_decay, None, per_head if log_decay.dim() == 2 else (*per_head, key_dim))
    expect_tensor("beta", beta, None, per_head)
    expect_tensor("out", out, query.dtype, value.shape)
    expect_matrix_state(state, (num_heads, value_dim, key_dim))
    inputs = (("query", query), ("key", key), ("value", value), ("log_decay", log_decay), ("beta", beta))
    expect_one_device((*inputs, ("state", state), ("out", out), ("write_slots", batch.write_slots)))


def check_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    params: DeltaRuleParams,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    """Check shapes plus the invariants I1 to I3; syncs, for tests and debugging.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(query, key, value, log_decay, beta, state=state, batch=batch, out=out)
    check_state_batch(batch, state.shape[0], query.shape[0])
    expect(params.scale > 0, "scale", "> 0", params.scale)
    for row in live_rows(batch):
        tokens = slice(row.begin, row.end)
        expect(bool((log_decay[tokens] <= 0).all()), f"log_decay[{row.begin}:{row.end}]", "<= 0", "a larger one")
        inside = (beta[tokens] >= 0) & (beta[tokens] <= _MAX_BETA)
        expect(bool(inside.all()), f"beta[{row.begin}:{row.end}]", f"0..{_MAX_BETA}", "one outside")


def gated_delta_rule_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    params: DeltaRuleParams,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    """Loop over rows and their tokens in float64.

    Shapes, dtypes: as in the module's contract.
    """
    repeats = value.shape[1] // key.shape[1]
    for row in live_rows(batch):
        s = row.start_state(state).double()  # [Hv, Dv, Dk]
        for t in range(row.begin, row.end):
            q, k = query[t].double(), key[t].double()
            if params.l2_normalize:
                q = q / (q.square().sum(-1, keepdim=True) + L2_EPSILON).sqrt()
                k = k / (k.square().sum(-1, keepdim=True) + L2_EPSILON).sqrt()
            q, k = q.repeat_interleave(repeats, 0)[:, None, :], k.repeat_interleave(repeats, 0)[:, None, :]
            decay = log_decay[t].double().exp()
            s = s * (decay[:, None, None] if decay.dim() == 1 else decay[:, None, :])
            error = value[t].double() - (s * k).sum(-1)  # [Hv, Dv]
            s = s + (beta[t].double()[:, None] * error)[..., None] * k
            out[t] = params.scale * (s * q).sum(-1)
        state[row.write_slot] = s.to(state.dtype)


def gated_delta_rule_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    params: DeltaRuleParams,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    """Advance rows of one token in one batch, others by matrix products over chunks; syncs, for CPUs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype or device.
    """
    _check_shapes(query, key, value, log_decay, beta, state=state, batch=batch, out=out)
    rule = DeltaRule(query, key, value, log_decay, beta, scale=params.scale, normalize=params.l2_normalize)
    advance_rows(batch, state, out, rule)


def prepare_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    params: DeltaRuleParams,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> Launch:
    """Check shapes, dtypes, strides without a sync, then return the launch that `gated_delta_rule` runs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(query, key, value, log_decay, beta, state=state, batch=batch, out=out)
    tensors = DeltaRuleTensors(query, key, value, log_decay, beta, state=state, out=out)
    return prepare_delta_rule(tensors, batch, scale=params.scale, l2_normalize=params.l2_normalize)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    params: DeltaRuleParams,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    """Advance the rows of one layer with one kernel launch; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device; ImportError without triton.
    """
    prepare_gated_delta_rule(query, key, value, log_decay, beta, params, state=state, batch=batch, out=out).run()
