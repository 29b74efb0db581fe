"""Claims about the causal depthwise convolution over rows with kept inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from hybridkv_kernels import causal_conv1d as module
from hybridkv_kernels.causal_conv1d import (
    causal_conv1d,
    causal_conv1d_reference,
    causal_conv1d_torch,
    check_causal_conv1d,
)
from tests.state_rows import Row, make_batch, make_state, num_tokens

ROWS = (Row(5, 1, 1), Row(33, 2, 3), Row(1, 4, 4), Row(0, 5, 5), Row(17, None, 6), Row(16, 7, 8))


@dataclass(frozen=True)
class Case:
    """Sizes, dtypes, options of one call."""

    kernel: int = 4
    channels: int = 3
    columns: int = 3
    has_bias: bool = True
    activation: module.Activation = "silu"
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32

    @property
    def tolerance(self) -> dict[str, float]:
        """Sums of up to 9 terms in float32; a rounding of the outputs to 8 or 11 bits, truncated by the interpreter."""
        relative = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[self.dtype]
        return {"rtol": relative, "atol": 1e-5}

    def run(
        self, function: Callable[..., None], rows: tuple[Row, ...], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.kernel)
        count = num_tokens(rows)
        x = torch.randn(count, self.channels, generator=generator).to(device, self.dtype)
        weight = torch.randn(self.channels, self.kernel, generator=generator).to(device, self.dtype)
        bias = torch.randn(self.channels, generator=generator).to(device, self.dtype) if self.has_bias else None
        state = make_state((self.channels, self.columns), rows, device, self.state_dtype)
        out = torch.full_like(x, torch.nan)
        function(x, weight, bias, activation=self.activation, state=state, batch=make_batch(rows, device), out=out)
        return out, state


CASES = [
    Case(),
    Case(columns=4),
    Case(kernel=2, columns=1, channels=1, has_bias=False, activation=None),
    Case(kernel=3, columns=2, has_bias=False, activation=None, channels=5),
    Case(kernel=8, columns=7, has_bias=False),
    Case(kernel=8, columns=8, activation=None, channels=70),
    Case(dtype=torch.bfloat16, state_dtype=torch.bfloat16, columns=4),
    Case(dtype=torch.float16, state_dtype=torch.float16),
    Case(dtype=torch.bfloat16, state_dtype=torch.float32, channels=300),
]


@pytest.mark.parametrize("function", [causal_conv1d_torch, causal_conv1d])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_paths_equal_reference(function: Callable[..., None], case: Case, device: torch.device) -> None:
    """Every kernel size, state width, dtype, option gives the reference's outputs with exactly its states."""
    expected, expected_state = case.run(causal_conv1d_reference, ROWS, device)
    out, state = case.run(function, ROWS, device)
    torch.testing.assert_close(out, expected, **case.tolerance)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", [Case(columns=4), Case(kernel=3, columns=2, has_bias=False, activation=None)], ids=str)
def test_reference_is_a_convolution_of_state_then_tokens(case: Case, device: torch.device) -> None:
    """The reference equals torch's own convolution over the kept inputs followed by the row's tokens."""

    def convolve(x, weight, bias, *, activation, state, batch, out):
        inputs = torch.cat([state[1][:, state.shape[2] - case.kernel + 1 :], x.T], dim=1)
        total = F.conv1d(inputs[None], weight[:, None], bias, groups=case.channels)[0].T
        out.copy_(F.silu(total) if activation else total)

    rows = (Row(9, 1, 2),)
    expected, _ = case.run(convolve, rows, device)
    torch.testing.assert_close(case.run(causal_conv1d_reference, rows, device)[0], expected, **case.tolerance)


@pytest.mark.parametrize("function", [causal_conv1d_reference, causal_conv1d_torch, causal_conv1d])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 20])
def test_state_holds_the_last_inputs(function: Callable[..., None], length: int, device: torch.device) -> None:
    """After a row, the state's columns are its last inputs, oldest first, filled up from the start state."""
    x = torch.arange(10.0, 10.0 + length, device=device)[:, None]
    state = torch.tensor([[[torch.nan] * 4], [[1.0, 2.0, 3.0, 4.0]]], device=device)
    batch = make_batch([Row(length, 1, 1)], device)
    function(x, torch.ones(1, 4, device=device), state=state, batch=batch, out=torch.empty_like(x))
    assert state[1, 0].tolist() == [1.0, 2.0, 3.0, 4.0, *x[:, 0].tolist()][-4:]


def test_torch_path_joins_its_blocks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the fewest tokens give the outputs of one block."""
    case, rows = Case(kernel=8, columns=7), (Row(29, 1, 1), Row(8, None, 2))
    expected, _ = case.run(causal_conv1d_torch, rows, device)
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 1)
    torch.testing.assert_close(case.run(causal_conv1d_torch, rows, device)[0], expected)


def test_check_names_what_is_wrong(device: torch.device) -> None:
    """Each broken argument is refused by its name; a slot out of range by the check only."""
    x, weight, bias = torch.ones(2, 3), torch.ones(3, 4), torch.ones(3)
    state, batch = torch.zeros(3, 3, 3), make_batch([Row(2, 1, 2)], torch.device("cpu"))

    def check(x=x, weight=weight, bias=bias, activation=None, state=state, batch=batch, out=x):
        check_causal_conv1d(x, weight, bias, activation=activation, state=state, batch=batch, out=out)

    check()
    wrong = [
        ("x.dtype", {"x": x.double()}),
        ("x.stride", {"x": torch.ones(3, 2).T}),
        ("weight.shape", {"weight": torch.ones(3, 9)}),
        ("weight.shape", {"weight": torch.ones(2, 4)}),
        ("weight.stride", {"weight": torch.ones(4, 3).T}),
        ("bias.shape", {"bias": torch.ones(4)}),
        ("activation", {"activation": "gelu"}),
        ("state.shape", {"state": torch.zeros(3, 3, 5)}),
        ("state.dtype", {"state": state.double()}),
        ("state.stride", {"state": torch.zeros(3, 3, 6)[:, :, ::2]}),
        ("out.dtype", {"out": x.half()}),
        ("write_slots", {"batch": make_batch([Row(2, 1, 3)], torch.device("cpu"))}),
        ("query_start_loc", {"batch": make_batch([Row(3, 1, 2)], torch.device("cpu"))}),
    ]
    for name, arguments in wrong:
        with pytest.raises(ValueError, match=rf"^{name}.*expected .*, got "):
            check(**arguments)
