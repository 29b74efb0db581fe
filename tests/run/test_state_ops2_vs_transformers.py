"""Claims that ops with a matrix state compute what the models of transformers compute."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest
import torch

from hybridkv_kernels.gated_delta_rule import DeltaRuleParams, gated_delta_rule_reference, gated_delta_rule_torch
from hybridkv_kernels.lightning_attention import lightning_attention_reference, lightning_attention_torch
from hybridkv_kernels.mamba2_scan import Mamba2Params, mamba2_scan_reference, mamba2_scan_torch
from tests.state_rows import Row, make_batch

pytest.importorskip("transformers")

CPU = torch.device("cpu")
# float32 sums over a row in another order.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
R, L = 2, 70
PREFILL, DECODE = ([Row(count, row + 1, row + 1) for row in range(R)] for count in (L, 1))


def modeling(family: str) -> ModuleType:
    return import_module(f"transformers.models.{family}.modeling_{family}")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def rows_of(states: torch.Tensor) -> torch.Tensor:
    """Put states `[R, ...]` behind a null slot."""
    return torch.cat([torch.zeros_like(states[:1]), states]).clone()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("path", [mamba2_scan_reference, mamba2_scan_torch])
@pytest.mark.parametrize("family", ["mamba2", "bamba", "zamba2", "nemotron_h", "granitemoehybrid", "falcon_h1"])
def test_mamba2_scan_equals_the_models(family: str, path) -> None:
    """A scan with a start state clamps d, a step after it does not: in both, outputs with states are the model's."""
    theirs = modeling(family)
    H, P, N, G = 4, 5, 6, 2
    x, dt, B, C = randn(R, L, H, P), 2 * randn(R, L, H), randn(R, L, G, N), randn(R, L, G, N)
    A, D, bias, start = -randn(H).abs(), randn(H), randn(H), randn(R, H, P, N)
    limit = (0.3, 1.5)
    weights = {"D": D, "dt_bias": bias, "dt_softplus": True}
    # Their chunks differ from ours, so that both cut the row elsewhere.
    scan = theirs.mamba2_chunk_scan(
        x, dt, A, B, C, chunk_size=16, dt_limit=limit, initial_states=start, return_final_states=True, **weights
    )
    state, out = rows_of(start), torch.empty(R * L, H, P)
    flat = [tensor.flatten(0, 1) for tensor in (x, dt, B, C)]
    params = Mamba2Params(A, D, bias, dt_limit=limit)
    path(*flat, params, state=state, batch=make_batch(PREFILL, CPU), out=out)
    torch.testing.assert_close(out.view(R, L, H, P), scan[0], **CLOSE)
    torch.testing.assert_close(state[1:], scan[1], **CLOSE)

    last = [tensor[:, -1] for tensor in (x, dt, B, C)]
    wide = {"D": D[:, None].expand(-1, P), "dt_bias": bias[:, None].expand(-1, P), "dt_softplus": True}
    their_state = scan[1].clone()
    stepped = theirs.mamba2_selective_state_update(
        their_state, last[0], last[1][..., None].expand(-1, -1, P), A[:, None, None].expand(-1, P, N), *last[2:], **wide
    )
    out = torch.empty(R, H, P)
    path(*last, Mamba2Params(A, D, bias), state=state, batch=make_batch(DECODE, CPU), out=out)
    torch.testing.assert_close(out, stepped, **CLOSE)
    torch.testing.assert_close(state[1:], their_state, **CLOSE)


def delta_inputs(num_key_heads: int, max_beta: float, *decay_dims: int) -> dict[str, torch.Tensor]:
    """Make inputs `[R, L, ...]` of the delta rule under the models' names."""
    H, Dk, Dv = 4, 6, 5
    return {
        "query": randn(R, L, num_key_heads, Dk),
        "key": randn(R, L, num_key_heads, Dk),
        "value": randn(R, L, H, Dv),
        "g": -2 * randn(R, L, H, *decay_dims).abs(),
        "beta": max_beta * randn(R, L, H).sigmoid(),
    }


