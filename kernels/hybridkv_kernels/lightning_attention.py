"""Lightning attention: linear attention whose state decays at a fixed rate per head.

Contract
    S_t = exp(-slope) S_{t-1} + k_t v_t^T
    o_t = S_t^T q_t

Shapes
    query, key  [T, H, Dk]               float32, bfloat16 or float16
    value       [T, H, Dv]               dtype of query; `out` likewise, [T, H, Dv]
    slope       [H]                      any float dtype, >= 0
    state       [num_slots, H, Dk, Dv]   float32 or bfloat16, inner dimensions contiguous, any first stride

Invariants
    I1  S1..S5 of `state_batch`
    I2  slope >= 0, inf included; in chunks, above 87 counts as 87, a factor of 1.6e-38

All arithmetic is float32. Grid: (cdiv(Dv, BLOCK_P), H, R). The kernel is that of `mamba2_scan`, of which this is
the case d = 1, A = -slope, D = 0.
"""

from __future__ import annotations

import torch

from hybridkv_kernels._checks import expect, expect_dtype, expect_one_device, expect_tensor
from hybridkv_kernels._chunked_rows import advance_rows, expect_matrix_state
from hybridkv_kernels._decay_scan_kernels import ScanTensors, prepare_decay_scan
from hybridkv_kernels._decay_scan_torch import DecayScan, TransposedDecayScan
from hybridkv_kernels._state_rows import live_rows
from hybridkv_kernels._triton import Launch
from hybridkv_kernels.state_batch import INPUT_DTYPES, StateBatch, check_state_batch

__all__ = [
    "check_lightning_attention",
    "lightning_attention",
    "lightning_attention_reference",
    "lightning_attention_torch",
    "prepare_lightning_attention",
]


def _check_shapes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slope: torch.Tensor,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    expect_tensor("query", query, None, (None, None, None))
    expect_dtype("query", query, INPUT_DTYPES)
    num_tokens, num_heads, key_dim = query.shape
    expect_tensor("key", key, query.dtype, query.shape)
    expect_tensor("value", value, query.dtype, (num_tokens, num_heads, None))
    expect_tensor("slope", slope, None, (num_heads,))
    expect_tensor("out", out, query.dtype, value.shape)
    expect_matrix_state(state, (num_heads, key_dim, value.shape[2]))
    named = (("query", query), ("key", key), ("value", value), ("slope", slope), ("state", state), ("out", out))
    expect_one_device((*named, ("write_slots", batch.write_slots)))


def check_lightning_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slope: torch.Tensor,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    """Check shapes plus the invariants I1, I2; syncs, for tests and debugging.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(query, key, value, slope, state=state, batch=batch, out=out)
    check_state_batch(batch, state.shape[0], query.shape[0])
    expect(bool((slope >= 0).all()), "slope", ">= 0 everywhere (exp(-slope) is a decay)", slope.tolist())


def lightning_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slope: torch.Tensor,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    """Loop over rows and their tokens in float64.

    Shapes, dtypes: as in the module's contract.
    """
    decay = torch.exp(-slope.double())[:, None, None]
    for row in live_rows(batch):
        s = row.start_state(state).double()  # [H, Dk, Dv]
        for t in range(row.begin, row.end):
            s = decay * s + key[t].double()[..., None] * value[t].double()[:, None, :]
            out[t] = (s * query[t].double()[..., None]).sum(1)
        state[row.write_slot] = s.to(state.dtype)


def lightning_attention_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slope: torch.Tensor,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    """Advance rows of one token in one batch, others by matrix products over chunks; syncs, for CPUs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype or device.
    """
    _check_shapes(query, key, value, slope, state=state, batch=batch, out=out)
    log_decay = (-slope.float()).expand(query.shape[:2])
    scan = DecayScan(query=query, key=key, value=value, log_decay=log_decay, weight=None, skip=None)
    advance_rows(batch, state, out, TransposedDecayScan(scan))


def prepare_lightning_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slope: torch.Tensor,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> Launch:
    """Check shapes, dtypes, strides without a sync, then return the launch that `lightning_attention` runs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(query, key, value, slope, state=state, batch=batch, out=out)
    tensors = ScanTensors(
        name="lightning_attention",
        query=query,
        key=key,
        value=value,
        state=state.mT,
        out=out,
        rate=slope,
    )
    return prepare_decay_scan(tensors, batch)


def lightning_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slope: torch.Tensor,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    """Advance the rows of one layer with one kernel launch; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device; ImportError without triton.
    """
    prepare_lightning_attention(query, key, value, slope, state=state, batch=batch, out=out).run()
