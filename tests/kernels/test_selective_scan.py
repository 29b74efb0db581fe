"""Claims about the selective scan of Mamba-1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from hybridkv_kernels import selective_scan as module
from hybridkv_kernels.selective_scan import (
    ScanInputs,
    SelectiveScanParams,
    check_selective_scan,
    selective_scan,
    selective_scan_reference,
    selective_scan_torch,
)
from tests.state_rows import Row, make_batch, make_state, num_tokens

ROWS = (Row(2, 1, 1), Row(17, 2, 3), Row(1, 4, 4), Row(16, None, 6), Row(1, None, 8))

IN_RANGE = (Row(2, 1, 2),)

Function = Callable[..., None]


@dataclass(frozen=True)
class Case:
    """Sizes, dtypes, options of one call."""

    sizes: tuple[int, int, int] = (1, 2, 2)
    options: str = "DzbS"
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32

    def inputs(self, count: int, device: torch.device) -> ScanInputs:
        """Make inputs; without the softplus the steps are positive."""
        heads, head_dim, state_size = self.sizes
        generator = torch.Generator().manual_seed(head_dim)

        def randn(size: int) -> torch.Tensor:
            return torch.randn(count, heads, size, generator=generator).to(device, self.dtype)

        dt = randn(head_dim) if "S" in self.options else randn(head_dim).abs()
        gate = randn(head_dim) if "z" in self.options else None
        return ScanInputs(randn(head_dim), dt, randn(state_size), randn(state_size), gate)

    def params(self, device: torch.device) -> SelectiveScanParams:
        generator = torch.Generator().manual_seed(self.sizes[1])
        weight, skip, bias = (
            torch.rand(*s, generator=generator).to(device) for s in (self.sizes, *[self.sizes[:2]] * 2)
        )
        return SelectiveScanParams(
            A=-4 * weight,
            D=skip if "D" in self.options else None,
            dt_bias=bias if "b" in self.options else None,
            dt_softplus="S" in self.options,
        )

    def run(
        self, function: Function, rows: tuple[Row, ...], device: torch.device, inputs: ScanInputs | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run over `rows` from random states; return the outputs with the states."""
        inputs = inputs or self.inputs(num_tokens(rows), device)
        state, out = make_state(self.sizes, rows, device, self.state_dtype), torch.full_like(inputs.x, torch.nan)
        function(inputs, self.params(device), state=state, batch=make_batch(rows, device), out=out)
        return out, state


