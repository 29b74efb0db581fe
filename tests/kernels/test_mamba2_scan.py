"""Claims about the Mamba-2 scan."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hybridkv_kernels.mamba2_scan import (
    Mamba2Params,
    check_mamba2_scan,
    mamba2_scan,
    mamba2_scan_reference,
    mamba2_scan_torch,
    prepare_mamba2_scan,
)
from tests.matrix_state_ops import CHUNK_ROWS, Mamba2Case, compare
from tests.state_rows import Row, make_batch, make_state


class InfiniteCase(Mamba2Case):
    def params(self, device: torch.device) -> Mamba2Params:
        params = super().params(device)
        params.A[1] = -math.inf
        return params


PATHS = [mamba2_scan_reference, mamba2_scan_torch, mamba2_scan]
CASES = {
    "one group": Mamba2Case(num_groups=1),
    "group per head": Mamba2Case(num_groups=4),
    "no weights": Mamba2Case(has_weights=False, dt_limit=None),
    "no limit": Mamba2Case(dt_limit=None),
    "ones": Mamba2Case(num_heads=1, num_groups=1, head_dim=1, state_size=1),
}


def test_reference_equals_the_sum_it_unrolls_to(device: torch.device) -> None:
    """y_t = sum over s <= t of C_t B_s exp(sum of d A after s) d_s x_s, plus D x_t, plus the decayed start state."""
    case = Mamba2Case(num_groups=1, dt_limit=(0.1, 1.0))
    tokens = {name: tensor.double() for name, tensor in case.make_tokens(7, device).items()}
    params, rows = case.params(device), [Row(7, 1, 2)]
    op = case.op("mamba2")
    state = make_state(op.state_shape, rows, device)
    out = op.run("reference", case.make_tokens(7, device), state, make_batch(rows, device))
    d = torch.nn.functional.softplus(tokens["dt"] + params.dt_bias.double()).clamp(0.1, 1.0)
    total = (d * params.A.double()).cumsum(0)  # [T, H]
    decay = (total[:, None] - total[None]).exp() * torch.ones(7, 7, device=device).tril()[..., None]
    score = (tokens["C"][:, 0] @ tokens["B"][:, 0].T)[..., None] * decay * d[None]  # [T, S, H]
    from_start = torch.einsum("tn,hpn->thp", tokens["C"][:, 0], state[1].double()) * total.exp()[..., None]
    expected = torch.einsum("tsh,shp->thp", score, tokens["x"]) + params.D.double()[:, None] * tokens["x"] + from_start
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_torch_path_equals_reference_across_chunks(case: Mamba2Case) -> None:
    """Rows below, at, above a chunk of 64 tokens, together in one batch, equal the loop."""
    compare(case.op("mamba2"), "torch", CHUNK_ROWS, torch.device("cpu"), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("is_long", [False, True], ids=["tokens", "chunks"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_equals_reference(case: Mamba2Case, is_long: bool, device: torch.device) -> None:
    """Both kinds of walk equal the loop, past the end of a chunk of 32 tokens."""
    rows = (Row(34 if is_long else 3, 1, 2), Row(1, None, 3))
    compare(case.op("mamba2", is_long=is_long), "triton", rows, device, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("long_step", [1e3, 1e6])
def test_steps_that_forget_all_leave_the_others_precise(path: str, long_step: float, device: torch.device) -> None:
    """Some steps with huge log decays among small ones cost those between them no precision, as differences would."""
    op = Mamba2Case(dt_limit=None, long_step=long_step).op("mamba2", is_long=True)
    compare(op, path, (Row(33, 1, 2),), device, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("is_long", [False, True], ids=["tokens", "chunks"])
def test_head_that_forgets_all_is_served(path: str, is_long: bool, device: torch.device) -> None:
    """A head with A of -inf keeps nothing but each token's own part, instead of NaN."""
    op = InfiniteCase().op("mamba2", is_long=is_long)
    compare(op, path, (Row(6, 1, 2),), device, rtol=1e-4, atol=2e-5)


