"""Recurrent states from sizes, one builder for each family of states.

`kernel` is the taps K of the causal convolution, whose state has K-1 columns. All in the default policy: convolutions
in bfloat16, recurrent states in float32. `hybridkv.options` changes that afterwards.
"""

from dataclasses import dataclass

from hybridkv.hf_config.fields import ConfigFields
from hybridkv.specs import CacheTensor, LayerCache, State, StateFamily


@dataclass(frozen=True)
class Mamba2Sizes:
    """Sizes of a Mamba-2 layer; the heads share B and C within a group."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel: int


@dataclass(frozen=True)
class GatedDeltaSizes:
    """Sizes of a Gated DeltaNet layer."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel: int


def kernel_size(fields: ConfigFields, name: str, default: int) -> int:
    """Return the taps of a causal convolution: at least 2, as one tap keeps no columns between steps."""
    return fields.integer(name, default, at_least=2)


def mamba1_state(channels: int, state_size: int, kernel: int) -> LayerCache:
    """Return `conv [channels, K-1]`, `ssm [channels, state_size]`."""
    return _state_cache("mamba1", conv=(channels, kernel - 1), ssm=(channels, state_size))


def multi_head_mamba1_state(num_heads: int, head_dim: int, state_size: int, kernel: int) -> LayerCache:
    """Return `conv [num_heads * head_dim, K-1]`, `ssm [num_heads, head_dim, state_size]`."""
    return _state_cache("mamba1", conv=(num_heads * head_dim, kernel - 1), ssm=(num_heads, head_dim, state_size))


def mamba2_state(sizes: Mamba2Sizes) -> LayerCache:
    """Return `conv [num_heads * head_dim + 2 * num_groups * state_size, K-1]`, `ssm [heads, head_dim, state_size]`."""
    channels = sizes.num_heads * sizes.head_dim + 2 * sizes.num_groups * sizes.state_size
    ssm = (sizes.num_heads, sizes.head_dim, sizes.state_size)
    return _state_cache("mamba2", conv=(channels, sizes.kernel - 1), ssm=ssm)


def gated_delta_state(sizes: GatedDeltaSizes) -> LayerCache:
    """Return `conv [2 * Hk * Dk + Hv * Dv, K-1]` over q, k, v and `recurrent [Hv, Dv, Dk]`."""
    channels = 2 * sizes.num_key_heads * sizes.key_head_dim + sizes.num_value_heads * sizes.value_head_dim
    recurrent = (sizes.num_value_heads, sizes.value_head_dim, sizes.key_head_dim)
    return _state_cache("gated_delta_net", conv=(channels, sizes.kernel - 1), recurrent=recurrent)


def kda_state(num_heads: int, head_dim: int, kernel: int) -> LayerCache:
    """Return `conv [3 * num_heads * head_dim, K-1]` of q, k, v; `recurrent [num_heads, head_dim, head_dim]`."""
    recurrent = (num_heads, head_dim, head_dim)
    return _state_cache("kda", conv=(3 * num_heads * head_dim, kernel - 1), recurrent=recurrent)


def lightning_state(num_heads: int, head_dim: int) -> LayerCache:
    """Return `recurrent [num_heads, head_dim, head_dim]`; lightning attention has no convolution."""
    return _state_cache("lightning", recurrent=(num_heads, head_dim, head_dim))


def short_conv_state(channels: int, kernel: int) -> LayerCache:
    """Return `conv [channels, K-1]`, all that a gated short convolution keeps."""
    return _state_cache("short_conv", conv=(channels, kernel - 1))


def rglru_state(width: int, kernel: int) -> LayerCache:
    """Return `conv [width, K-1]`, `recurrent [width]` of a real-gated linear recurrent unit."""
    return _state_cache("rglru", conv=(width, kernel - 1), recurrent=(width,))


def _state_cache(family: StateFamily, **shapes: tuple[int, ...]) -> LayerCache:
    """Return a state whose tensors are named by keyword, in that order."""
    tensors = tuple(
        CacheTensor(name=name, kind="per_sequence", shape=shape, dtype="bfloat16" if name == "conv" else "float32")
        for name, shape in shapes.items()
    )
    return LayerCache(lifecycle=State(family=family), tensors=tensors)
