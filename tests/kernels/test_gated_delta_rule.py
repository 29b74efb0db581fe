"""Claims about the gated delta rule, with decays per head or per key channel."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hybridkv_kernels.gated_delta_rule import (
    DeltaRuleParams,
    check_gated_delta_rule,
    gated_delta_rule_reference,
    prepare_gated_delta_rule,
)
from tests.matrix_state_ops import CHUNK_ROWS, DeltaCase, compare
from tests.state_rows import Row, make_batch, make_state

CASES = {
    "grouped": DeltaCase(),
    "one key head": DeltaCase(num_key_heads=1, num_heads=3, value_dim=7),
    "not normalized": DeltaCase(num_key_heads=4, normalize=False, max_beta=1.0),
    "one key for all tokens": DeltaCase(same_keys=True, decay=0.01),
    "strong decay": DeltaCase(decay=40.0),
    "no decay": DeltaCase(decay=0.0),
    "per channel": DeltaCase(per_channel=True),
    "per channel, strong decay": DeltaCase(per_channel=True, decay=40.0),
    "per channel, one key": DeltaCase(per_channel=True, same_keys=True, decay=0.01),
    "ones": DeltaCase(num_key_heads=1, num_heads=1, key_dim=1, value_dim=1),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def test_correction_of_one_stores_the_value(device: torch.device) -> None:
    """With beta 1, unit keys, no decay, the state then answers a key with the value last written under it."""
    keys = torch.eye(3, device=device)[[0, 1, 0]].unsqueeze(1)  # [T, 1, 3]
    values = torch.arange(6.0, device=device).view(3, 1, 2)
    state = torch.randn(3, 1, 2, 3, device=device)
    third = state[1, 0, :, 2].clone()
    out = torch.empty_like(values)
    zero, one = torch.zeros(3, 1, device=device), torch.ones(3, 1, device=device)
    params, batch = DeltaRuleParams(scale=2.0), make_batch([Row(3, 1, 2)], device)
    gated_delta_rule_reference(keys, keys, values, zero, one, params, state=state, batch=batch, out=out)
    assert torch.equal(state[2, 0], torch.stack([values[2, 0], values[1, 0], third], 1))
    assert torch.equal(out, 2 * values)


def test_decay_comes_before_the_correction(device: torch.device) -> None:
    """The error that a step corrects is that of the decayed state."""
    ones = torch.ones(1, 1, 1, device=device)
    state = torch.full((3, 1, 1, 1), 8.0, device=device)
    half, beta = torch.full((1, 1), 0.5, device=device).log(), torch.full((1, 1), 0.5, device=device)
    out, batch = torch.empty_like(ones), make_batch([Row(1, 1, 2)], device)
    gated_delta_rule_reference(ones, ones, ones, half, beta, DeltaRuleParams(1.0), state=state, batch=batch, out=out)
    assert out.item() == pytest.approx(4 + 0.5 * (1 - 4))


@every_case
def test_torch_path_equals_reference_across_chunks(case: DeltaCase) -> None:
    """Rows below, at, above a chunk of 64 tokens, together in one batch, equal the loop."""
    compare(case.op("delta"), "torch", CHUNK_ROWS, torch.device("cpu"), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("is_long", [False, True], ids=["tokens", "chunks"])
@every_case
def test_kernel_equals_reference(case: DeltaCase, is_long: bool, device: torch.device) -> None:
    """Both kinds of walk equal the loop, past the end of a chunk of 16 tokens."""
    rows = (Row(18 if is_long else 3, 1, 2), Row(1, None, 3))
    compare(case.op("delta", is_long=is_long), "triton", rows, device, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("log_decay", [-1e3, -1e6, -math.inf])
@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize("path", ["torch", "triton"])
def test_tokens_that_forget_all_leave_the_others_precise(
    path: str, per_channel: bool, log_decay: float, device: torch.device
) -> None:
    """Some huge or infinite log decays among small ones cost those between them no precision, as differences would."""
    case = DeltaCase(1, 2, per_channel=per_channel, seventh_log_decay=log_decay)
    compare(case.op("delta", is_long=True), path, (Row(33, 1, 2),), device, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
def test_kernel_cuts_wide_values_into_blocks(per_channel: bool, device: torch.device) -> None:
    """Value sizes above one block, key sizes that are no power of two are served."""
    case = DeltaCase(1, 1, key_dim=72, value_dim=35, per_channel=per_channel, dtype=torch.float16)
    for is_long in (False, True):
        op = case.op("delta", is_long=is_long)
        compare(op, "triton", (Row(18, 1, 2),), device, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("is_long", [False, True], ids=["tokens", "chunks"])
def test_sixteen_bit_inputs_and_states_are_served(path: str, is_long: bool, device: torch.device) -> None:
    """bfloat16 states, float16 inputs are computed in float32, rounded once."""
    op = DeltaCase(dtype=torch.float16).op("delta", is_long=is_long)
    rows = (Row(5, 1, 2), Row(1, 3, 3))
    compare(op, path, rows, device, state_dtype=torch.bfloat16, rtol=2e-3, atol=2e-3)


def test_check_names_what_breaks_the_contract() -> None:
    """A growing state, an overshooting correction, a scale of zero, a bad batch are refused."""
    device, rows = torch.device("cpu"), [Row(3, 1, 2)]
    tokens = DeltaCase().make_tokens(3, device)
    state = make_state((4, 5, 6), rows, device)
    given = {"state": state, "batch": make_batch(rows, device), "out": torch.empty_like(tokens["value"])}
    params = DeltaRuleParams(scale=1.0)
    check_gated_delta_rule(**tokens, params=params, **given)
    with pytest.raises(ValueError, match=r"log_decay\[0:3\]: expected <= 0"):
        check_gated_delta_rule(**tokens | {"log_decay": -tokens["log_decay"]}, params=params, **given)
    with pytest.raises(ValueError, match=r"beta\[0:3\]: expected 0..2"):
        check_gated_delta_rule(**tokens | {"beta": tokens["beta"] + 2}, params=params, **given)
    with pytest.raises(ValueError, match="scale: expected > 0"):
        check_gated_delta_rule(**tokens, params=replace(params, scale=0.0), **given)
    with pytest.raises(ValueError, match=r"write_slots\[0\]"):
        check_gated_delta_rule(**tokens, params=params, **given | {"batch": make_batch([Row(3, 1, 0)], device)})


def test_launcher_refuses_what_the_kernel_cannot_address() -> None:
    """Wrong groups, wrong decay shape, a state stored the other way round, strided dimensions name their argument."""
    device, rows = torch.device("cpu"), [Row(3, 1, 2)]
    tokens = DeltaCase().make_tokens(3, device)
    state = make_state((4, 5, 6), rows, device)
    given = {"params": DeltaRuleParams(1.0), "batch": make_batch(rows, device)}
    given["out"] = torch.empty_like(tokens["value"])
    three = {name: tokens[name].repeat(1, 2, 1)[:, :3] for name in ("query", "key")}
    with pytest.raises(ValueError, match="value heads: expected a multiple of key heads"):
        prepare_gated_delta_rule(**tokens | three, state=state, **given)
    with pytest.raises(ValueError, match=r"log_decay\.shape"):
        prepare_gated_delta_rule(**tokens | {"log_decay": tokens["value"]}, state=state, **given)
    with pytest.raises(ValueError, match=r"state\.shape"):
        prepare_gated_delta_rule(**tokens, state=state.mT.contiguous(), **given)
    with pytest.raises(ValueError, match=r"key\.stride"):
        prepare_gated_delta_rule(**tokens | {"key": tokens["key"].mT.contiguous().mT}, state=state, **given)