def test_kernel_cuts_wide_heads_into_blocks(device: torch.device) -> None:
    """Head sizes above one block, state sizes that are no power of two are served."""
    case = Mamba2Case(num_heads=1, num_groups=1, head_dim=35, state_size=72, dtype=torch.float16)
    for is_long in (False, True):
        op = case.op("mamba2", is_long=is_long)
        compare(op, "triton", (Row(18, 1, 2),), device, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("is_long", [False, True], ids=["tokens", "chunks"])
def test_sixteen_bit_inputs_and_states_are_served(path: str, is_long: bool, device: torch.device) -> None:
    """bfloat16 states, float16 inputs are computed in float32, rounded once."""
    op = Mamba2Case(dtype=torch.float16).op("mamba2", is_long=is_long)
    rows = (Row(5, 1, 2), Row(1, 3, 3))
    compare(op, path, rows, device, state_dtype=torch.bfloat16, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("path", PATHS)
def test_small_steps_keep_their_precision(path: object, device: torch.device) -> None:
    """softplus(-18) is 1.5e-8, not what 1 + exp(-18) leaves of it in float32; softplus(25) is 25."""
    ones = torch.ones(2, 1, 1, device=device)
    dt = torch.tensor([[-18.0], [25.0]], device=device)
    state = torch.zeros(3, 1, 1, 1, device=device)
    out = torch.empty_like(ones)
    params = Mamba2Params(torch.zeros(1, device=device))
    for token, expected in ((0, 1.522998e-8), (1, 25.0)):
        batch = make_batch([Row(1, None, 1)], device)
        token_slice = slice(token, token + 1)
        path(*(part[token_slice] for part in (ones, dt, ones, ones)), params, state=state, batch=batch, out=out[:1])
        assert out[0].item() == pytest.approx(expected, rel=1e-5)


def test_check_names_what_breaks_the_contract() -> None:
    """A growing state, negative steps, a bad batch are refused."""
    device, rows = torch.device("cpu"), [Row(3, 1, 2)]
    case = Mamba2Case()
    tokens, params = case.make_tokens(3, device), case.params(device)
    state = make_state((4, 5, 6), rows, device)
    given = {"state": state, "batch": make_batch(rows, device), "out": torch.empty_like(tokens["x"])}
    check_mamba2_scan(**tokens, params=params, **given)
    with pytest.raises(ValueError, match="A: expected <= 0"):
        check_mamba2_scan(**tokens, params=replace(params, A=-params.A), **given)
    with pytest.raises(ValueError, match=r"dt\[0:3\]: expected steps >= 0"):
        check_mamba2_scan(**tokens, params=replace(params, dt_softplus=False, dt_limit=None), **given)
    with pytest.raises(ValueError, match=r"write_slots\[0\]"):
        check_mamba2_scan(**tokens, params=params, **given | {"batch": make_batch([Row(3, 1, 0)], device)})


def test_launcher_refuses_what_the_kernel_cannot_address() -> None:
    """Wrong groups, wrong state shape, wrong state dtype, strided dimensions each name their argument."""
    device, rows = torch.device("cpu"), [Row(3, 1, 2)]
    case = Mamba2Case()
    tokens, params = case.make_tokens(3, device), case.params(device)
    state = make_state((4, 5, 6), rows, device)
    given = {"params": params, "batch": make_batch(rows, device), "out": torch.empty_like(tokens["x"])}
    three_groups = {name: tokens[name].repeat(1, 2, 1)[:, :3] for name in ("B", "C")}
    with pytest.raises(ValueError, match="heads: expected a multiple of groups"):
        prepare_mamba2_scan(**tokens | three_groups, state=state, **given)
    with pytest.raises(ValueError, match=r"state\.shape"):
        prepare_mamba2_scan(**tokens, state=state.mT.contiguous(), **given)
    with pytest.raises(ValueError, match=r"state\.dtype"):
        prepare_mamba2_scan(**tokens, state=state.half(), **given)
    with pytest.raises(ValueError, match=r"state\.stride"):
        prepare_mamba2_scan(**tokens, state=state.mT.contiguous().mT, **given)
    with pytest.raises(ValueError, match=r"value\.stride"):
        prepare_mamba2_scan(**tokens | {"x": tokens["x"].mT.contiguous().mT}, state=state, **given)
    bad = replace(params, dt_bias=params.dt_bias[:2])
    with pytest.raises(ValueError, match=r"dt_bias\.shape"):
        prepare_mamba2_scan(**tokens, state=state, **given | {"params": bad})
