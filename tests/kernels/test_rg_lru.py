"""Claims about the gated linear recurrence of RG-LRU layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hybridkv_kernels.rg_lru import check_rg_lru, rg_lru, rg_lru_reference, rg_lru_torch
from tests.state_rows import Row, make_batch, make_state, num_tokens

ROWS = (Row(2, 1, 1), Row(33, 2, 3), Row(1, 4, 4), Row(32, None, 6))
# float32 sums of up to 33 terms of size 1; then one rounding to 11 or 8 bits, which the interpreter truncates.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

IN_RANGE = (Row(2, 1, 2),)

Function = Callable[..., None]


def run(
    function: Function, a: torch.Tensor, x: torch.Tensor, rows: tuple[Row, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run over `rows` from random states; return the outputs with the states."""
    state, out = make_state(x.shape[1:], rows, x.device), torch.full_like(x, torch.nan)
    function(a, x, state=state, batch=make_batch(rows, x.device), out=out)
    return out, state


def random_inputs(
    count: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(width)
    decay = torch.rand(count, width, generator=generator).to(device)
    return decay.to(dtype), torch.randn(count, width, generator=generator).to(device, dtype)


@pytest.mark.parametrize("function", [rg_lru_torch, rg_lru])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_paths_equal_reference(function: Function, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows that fill a tile, pass it by one token or have one token give the reference's outputs, states."""
    a, x = random_inputs(num_tokens(ROWS), width, dtype, device)
    expected, expected_state = run(rg_lru_reference, a, x, ROWS)
    out, state = run(function, a, x, ROWS)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=2e-5)
    torch.testing.assert_close(state, expected_state, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("function", [rg_lru_torch, rg_lru])
def test_wide_states_are_cut_into_tiles(function: Function, device: torch.device) -> None:
    """A width that passes a tile by one, with decays of another dtype than the inputs, equals the reference."""
    rows = (Row(2, 1, 1), Row(1, 3, 2))
    a, x = random_inputs(num_tokens(rows), 65, torch.float16, device)
    expected, expected_state = run(rg_lru_reference, a.float(), x, rows)
    out, state = run(function, a.float(), x, rows)
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-5)
    torch.testing.assert_close(state, expected_state, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_reference_is_a_decayed_sum(device: torch.device) -> None:
    """The reference equals the sum of all inputs, each times the decays after it."""
    a, x = random_inputs(9, 2, torch.float32, device)
    rows = (Row(9, 1, 2),)
    out, state = run(rg_lru_reference, a, x, rows)
    start = make_state((2,), rows, device)[1]
    total = a.double().prod(0) * start + sum(a[t + 1 :].double().prod(0) * x[t] for t in range(9))
    torch.testing.assert_close(out[-1].double(), total, rtol=1e-6, atol=1e-6)
    assert torch.equal(state[2], out[-1])


@pytest.mark.parametrize("function", [rg_lru_reference, rg_lru_torch, rg_lru])
@pytest.mark.parametrize("length", [1, 6])
def test_zero_decay_forgets_unit_decay_sums(function: Function, length: int, device: torch.device) -> None:
    """After a token with decay 0 nothing of the past is left; decays of 1 add everything up."""
    x = torch.arange(1.0, length + 1, device=device)[:, None].repeat(1, 2)
    a = torch.ones_like(x)
    a[0, 0] = 0.0
    rows = (Row(length, 1, 1),)
    start = make_state((2,), rows, device)[1, 1]
    out, _ = run(function, a, x, rows)
    assert torch.equal(out[:, 0], x[:, 0].cumsum(0))
    torch.testing.assert_close(out[:, 1], x[:, 1].cumsum(0) + start)


def test_check_names_what_is_wrong() -> None:
    """Each broken argument is refused by its name; decays outside [0, 1] by the check."""
    a, x, state = torch.ones(2, 3), torch.ones(2, 3), torch.zeros(3, 3)

    def check(a=a, x=x, state=state, rows=IN_RANGE, out=x):
        check_rg_lru(a, x, state=state, batch=make_batch(rows, torch.device("cpu")), out=out)

    check()
    wrong = [
        ("a.shape", {"a": a[:1]}),
        ("a.stride", {"a": torch.ones(3, 2).T}),
        ("x.dtype", {"x": x.double()}),
        ("state.dtype", {"state": state.bfloat16()}),
        ("state.shape", {"state": torch.zeros(3, 4)}),
        ("out.dtype", {"out": x.half()}),
        (r"a\[0:2\]", {"a": a + 0.1}),
        (r"a\[0:2\]", {"a": a * torch.nan}),
        ("write_slots", {"rows": (Row(2, 1, 3),)}),
    ]
    for name, arguments in wrong:
        with pytest.raises(ValueError, match=rf"^{name}.*expected .*, got "):
            check(**arguments)
    check(a=torch.full((3, 3), torch.nan), x=torch.ones(3, 3), out=torch.ones(3, 3), rows=(Row(3, 1, -1),))
