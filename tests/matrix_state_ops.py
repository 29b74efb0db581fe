"""The ops with a matrix state as a table for tests, at small sizes with every feature on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from hybridkv_kernels.gated_delta_rule import (
    DeltaRuleParams,
    gated_delta_rule,
    gated_delta_rule_reference,
    gated_delta_rule_torch,
)
from hybridkv_kernels.lightning_attention import (
    lightning_attention,
    lightning_attention_reference,
    lightning_attention_torch,
)
from hybridkv_kernels.mamba2_scan import Mamba2Params, mamba2_scan, mamba2_scan_reference, mamba2_scan_torch
from hybridkv_kernels.state_batch import StateBatch
from tests.state_rows import (
    Row,
    StateOp,
    Tokens,
    make_batch,
    make_state,
    num_tokens,
    poison_idle_tokens,
    whole_arena,
)

# An upper bound of the tokens of a row that makes launchers choose their kernel for long rows.
LONG = 64


def randn(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def sliced(count: int, *shape: int, seed: int, device: torch.device) -> torch.Tensor:
    """Make `[count, *shape]` as a slice of a wider projection, as in a model."""
    wide = randn(count, *shape[:-1], shape[-1] + 3, seed=seed, device=device)
    return wide[..., 2 : shape[-1] + 2]


def long_rows(function: Callable[..., None], *args: object, batch: StateBatch, **kwargs: object) -> None:
    """Call a launcher as for long rows, whatever the batch holds."""
    function(*args, batch=replace(batch, max_query_len=LONG), **kwargs)


@dataclass(frozen=True)
class Mamba2Case:
    """Every seventh step has a size of `long_step`, if there is one; its input is as much smaller."""

    num_heads: int = 4
    num_groups: int = 2
    head_dim: int = 5
    state_size: int = 6
    has_weights: bool = True
    dt_limit: tuple[float, float] | None = (0.05, 1.5)
    long_step: float | None = None
    dtype: torch.dtype = torch.float32

    def params(self, device: torch.device) -> Mamba2Params:
        A, D, bias = (randn(self.num_heads, seed=seed, device=device) for seed in (1, 2, 3))
        if not self.has_weights:
            return Mamba2Params(-A.abs(), dt_softplus=False, dt_limit=self.dt_limit)
        return Mamba2Params(-2 * A.abs(), D, bias - 1, dt_softplus=True, dt_limit=self.dt_limit)

    def make_tokens(self, count: int, device: torch.device) -> Tokens:
        shapes = {"x": (self.num_heads, self.head_dim), "dt": (self.num_heads,)}
        shapes |= dict.fromkeys(("B", "C"), (self.num_groups, self.state_size))
        tokens = {
            name: sliced(count, *shape, seed=4 + i, device=device).to(self.dtype)
            for i, (name, shape) in enumerate(shapes.items())
        }
        if self.long_step is not None:
            tokens["dt"][::7] = self.long_step
            tokens["x"][::7] /= self.long_step
        return tokens if self.has_weights else tokens | {"dt": tokens["dt"].abs()}

    def op(self, name: str, *, is_long: bool = False) -> StateOp:
        def call(function, tokens, state, batch, out):
            function(**tokens, params=self.params(out.device), state=state, batch=batch, out=out)

        launcher = partial(long_rows, mamba2_scan) if is_long else mamba2_scan
        paths = [partial(call, f) for f in (mamba2_scan_reference, mamba2_scan_torch, launcher)]
        return StateOp(name, (self.num_heads, self.head_dim, self.state_size), "x", self.make_tokens, *paths)


@dataclass(frozen=True)
class LightningCase:
    num_heads: int = 3
    key_dim: int = 6
    value_dim: int = 5
    dtype: torch.dtype = torch.float32

    def make_tokens(self, count: int, device: torch.device) -> Tokens:
        dims = {"query": self.key_dim, "key": self.key_dim, "value": self.value_dim}
        return {
            name: sliced(count, self.num_heads, dim, seed=9 + i, device=device).to(self.dtype)
            for i, (name, dim) in enumerate(dims.items())
        }

    def slope(self, device: torch.device) -> torch.Tensor:
        return randn(self.num_heads, seed=12, device=device).abs()

    def op(self, name: str, *, is_long: bool = False) -> StateOp:
        def call(function, tokens, state, batch, out):
            function(**tokens, slope=self.slope(out.device), state=state, batch=batch, out=out)

        launcher = partial(long_rows, lightning_attention) if is_long else lightning_attention
        paths = [partial(call, f) for f in (lightning_attention_reference, lightning_attention_torch, launcher)]
        return StateOp(name, (self.num_heads, self.key_dim, self.value_dim), "value", self.make_tokens, *paths)


@dataclass(frozen=True)
class DeltaCase:
    """`decay` scales the log decays, `max_beta` the corrections; with `same_keys` all tokens have one key.

    Every seventh log decay is `seventh_log_decay`, if there is one.
    """

    num_key_heads: int = 2
    num_heads: int = 4
    key_dim: int = 6
    value_dim: int = 5
    per_channel: bool = False
    normalize: bool = True
    decay: float = 0.5
    seventh_log_decay: float | None = None
    max_beta: float = 2.0
    same_keys: bool = False
    dtype: torch.dtype = torch.float32

    def make_tokens(self, count: int, device: torch.device) -> Tokens:
        make = partial(sliced, count, device=device)
        query = make(self.num_key_heads, self.key_dim, seed=13)
        key = make(self.num_key_heads, self.key_dim, seed=14)
        if self.same_keys:
            key = key[:1].repeat(count, 1, 1)
        if not self.normalize:
            query, key = query / self.key_dim**0.5, key / self.key_dim**0.5 / 2
        decay_shape = (self.num_heads, self.key_dim) if self.per_channel else (self.num_heads,)
        log_decay = -self.decay * make(*decay_shape, seed=16).abs()
        if self.seventh_log_decay is not None:
            log_decay[::7] = self.seventh_log_decay
        return {
            "query": query.to(self.dtype),
            "key": key.to(self.dtype),
            "value": make(self.num_heads, self.value_dim, seed=15).to(self.dtype),
            "log_decay": log_decay,
            "beta": self.max_beta * make(self.num_heads, seed=17).sigmoid(),
        }

    def op(self, name: str, *, is_long: bool = False) -> StateOp:
        def call(function, tokens, state, batch, out):
            params = DeltaRuleParams(scale=self.key_dim**-0.5, l2_normalize=self.normalize)
            function(**tokens, params=params, state=state, batch=batch, out=out)

        launcher = partial(long_rows, gated_delta_rule) if is_long else gated_delta_rule
        paths = [partial(call, f) for f in (gated_delta_rule_reference, gated_delta_rule_torch, launcher)]
        return StateOp(name, (self.num_heads, self.value_dim, self.key_dim), "value", self.make_tokens, *paths)


MATRIX_STATE_OPS = (
    Mamba2Case().op("mamba2_scan"),
    Mamba2Case().op("mamba2_scan in chunks", is_long=True),
    LightningCase().op("lightning_attention"),
    LightningCase().op("lightning_attention in chunks", is_long=True),
    DeltaCase().op("gated_delta_rule"),
    DeltaCase().op("gated_delta_rule in chunks", is_long=True),
    DeltaCase(per_channel=True).op("gated_delta_rule per channel"),
)

# Empty, single tokens, one less than a chunk, one, one more, several, a skipped row, forks, zero starts.
CHUNK_ROWS = (
    Row(63, 1, 2),
    Row(1, 1, 3),
    Row(65, None, 4),
    Row(2, 5, -1),
    Row(0, 5, 6),
    Row(64, 7, 7),
    Row(130, 1, 8),
    Row(2, None, 9),
)


def compare(
    op: StateOp,
    path: str,
    rows: Sequence[Row],
    device: torch.device,
    *,
    state_dtype: torch.dtype = torch.float32,
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> None:
    """Run a path beside the reference with NaN in everything idle, then compare outputs with all of the arena."""
    tokens = op.make_tokens(num_tokens(rows) + 2, device)
    poison_idle_tokens(tokens, rows)
    states = [make_state(op.state_shape, rows, device, state_dtype) for _ in range(2)]
    outs = [
        op.run(name, tokens, state, make_batch(rows, device))
        for name, state in zip(("reference", path), states, strict=True)
    ]
    assert outs[0].isfinite().all()
    torch.testing.assert_close(outs[1], outs[0], rtol=rtol, atol=atol)
    state_rtol = rtol if state_dtype == torch.float32 else 2**-7
    arenas = [whole_arena(state) for state in states]
    torch.testing.assert_close(arenas[1], arenas[0], rtol=state_rtol, atol=atol, equal_nan=True)