def assert_delta_rule_equals(path, theirs, inputs: dict[str, torch.Tensor], num_tokens: int, normalize: bool) -> None:
    """Compare outputs with states for the first tokens of each row; theirs is [.., Dk, Dv], ours its transpose."""
    inputs = {name: tensor[:, :num_tokens] for name, tensor in inputs.items()}
    start = randn(R, 4, 6, 5)
    expected, end = theirs(
        **inputs, initial_state=start.clone(), output_final_state=True, use_qk_l2norm_in_kernel=normalize
    )
    state, out = rows_of(start.mT), torch.empty(R * num_tokens, 4, 5)
    flat = [tensor.flatten(0, 1) for tensor in inputs.values()]
    batch = make_batch([Row(num_tokens, row + 1, row + 1) for row in range(R)], CPU)
    path(*flat, DeltaRuleParams(6**-0.5, normalize), state=state, batch=batch, out=out)
    torch.testing.assert_close(out.view_as(expected), expected, **CLOSE)
    torch.testing.assert_close(state[1:], end.mT, **CLOSE)


@pytest.mark.parametrize("path", [gated_delta_rule_reference, gated_delta_rule_torch])
@pytest.mark.parametrize("num_tokens", [1, L])
@pytest.mark.parametrize(
    ("family", "max_beta"), [("qwen3_next", 1.0), ("qwen3_5", 1.0), ("qwen3_5_moe", 1.0), ("olmo_hybrid", 2.0)]
)
def test_gated_delta_rule_equals_the_models(family: str, max_beta: float, num_tokens: int, path) -> None:
    """Chunked, step by step, with shared key heads, with a beta of up to 2: outputs with states are the model's."""
    theirs = modeling(family)
    inputs = delta_inputs(2, max_beta)
    assert_delta_rule_equals(path, theirs.torch_recurrent_gated_delta_rule, inputs, num_tokens, normalize=True)
    assert_delta_rule_equals(path, theirs.torch_chunk_gated_delta_rule, inputs, num_tokens, normalize=True)


@pytest.mark.parametrize("path", [gated_delta_rule_reference, gated_delta_rule_torch])
@pytest.mark.parametrize("num_tokens", [1, L])
@pytest.mark.parametrize("family", ["kimi_linear", "bailing_hybrid"])
def test_gated_delta_rule_per_channel_equals_the_models(family: str, num_tokens: int, path) -> None:
    """With decays per key channel, chunked or step by step, outputs with states are the model's."""
    theirs = modeling(family)
    inputs = delta_inputs(4, 1.0, 6)
    assert_delta_rule_equals(path, theirs.recurrent_kimi_delta_attention, inputs, num_tokens, normalize=True)
    assert_delta_rule_equals(path, theirs.chunk_kimi_delta_attention, inputs, num_tokens, normalize=True)


class OneLayerCache:
    """The part of a cache that a lightning attention layer uses."""

    state: torch.Tensor | None = None

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.state

    def set_linear_cache(self, layer_idx: int, state: torch.Tensor) -> None:
        self.state = state


@pytest.mark.parametrize("path", [lightning_attention_reference, lightning_attention_torch])
@torch.no_grad()
def test_lightning_attention_equals_minimax(path) -> None:
    """The model's blocks in a prefill, its recurrence in a decode: outputs with states are the model's."""
    theirs = modeling("minimax")
    config = theirs.MiniMaxConfig(
        hidden_size=12, num_attention_heads=3, head_dim=4, num_hidden_layers=2, block_size=32, vocab_size=8
    )
    layer = theirs.MiniMaxLightningAttention(config, layer_idx=0)
    # Only the attention itself is compared: a gate of 1/2 is all that follows it.
    layer.norm, layer.out_proj = torch.nn.Identity(), torch.nn.Identity()
    layer.output_gate.weight.zero_()
    cache, state = OneLayerCache(), torch.full((R + 1, 3, 4, 4), torch.nan)
    for rows in ([Row(L, None, row + 1) for row in range(R)], DECODE):
        hidden = randn(R, rows[0].num_tokens, 12)
        expected, end = layer(hidden, None, None, past_key_values=cache)
        mixed = layer.act_fn(layer.qkv_proj(hidden)).unflatten(-1, (3, 12)).flatten(0, 1)
        out = torch.empty(mixed.shape[0], 3, 4)
        path(*mixed.split(4, -1), layer.slope_rate.flatten(), state=state, batch=make_batch(rows, CPU), out=out)
        torch.testing.assert_close(out.flatten(1), 2 * expected.flatten(0, 1), **CLOSE)
        torch.testing.assert_close(state[1:], end, **CLOSE)
