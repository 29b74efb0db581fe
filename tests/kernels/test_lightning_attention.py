"""Claims about lightning attention."""

from __future__ import annotations

import math

import pytest
import torch

from hybridkv_kernels.lightning_attention import check_lightning_attention, prepare_lightning_attention
from tests.matrix_state_ops import CHUNK_ROWS, LightningCase, compare
from tests.state_rows import Row, make_batch, make_state


class InfiniteCase(LightningCase):
    def slope(self, device: torch.device) -> torch.Tensor:
        slope = super().slope(device)
        slope[1] = math.inf
        return slope


CASES = {
    "dims differ": LightningCase(),
    "ones": LightningCase(num_heads=1, key_dim=1, value_dim=1),
}


def test_reference_equals_the_sum_it_unrolls_to(device: torch.device) -> None:
    """o_t = sum over s <= t of exp(-slope (t - s)) (q_t k_s) v_s, plus the start state decayed t + 1 times."""
    op = LightningCase().op("lightning")
    tokens, rows = op.make_tokens(6, device), [Row(6, 1, 2)]
    state = make_state(op.state_shape, rows, device)
    out = op.run("reference", tokens, state, make_batch(rows, device))
    q, k, v = (tokens[name].double() for name in ("query", "key", "value"))
    slope, step = LightningCase().slope(device).double(), torch.arange(6, device=device)
    decay = (
        torch.exp(-slope * (step[:, None] - step).clamp(min=0)[..., None])
        * torch.ones(6, 6, device=device).tril()[..., None]
    )
    scores = torch.einsum("thd,shd->tsh", q, k) * decay
    from_start = torch.einsum("thd,hde->the", q, state[1].double()) * torch.exp(-slope * (step[:, None] + 1))[..., None]
    expected = torch.einsum("tsh,she->the", scores, v) + from_start
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_torch_path_equals_reference_across_chunks(case: LightningCase) -> None:
    """Rows below, at, above a chunk of 64 tokens, together in one batch, equal the loop."""
    compare(case.op("lightning"), "torch", CHUNK_ROWS, torch.device("cpu"), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("is_long", [False, True], ids=["tokens", "chunks"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_equals_reference(case: LightningCase, is_long: bool, device: torch.device) -> None:
    """Both kinds of walk equal the loop, past the end of a chunk of 32 tokens."""
    rows = (Row(34 if is_long else 3, 1, 2), Row(1, None, 3))
    compare(case.op("lightning", is_long=is_long), "triton", rows, device, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("is_long", [False, True], ids=["tokens", "chunks"])
def test_head_that_forgets_all_is_served(path: str, is_long: bool, device: torch.device) -> None:
    """A head with an infinite slope keeps nothing but each token's own part, instead of NaN."""
    op = InfiniteCase().op("lightning", is_long=is_long)
    compare(op, path, (Row(6, 1, 2),), device, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("is_long", [False, True], ids=["tokens", "chunks"])
def test_sixteen_bit_inputs_and_states_are_served(path: str, is_long: bool, device: torch.device) -> None:
    """bfloat16 states, float16 inputs, values wider than one block are computed in float32, rounded once."""
    op = LightningCase(num_heads=1, key_dim=20, value_dim=35, dtype=torch.float16).op("lightning", is_long=is_long)
    rows = (Row(5, 1, 2), Row(1, 3, 3))
    compare(op, path, rows, device, state_dtype=torch.bfloat16, rtol=2e-3, atol=2e-3)


def test_wrong_arguments_are_named() -> None:
    """A growing state, a wrong shape of state, slopes for other heads, a bad batch are refused."""
    device, rows = torch.device("cpu"), [Row(3, 1, 2)]
    case = LightningCase()
    tokens, slope = case.make_tokens(3, device), case.slope(device)
    given = {"batch": make_batch(rows, device), "out": torch.empty_like(tokens["value"])}
    state = make_state((3, 6, 5), rows, device)
    check_lightning_attention(**tokens, slope=slope, state=state, **given)
    with pytest.raises(ValueError, match="slope: expected >= 0"):
        check_lightning_attention(**tokens, slope=-slope, state=state, **given)
    bad = given | {"batch": make_batch([Row(3, 1, 0)], device)}
    with pytest.raises(ValueError, match=r"write_slots\[0\]"):
        check_lightning_attention(**tokens, slope=slope, state=state, **bad)
    with pytest.raises(ValueError, match=r"state\.shape"):
        prepare_lightning_attention(**tokens, slope=slope, state=state.mT.contiguous(), **given)
    with pytest.raises(ValueError, match=r"slope\.shape"):
        prepare_lightning_attention(**tokens, slope=slope[:2], state=state, **given)
    with pytest.raises(ValueError, match=r"query\.dtype"):
        prepare_lightning_attention(**tokens | {"query": tokens["query"].double()}, slope=slope, state=state, **given)
