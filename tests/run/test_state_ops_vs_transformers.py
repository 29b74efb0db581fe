"""Claims that the element-wise recurrent ops compute what the layers of transformers' models compute."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from hybridkv_kernels.causal_conv1d import causal_conv1d_torch
from hybridkv_kernels.rg_lru import rg_lru_torch
from hybridkv_kernels.selective_scan import ScanInputs, SelectiveScanParams, selective_scan_torch
from tests.run.random_models import build_config, build_model
from tests.run.tiny_hybrids import CASES
from tests.state_rows import Row, make_batch

BATCH, PROMPT, NUM_STEPS = 2, 7, 3
# float32 in another order of sums; transformers keeps its states in float32 too.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
CPU = torch.device("cpu")
FIRST = [make_batch([Row(count, None, row + 1) for row in range(BATCH)], CPU) for count in range(PROMPT + 1)]
NEXT = make_batch([Row(1, row + 1, row + 1) for row in range(BATCH)], CPU)


@dataclass(frozen=True)
class Call:
    """One call of a function of transformers: its arguments by name, before the call, with its result."""

    arguments: dict[str, torch.Tensor]
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Recorder:
    """Wraps functions of transformers to keep what goes in, what comes out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.calls: dict[str, list[Call]] = {}

    def watch(self, owner: object, name: str) -> None:
        """Keep the calls of `owner.name`; tensors are copied, since some functions change a state in place."""
        original: Callable[..., torch.Tensor] = getattr(owner, name)
        calls = self.calls.setdefault(name, [])

        def wrapped(*args, **kwargs):
            bound = signature(original).bind(*args, **kwargs).arguments
            copies = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in bound.items()}
            calls.append(Call(copies, original(*args, **kwargs)))
            return calls[-1].result

        self._monkeypatch.setattr(owner, name, wrapped)


