"""Which class of recurrent module gets which adapter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridkv._torch import torch
from hybridkv.runner.recurrence import LayerRecurrence
from hybridkv.specs import StateFamily
from hybridkv_kernels import causal_conv1d, rg_lru
from hybridkv_kernels.state_batch import MATRIX_STATE_DTYPES, MAX_MATRIX_DIM

Functions = Mapping[str, Callable[..., object]]
TensorFunction = Callable[..., torch.Tensor]


class _RecurrentBlock(Protocol):
    """What is used of RecurrentGemma's recurrent block."""

    act_fn: TensorFunction
    linear_x: TensorFunction
    linear_y: TensorFunction
    linear_out: TensorFunction
    conv_1d: torch.nn.Conv1d
    rg_lru: torch.nn.Module


class _LightningAttention(Protocol):
    """What is used of MiniMax's lightning attention."""

    num_attention_heads: int
    head_dim: int
    slope_rate: torch.Tensor
    act_fn: TensorFunction
    qkv_proj: TensorFunction
    norm: TensorFunction
    output_gate: TensorFunction
    out_proj: TensorFunction


@dataclass(frozen=True)
class StateLimits:
    """What the op of a state takes.

    Attributes:
        dtypes: that it may be stored in.
        max_gpu_dim: longest side of its matrices on a GPU; None for any.
    """

    dtypes: Sequence[torch.dtype]
    max_gpu_dim: int | None = None


@dataclass(frozen=True)
class MixerAdapter:
    """How one kind of mixer is driven.

    Attributes:
        family: the kind of state it keeps.
        states: its states by name.
        functions: makes the functions that replace those of the module's file.
        forward: replaces the module's whole forward, for mixers whose recurrence is inline.
    """

    family: StateFamily
    states: Mapping[str, StateLimits]
    functions: Callable[[LayerRecurrence], Functions] = lambda _recurrence: {}
    forward: Callable[..., object] | None = None


def _mamba2(recurrence: LayerRecurrence) -> Functions:
    return {"causal_conv1d_fn": recurrence.convolve, "mamba2_chunk_scan": recurrence.mamba2_scan}


def _mamba1(recurrence: LayerRecurrence) -> Functions:
    return {"causal_conv1d_fn": recurrence.convolve, "mamba_selective_scan": recurrence.selective_scan}


def _gated_delta_net(recurrence: LayerRecurrence) -> Functions:
    return {"causal_conv1d_fn": recurrence.convolve, "torch_chunk_gated_delta_rule": recurrence.delta_rule}


def _kda(recurrence: LayerRecurrence) -> Functions:
    return {"causal_conv1d_fn": recurrence.convolve, "chunk_kimi_delta_attention": recurrence.delta_rule}


def _short_conv(recurrence: LayerRecurrence) -> Functions:
    return {"causal_conv1d_fn": recurrence.convolve}


def _rg_lru_forward(
    recurrence: LayerRecurrence,
    block: _RecurrentBlock,
    input_states: torch.Tensor,
    position_ids: torch.Tensor,
    *_args: object,
    **_kwargs: object,
) -> tuple[torch.Tensor, None]:
    """RecurrentGemma's recurrent block: a gate beside a convolution and an RG-LRU."""
    gate = block.act_fn(block.linear_y(input_states))
    branch = block.linear_x(input_states).transpose(1, 2)
    branch = recurrence.convolve(branch, block.conv_1d.weight.squeeze(1), block.conv_1d.bias).transpose(1, 2)

    def scan(
        hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, **_ignored: object
    ) -> tuple[torch.Tensor, None]:
        # The reset at a sequence's first token is left out: its row starts from zeros.
        return recurrence.rg_lru(recurrent_gate, hidden_states), None

    block.rg_lru.__dict__["_rnn_scan"] = scan
    try:
        branch = block.rg_lru(branch, position_ids)
    finally:
        del block.rg_lru.__dict__["_rnn_scan"]
    return block.linear_out(branch * gate), None


def _lightning_forward(
    recurrence: LayerRecurrence,
    attention: _LightningAttention,
    hidden_states: torch.Tensor,
    *_args: object,
    **_kwargs: object,
) -> tuple[torch.Tensor, None]:
    """MiniMax's lightning attention: linear attention with a decay a head, then a norm and a gate."""
    heads = (*hidden_states.shape[:2], attention.num_attention_heads, 3 * attention.head_dim)
    qkv = attention.act_fn(attention.qkv_proj(hidden_states)).reshape(heads)
    query, key, value = torch.split(qkv, attention.head_dim, dim=3)
    output = recurrence.lightning(query, key, value, attention.slope_rate.reshape(-1))
    output = attention.norm(output.flatten(2))
    return attention.out_proj(torch.nn.functional.sigmoid(attention.output_gate(hidden_states)) * output), None


_CONV = StateLimits(causal_conv1d.STATE_DTYPES)
_CHANNELS = StateLimits(MATRIX_STATE_DTYPES)
_MATRIX = StateLimits(MATRIX_STATE_DTYPES, MAX_MATRIX_DIM)
MAMBA2 = MixerAdapter("mamba2", {"conv": _CONV, "ssm": _MATRIX}, _mamba2)
MAMBA1 = MixerAdapter("mamba1", {"conv": _CONV, "ssm": _CHANNELS}, _mamba1)
GATED_DELTA_NET = MixerAdapter("gated_delta_net", {"conv": _CONV, "recurrent": _MATRIX}, _gated_delta_net)
KDA = MixerAdapter("kda", {"conv": _CONV, "recurrent": _MATRIX}, _kda)
SHORT_CONV = MixerAdapter("short_conv", {"conv": _CONV}, _short_conv)
RG_LRU = MixerAdapter("rglru", {"conv": _CONV, "recurrent": StateLimits(rg_lru.STATE_DTYPES)}, forward=_rg_lru_forward)
LIGHTNING = MixerAdapter("lightning", {"recurrent": _MATRIX}, forward=_lightning_forward)

MIXERS: Mapping[str, MixerAdapter] = {
    "BambaMixer": MAMBA2,
    "FalconH1Mixer": MAMBA2,
    "GraniteMoeHybridMambaLayer": MAMBA2,
    "Mamba2Mixer": MAMBA2,
    "NemotronHMamba2Mixer": MAMBA2,
    "Zamba2MambaMixer": MAMBA2,
    "FalconMambaMixer": MAMBA1,
    "JambaMambaMixer": MAMBA1,
    "MambaMixer": MAMBA1,
    "ZambaMambaMixer": MAMBA1,
    "OlmoHybridGatedDeltaNet": GATED_DELTA_NET,
    "Qwen3NextGatedDeltaNet": GATED_DELTA_NET,
    "Qwen3_5GatedDeltaNet": GATED_DELTA_NET,
    "Qwen3_5MoeGatedDeltaNet": GATED_DELTA_NET,
    "KimiLinearDeltaAttention": KDA,
    "Lfm2ShortConv": SHORT_CONV,
    "Lfm2MoeShortConv": SHORT_CONV,
    "RecurrentGemmaRecurrentBlock": RG_LRU,
    "MiniMaxLightningAttention": LIGHTNING,
}
