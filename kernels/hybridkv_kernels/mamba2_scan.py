"""Mamba-2 scan (SSD) over the rows of a batch, each from a state of its own.

Contract
    d_t = clamp(softplus(dt_t + dt_bias), *dt_limit)    without softplus, bias or clamp where not asked for
    h_t = exp(d_t A) h_{t-1} + d_t x_t B_t^T
    y_t = h_t C_t + D x_t
    Models differ in one point: transformers clamps d in its scans, not in its single steps. So a caller that wants
    that gives steps a `dt_limit` of None.

Shapes
    x      [T, H, P]                 float32, bfloat16 or float16; `out` likewise, [T, H, P]
    dt     [T, H]                    any float dtype; raw, as projected
    B, C   [T, G, N]                 dtype of x; H % G == 0, heads g * H/G .. (g + 1) * H/G - 1 share group g
    state  [num_slots, H, P, N]      float32 or bfloat16, inner dimensions contiguous, any first stride

Invariants
    I1  S1..S5 of `state_batch`
    I2  A <= 0 and d >= 0, so that no exponent is positive; in chunks, d A below -87 counts as -87, a factor of 1.6e-38

All arithmetic is float32. Grid: (cdiv(P, BLOCK_P), H, R); a program walks one row, by chunks or token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hybridkv_kernels._checks import expect, expect_dtype, expect_one_device, expect_tensor
from hybridkv_kernels._chunked_rows import advance_rows, expect_matrix_state
from hybridkv_kernels._decay_scan_kernels import ScanTensors, prepare_decay_scan
from hybridkv_kernels._decay_scan_torch import DecayScan
from hybridkv_kernels._state_rows import live_rows
from hybridkv_kernels._triton import Launch
from hybridkv_kernels.state_batch import INPUT_DTYPES, StateBatch, check_state_batch

__all__ = [
    "Mamba2Params",
    "check_mamba2_scan",
    "mamba2_scan",
    "mamba2_scan_reference",
    "mamba2_scan_torch",
    "prepare_mamba2_scan",
]


@dataclass(frozen=True)
class Mamba2Params:
    """Weights and switches of one layer.

    Shapes: A [H] (negative), D [H] or None, dt_bias [H] or None; any float dtype.
    `dt_limit` is applied after the softplus; None clamps nothing.
    """

    A: torch.Tensor
    D: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    dt_softplus: bool = True
    dt_limit: tuple[float, float] | None = None

    def step_sizes(self, dt: torch.Tensor) -> torch.Tensor:
        """Return d of the contract `[T, H]` float32."""
        steps = dt.float()
        if self.dt_bias is not None:
            steps = steps + self.dt_bias.float()
        if self.dt_softplus:
            steps = F.softplus(steps)
        return steps if self.dt_limit is None else steps.clamp(*self.dt_limit)


def _check_shapes(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    params: Mamba2Params,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    expect_tensor("x", x, None, (None, None, None))
    expect_dtype("x", x, INPUT_DTYPES)
    num_tokens, num_heads, head_dim = x.shape
    expect_tensor("dt", dt, None, (num_tokens, num_heads))
    expect_tensor("B", B, x.dtype, (num_tokens, None, None))
    expect_tensor("C", C, x.dtype, B.shape)
    num_groups = B.shape[1]
    expect(num_groups > 0 and num_heads % num_groups == 0, "heads", "a multiple of groups", (num_heads, num_groups))
    expect_tensor("out", out, x.dtype, x.shape)
    expect_matrix_state(state, (num_heads, head_dim, B.shape[2]))
    named = [("x", x), ("dt", dt), ("B", B), ("C", C), ("state", state), ("out", out)]
    named.append(("write_slots", batch.write_slots))
    for name, weight in (("A", params.A), ("D", params.D), ("dt_bias", params.dt_bias)):
        if weight is not None:
            expect_tensor(name, weight, None, (num_heads,))
            named.append((name, weight))
    expect_one_device(named)


def check_mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    params: Mamba2Params,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    """Check shapes plus the invariants I1, I2; syncs, for tests and debugging.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(x, dt, B, C, params, state=state, batch=batch, out=out)
    check_state_batch(batch, state.shape[0], x.shape[0])
    expect(bool((params.A <= 0).all()), "A", "<= 0 everywhere (exp(d A) is a decay)", params.A.tolist())
    steps = params.step_sizes(dt)
    for row in live_rows(batch):
        lowest = steps[row.begin : row.end].min().item() if row.end > row.begin else 0.0
        expect(lowest >= 0, f"dt[{row.begin}:{row.end}]", "steps >= 0; use dt_softplus or a dt_limit", lowest)


def mamba2_scan_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    params: Mamba2Params,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    """Loop over rows and their tokens in float64.

    Shapes, dtypes: as in the module's contract.
    """
    heads_per_group = x.shape[1] // B.shape[1]
    steps = params.step_sizes(dt).double()
    for row in live_rows(batch):
        h = row.start_state(state).double()  # [H, P, N]
        for t in range(row.begin, row.end):
            x_t, d_t = x[t].double(), steps[t][:, None]
            b_t = B[t].double().repeat_interleave(heads_per_group, 0)  # [H, N]
            c_t = C[t].double().repeat_interleave(heads_per_group, 0)
            h = torch.exp(d_t * params.A.double()[:, None])[..., None] * h + (d_t * x_t)[..., None] * b_t[:, None, :]
            y = (h * c_t[:, None, :]).sum(-1)
            out[t] = y if params.D is None else y + params.D.double()[:, None] * x_t
        state[row.write_slot] = h.to(state.dtype)


def mamba2_scan_torch(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    params: Mamba2Params,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    """Advance rows of one token in one batch, others by matrix products over chunks; syncs, for CPUs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype or device.
    """
    _check_shapes(x, dt, B, C, params, state=state, batch=batch, out=out)
    steps = params.step_sizes(dt)
    skip = None if params.D is None else params.D.float()
    scan = DecayScan(query=C, key=B, value=x, log_decay=steps * params.A.float(), weight=steps, skip=skip)
    advance_rows(batch, state, out, scan)


def prepare_mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    params: Mamba2Params,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> Launch:
    """Check shapes, dtypes, strides without a sync, then return the launch that `mamba2_scan` runs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(x, dt, B, C, params, state=state, batch=batch, out=out)
    tensors = ScanTensors(
        name="mamba2_scan",
        query=C,
        key=B,
        value=x,
        state=state,
        out=out,
        rate=params.A,
        dt=dt,
        dt_bias=params.dt_bias,
        skip=params.D,
    )
    return prepare_decay_scan(tensors, batch, dt_softplus=params.dt_softplus, dt_limit=params.dt_limit)


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    params: Mamba2Params,
    *,
    state: torch.Tensor,
    batch: StateBatch,
    out: torch.Tensor,
) -> None:
    """Advance the rows of one layer with one kernel launch; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device; ImportError without triton.
    """
    prepare_mamba2_scan(x, dt, B, C, params, state=state, batch=batch, out=out).run()