CASES = [
    Case(),
    Case(options=""),
    Case(options="S"),
    Case(options="zb"),
    Case(options="D"),
    Case(sizes=(3, 3, 1)),
    Case(sizes=(2, 1, 3)),
    Case(dtype=torch.bfloat16, state_dtype=torch.bfloat16),
    Case(dtype=torch.float16),
]
# float32 sums of up to 17 terms of size 1; then one rounding to 11 or 8 bits, which the interpreter truncates.
RELATIVE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_equal(
    case: Case, got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Compare outputs with states."""
    torch.testing.assert_close(got[0], expected[0], rtol=RELATIVE[case.dtype], atol=2e-5)
    torch.testing.assert_close(got[1], expected[1], rtol=RELATIVE[case.state_dtype], atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("function", [selective_scan_torch, selective_scan])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_paths_equal_reference(function: Function, case: Case, device: torch.device) -> None:
    """Every option, head count, odd size, dtype gives the reference's results; rows pass a tile by one token."""
    assert_equal(case, case.run(function, ROWS, device), case.run(selective_scan_reference, ROWS, device))


@pytest.mark.parametrize("function", [selective_scan_torch, selective_scan])
def test_channels_are_cut_into_tiles(function: Function, device: torch.device) -> None:
    """A decode step whose channels pass a tile by one equals the reference."""
    case, rows = Case(sizes=(1, 129, 16)), (Row(1, 1, 1), Row(1, 2, 3))
    assert_equal(case, case.run(function, rows, device), case.run(selective_scan_reference, rows, device))


def test_reference_is_a_decayed_sum(device: torch.device) -> None:
    """The reference's state equals the sum of all inputs, each times one exponential of the steps after it."""
    case, rows = Case(sizes=(2, 3, 2)), (Row(7, None, 2),)
    inputs, params = case.inputs(7, device), case.params(device)
    assert params.dt_bias is not None
    steps = F.softplus(inputs.dt.double() + params.dt_bias.double())
    expected = torch.zeros(case.sizes, dtype=torch.float64, device=device)
    for t in range(7):
        decay = torch.exp(steps[t + 1 :].sum(0)[..., None] * params.A.double())
        expected += decay * torch.einsum("hp,hn->hpn", steps[t] * inputs.x[t], inputs.B[t].double())
    out, state = case.run(selective_scan_reference, rows, device)
    torch.testing.assert_close(state[2].double(), expected, rtol=1e-6, atol=1e-6)
    assert params.D is not None
    assert inputs.z is not None
    y = torch.einsum("hpn,hn->hp", expected, inputs.C[-1].double()) + params.D * inputs.x[-1]
    torch.testing.assert_close(out[-1].double(), y * F.silu(inputs.z[-1]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", [selective_scan_torch, selective_scan])
@pytest.mark.parametrize("dt", [-40.0, -15.0, -7.0, 0.0, 30.0, 1e4])
def test_steps_may_be_tiny_or_huge(function: Function, dt: float, device: torch.device) -> None:
    """Steps from 1e-18 to 1e4 keep their relative precision; decays that underflow do not become NaN."""
    case, rows = Case(options="S"), (Row(5, None, 2), Row(1, None, 3))
    inputs = case.inputs(num_tokens(rows), device)
    inputs.dt.fill_(dt)
    expected, expected_state = case.run(selective_scan_reference, rows, device, inputs)
    out, state = case.run(function, rows, device, inputs)
    smallest = float(expected_state[2:4].abs().min())
    assert smallest > 0
    torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-5 * smallest, equal_nan=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().min()))


def test_torch_path_joins_its_blocks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two tokens, of two rows give the outputs, the states of one block."""
    case, rows = Case(), (*ROWS, Row(1, 9, 9), Row(1, 10, 11))
    expected = case.run(selective_scan_torch, rows, device)
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 8)
    assert_equal(case, case.run(selective_scan_torch, rows, device), expected)


def test_check_names_what_is_wrong() -> None:
    """Each broken argument is refused by its name; growing states, negative steps by the check."""
    case, device = Case(sizes=(2, 3, 4)), torch.device("cpu")
    good, weights = case.inputs(2, device), case.params(device)
    state = torch.zeros(3, 2, 3, 4)

    def check(inputs=good, params=weights, state=state, rows=IN_RANGE, out=good.x):
        check_selective_scan(inputs, params, state=state, batch=make_batch(rows, device), out=out)

    check()
    strided = torch.ones(2, 2, 6)[..., ::2]
    wrong = [
        ("x.dtype", {"inputs": replace(good, x=good.x.double())}),
        ("dt.shape", {"inputs": replace(good, dt=good.dt[:1])}),
        ("dt.stride", {"inputs": replace(good, dt=strided)}),
        ("z.shape", {"inputs": replace(good, z=good.B)}),
        ("B.shape", {"inputs": replace(good, B=good.B[:, :1])}),
        ("C.shape", {"inputs": replace(good, C=good.x)}),
        ("A.shape", {"params": replace(weights, A=weights.A[:1])}),
        ("D.shape", {"params": replace(weights, D=weights.A)}),
        ("A.stride", {"params": replace(weights, A=weights.A.mT.contiguous().mT)}),
        ("state.shape", {"state": state[:, :1]}),
        ("state.dtype", {"state": state.half()}),
        ("out.shape", {"out": good.x[:1]}),
        ("A:", {"params": replace(weights, A=-weights.A)}),
        (r"dt\[0:2\]", {"params": replace(weights, dt_softplus=False, dt_bias=None)}),
        ("write_slots", {"rows": (Row(2, 1, 3),)}),
    ]
    for name, arguments in wrong:
        with pytest.raises(ValueError, match=rf"^{name}.*expected .*, got "):
            check(**arguments)