def generate(model_type: str, prompt: int = PROMPT) -> None:
    """Run a tiny random float32 model over a prompt, then over single tokens."""
    model = build_model(build_config(CASES[model_type])).float()
    name = "cache_params" if "cache_params" in signature(model.forward).parameters else "past_key_values"
    past = {name: DynamicCache(config=model.config)}
    tokens = torch.randint(0, 32, (BATCH, prompt + NUM_STEPS), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(prompt + NUM_STEPS).expand(BATCH, -1)
    edges = [0, *range(prompt, prompt + NUM_STEPS + 1)]
    with torch.no_grad():
        for begin, end in pairwise(edges):
            where = {} if name == "cache_params" else {"position_ids": positions[:, begin:end]}
            model(tokens[:, begin:end], use_cache=True, **where, **past)


def record(monkeypatch: pytest.MonkeyPatch, model_type: str, names: tuple[str, ...], prompt: int = PROMPT) -> Recorder:
    """Record functions of a model's module over one generation."""
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    recorder = Recorder(monkeypatch)
    for name in names:
        recorder.watch(module, name)
    generate(model_type, prompt)
    return recorder


def flat(tokens: torch.Tensor) -> torch.Tensor:
    """Turn `[B, ..., L]` into `[B*L, ...]`, row after row."""
    return tokens.movedim(-1, 1).flatten(0, 1).contiguous()


def unflat(out: torch.Tensor) -> torch.Tensor:
    """Turn `[B*L, ...]` into `[B, ..., L]`."""
    return out.unflatten(0, (BATCH, -1)).movedim(1, -1)


@pytest.mark.parametrize("prompt", [2, PROMPT])
@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "jamba", "zamba", "lfm2"])
def test_convolution_equals_the_layers(model_type: str, prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of a prompt, of each step, the kept inputs equal those of Mamba layers, of LFM2's short convolution."""
    calls = record(monkeypatch, model_type, ("causal_conv1d_fn", "causal_conv1d_update"), prompt).calls
    scans, updates = calls["causal_conv1d_fn"], calls["causal_conv1d_update"]
    assert scans
    assert len(updates) == NUM_STEPS * len(scans)
    for layer, scan in enumerate(scans):
        state = torch.full((BATCH + 1, *updates[layer].arguments["conv_state"].shape[1:]), torch.nan)
        for step, call in enumerate([scan, *updates[layer :: len(scans)]]):
            arguments = call.arguments
            x = flat(arguments["hidden_states"])
            if step:
                assert torch.equal(state[1:], arguments["conv_state"])
            causal_conv1d_torch(
                x,
                arguments["weight"],
                arguments.get("bias"),
                activation=arguments.get("activation"),
                state=state,
                batch=NEXT if step else FIRST[x.shape[0] // BATCH],
                out=(out := torch.empty_like(x)),
            )
            torch.testing.assert_close(unflat(out), call.result, **CLOSE)


def scan_inputs(heads: list[Call]) -> ScanInputs:
    """Return the inputs of one layer's calls, one a head; those of a single token lack the last dimension."""
    by_name = {"x": "hidden_states", "dt": "dt", "B": "B", "C": "C", "z": "z"}
    is_step = "state" in heads[0].arguments
    stacked = {}
    for ours, theirs in by_name.items():
        values = [head.arguments[theirs] for head in heads]
        stacked[ours] = flat(torch.stack([v.unsqueeze(-1) if is_step else v for v in values], dim=1))
    return ScanInputs(**stacked)


def scan_params(heads: list[Call]) -> SelectiveScanParams:
    """Return the weights of one layer's calls, one a head."""
    arguments = [head.arguments for head in heads]
    bias = "dt_bias" if "dt_bias" in arguments[0] else "delta_bias"
    names = ("A", "D", bias)
    weights = (torch.stack([head[name] for head in arguments]) for name in names)
    return SelectiveScanParams(*weights)


@pytest.mark.parametrize(("model_type", "num_heads"), [("mamba", 1), ("falcon_mamba", 1), ("jamba", 1), ("zamba", 2)])
def test_selective_scan_equals_the_layers(model_type: str, num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of a prompt, of each step, the states in between equal those of Mamba-1 layers, per head in Zamba."""
    calls = record(monkeypatch, model_type, ("mamba_selective_scan", "mamba_selective_state_update")).calls
    by_layer = [
        [calls[name][first : first + num_heads] for first in range(0, len(calls[name]), num_heads)]
        for name in ("mamba_selective_scan", "mamba_selective_state_update")
    ]
    scans, updates = by_layer
    assert scans
    assert len(updates) == NUM_STEPS * len(scans)
    for layer, scan in enumerate(scans):
        state = torch.full((BATCH + 1, *scan_params(scan).A.shape), torch.nan)
        for step, heads in enumerate([scan, *updates[layer :: len(scans)]]):
            inputs = scan_inputs(heads)
            if step:
                before = torch.stack([head.arguments["state"] for head in heads], dim=1)
                torch.testing.assert_close(state[1:], before, **CLOSE)
            out = torch.empty_like(inputs.x)
            batch = NEXT if step else FIRST[PROMPT]
            selective_scan_torch(inputs, scan_params(heads), state=state, batch=batch, out=out)
            results = [head.result if step else head.result[0] for head in heads]
            expected = torch.stack([r.unsqueeze(-1) if step else r for r in results], dim=1)
            torch.testing.assert_close(unflat(out), expected, **CLOSE)


def test_rg_lru_equals_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of a prompt, of each step, the states in between equal those of every recurrent layer."""
    recorder = Recorder(monkeypatch)
    recorder.watch(RecurrentGemmaRglru, "_rnn_scan")
    generate("recurrent_gemma")
    calls = recorder.calls["_rnn_scan"]
    num_layers = len(calls) // (NUM_STEPS + 1)
    assert num_layers > 1
    for layer in range(num_layers):
        state = torch.full((BATCH + 1, calls[layer].arguments["hidden_states"].shape[-1]), torch.nan)
        for step, call in enumerate(calls[layer::num_layers]):
            arguments = call.arguments
            decays = (arguments["recurrent_gate"] * ~arguments["reset"]).flatten(0, 1)
            x = arguments["hidden_states"].flatten(0, 1)
            out = torch.empty_like(x)
            rg_lru_torch(decays, x, state=state, batch=NEXT if step else FIRST[PROMPT], out=out)
            torch.testing.assert_close(out.unflatten(0, (BATCH, -1)), call.result[0], **CLOSE)
            torch.testing.assert_close(state[1:], call.result[1], **CLOSE)


def test_convolution_equals_recurrent_gemma(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution that keeps K - 1 inputs equals RecurrentGemma's, which has no activation."""
    module = importlib.import_module("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    recorder = Recorder(monkeypatch)
    recorder.watch(RecurrentGemmaRglru, "forward")
    inputs, blocks = [], []
    original = module.RecurrentGemmaRecurrentBlock.__init__

    def built(block, *args):
        original(block, *args)
        blocks.append(block)
        block.linear_x.register_forward_hook(lambda layer, args, output: inputs.append(output))

    monkeypatch.setattr(module.RecurrentGemmaRecurrentBlock, "__init__", built)
    generate("recurrent_gemma")
    outputs = [call.arguments["activations"] for call in recorder.calls["forward"]]
    assert len(outputs) == len(inputs) == len(blocks) * (NUM_STEPS + 1)
    for layer, block in enumerate(blocks):
        conv, state = block.conv_1d, torch.full((BATCH + 1, *block.conv1d_state.shape[1:]), torch.nan)
        pairs = zip(inputs[layer :: len(blocks)], outputs[layer :: len(blocks)], strict=True)
        for step, (x, expected) in enumerate(pairs):
            tokens = x.flatten(0, 1)
            out, batch = torch.empty_like(tokens), NEXT if step else FIRST[PROMPT]
            weight = conv.weight.detach().squeeze(1)
            causal_conv1d_torch(tokens, weight, conv.bias.detach(), state=state, batch=batch, out=out)
            torch.testing.assert_close(out.unflatten(0, (BATCH, -1)), expected, **CLOSE)
        assert torch.equal(state[1:], block.conv1d_state)
