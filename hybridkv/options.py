"""Choices of the caller that a config.json does not make, and what they change in a model spec."""

from math import prod
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from hybridkv.errors import SpecError, UnsupportedModel
from hybridkv.spec_base import Frozen
from hybridkv.specs import (
    DTYPE_BYTES,
    CacheTensor,
    CrossAttention,
    Dtype,
    LayerCache,
    LayerSpec,
    ModelSpec,
    PositiveInt,
    State,
    StateFamily,
)
from hybridkv.units import cdiv

_SCALE_GROUP = 128  # elements of a latent or an indexer key that share one float32 scale
_REPLICATED = ("latent", "index_k")  # per-token tensors that every rank keeps whole


class CacheOptions(Frozen):
    """How caches are stored, whatever the model; a checkpoint's own dtype says nothing about its caches.

    The defaults are one policy for all models: K and V in bfloat16, convolution states in bfloat16 with K-1 columns,
    recurrent states in float32, one rank, no draft layers.

    Attributes:
        kv_dtype: dtype of K, V, latents and indexer keys.
        kv_scales: what 8-bit caches keep beside them: a float32 scale per token and KV head (per 128 elements of a
            latent or an indexer key), or nothing where scales are per tensor and lie with the weights.
        state_dtype: dtype of recurrent states.
        conv_dtype: dtype of convolution states.
        conv_columns: columns of a convolution state of kernel width K; K keeps a column that the next step drops.
        tp_size: tensor-parallel ranks; the spec is what one rank keeps. Heads are divided, and replicated where there
            are fewer of them than ranks; latents and indexer keys are replicated.
        draft_layers: layers of a multi-token-prediction draft, each with the caches of the last attention layer.
        max_source_tokens: longest source of a cross-attention model, instead of the limit in its config.
    """

    fixes: ClassVar[dict[str, str]] = {
        "tp_size": "give the number of ranks, at least 1",
        "draft_layers": "give a number of layers, 0 for none",
    }
    kv_dtype: Dtype = "bfloat16"
    kv_scales: Literal["per_head", "per_tensor"] = "per_head"
    state_dtype: Dtype = "float32"
    conv_dtype: Dtype = "bfloat16"
    conv_columns: Literal["K-1", "K"] = "K-1"
    tp_size: PositiveInt = 1
    draft_layers: Annotated[int, Field(ge=0, le=64)] = 0
    max_source_tokens: PositiveInt | None = None


DEFAULT_OPTIONS = CacheOptions()


def apply_options(spec: ModelSpec, options: CacheOptions) -> ModelSpec:
    """Return what one rank keeps of `spec` under `options`; an option at its default changes nothing.

    Raises: SpecError, which names the option and the layer, if heads or channels do not divide over the ranks;
        UnsupportedModel if a model without attention is asked for draft layers.
    """
    if options == DEFAULT_OPTIONS:
        return spec
    layers = tuple(
        LayerSpec(
            layer=layer.layer, caches=tuple(_apply_to_cache(layer.layer, cache, options) for cache in layer.caches)
        )
        for layer in spec.layers
    )
    return spec.with_layers(layers + _draft_layers(spec, layers, options.draft_layers))


def _apply_to_cache(layer: int, cache: LayerCache, options: CacheOptions) -> LayerCache:
    lifecycle = cache.lifecycle
    if isinstance(lifecycle, CrossAttention) and options.max_source_tokens is not None:
        lifecycle = CrossAttention(max_source_tokens=options.max_source_tokens)
    if isinstance(lifecycle, State):
        tensors = tuple(_store_state(tensor, options) for tensor in cache.tensors)
        if options.tp_size > 1:
            tensors = _shard_state(layer, lifecycle.family, tensors, options.tp_size)
    else:
        sharded = (_shard_heads(layer, tensor, options.tp_size) for tensor in cache.tensors)
        stored = [_store_tokens(tensor, options) for tensor in sharded]
        # K and V first, then their scales.
        tensors = tuple(tensor for at in range(3) for kept in stored for tensor in kept[at : at + 1])
    return LayerCache(lifecycle=lifecycle, tensors=tensors, shares_kv_with=cache.shares_kv_with)


def _store_tokens(tensor: CacheTensor, options: CacheOptions) -> list[CacheTensor]:
    """Return the tensor in the KV dtype; in 8 bits with its scales, its rotary elements apart in bfloat16."""
    dtype = options.kv_dtype
    if dtype == DEFAULT_OPTIONS.kv_dtype:
        return [tensor]
    if DTYPE_BYTES[dtype] > 1 or options.kv_scales == "per_tensor":
        return [tensor.model_copy(update={"dtype": dtype})]
    heads, dim = tensor.shape[0], prod(tensor.shape[1:])
    rotary = tensor.rotary_elements or 0
    num_scales = cdiv(dim - rotary, _SCALE_GROUP) if tensor.name in _REPLICATED else 1
    per_entry = tensor.tokens_per_entry
    stored = [
        CacheTensor(name=tensor.name, shape=(heads, dim - rotary), dtype=dtype, tokens_per_entry=per_entry),
        CacheTensor(
            name=f"{tensor.name}_scale", shape=(heads, num_scales), dtype="float32", tokens_per_entry=per_entry
        ),
    ]
    if rotary:
        stored.append(
            CacheTensor(
                name=f"{tensor.name}_rotary", shape=(heads, rotary), dtype="bfloat16", tokens_per_entry=per_entry
            )
        )
    return stored


def _shard_heads(layer: int, tensor: CacheTensor, num_ranks: int) -> CacheTensor:
    heads, *rest = tensor.shape
    if num_ranks == 1 or tensor.name in _REPLICATED:
        return tensor
    heads = _divided_or_repeated(f"KV heads of layer {layer}", heads, num_ranks)
    return tensor.model_copy(update={"shape": (heads, *rest)})


def _divided_or_repeated(what: str, size: int, num_ranks: int) -> int:
    """Return one rank's part of `size` things, one of them where there are fewer than ranks."""
    if size % num_ranks and num_ranks % size:
        raise SpecError(
            f"tp_size: got {num_ranks}, must divide the {size} {what} or be a multiple of them; use one that does"
        )
    return max(1, size // num_ranks)


def _store_state(tensor: CacheTensor, options: CacheOptions) -> CacheTensor:
    is_conv = tensor.name == "conv"
    dtype, default = (
        (options.conv_dtype, DEFAULT_OPTIONS.conv_dtype)
        if is_conv
        else (options.state_dtype, DEFAULT_OPTIONS.state_dtype)
    )
    update: dict[str, object] = {} if dtype == default else {"dtype": dtype}
    if is_conv and options.conv_columns == "K":
        *channels, columns = tensor.shape
        update["shape"] = (*channels, columns + 1)
    return tensor.model_copy(update=update)


def _shard_state(
    layer: int, family: StateFamily, tensors: tuple[CacheTensor, ...], num_ranks: int
) -> tuple[CacheTensor, ...]:
    """Divide heads or channels, the first dimension of every state tensor, over the ranks.

    A convolution beside heads runs over several things at once: for Mamba-2 over the heads' channels and two vectors a
    group (groups fewer than ranks are replicated), for a gated delta net over value heads and, twice, key heads.
    """
    by_name = {tensor.name: tensor for tensor in tensors}

    def part(what: str, size: int) -> int:
        if size % num_ranks:
            raise SpecError(
                f"tp_size: got {num_ranks}, must divide the {size} {what} of layer {layer} ({family}); use a divisor"
            )
        return size // num_ranks

    sharded = []
    for tensor in tensors:
        size, *rest = tensor.shape
        if tensor.name == "conv" and family == "mamba2":
            heads, head_dim, state_size = by_name["ssm"].shape
            num_groups = (size - heads * head_dim) // (2 * state_size)
            groups = _divided_or_repeated(f"Mamba groups of layer {layer}", num_groups, num_ranks)
            size = part("heads", heads) * head_dim + 2 * groups * state_size
        elif tensor.name == "conv" and family == "gated_delta_net":
            heads, value_dim, key_dim = by_name["recurrent"].shape
            key_heads = (size - heads * value_dim) // (2 * key_dim)
            size = part("value heads", heads) * value_dim + 2 * part("key heads", key_heads) * key_dim
        else:
            size = part("channels" if tensor.name == "conv" or len(rest) < 2 else "heads", size)
        sharded.append(tensor.model_copy(update={"shape": (size, *rest)}))
    return tuple(sharded)


def _draft_layers(spec: ModelSpec, layers: tuple[LayerSpec, ...], num_draft: int) -> tuple[LayerSpec, ...]:
    """Return draft layers, numbered on after the model's, with the caches of its last attention layer."""
    if not num_draft:
        return ()
    attention = [
        [cache for cache in layer.caches if cache.tensors and cache.lifecycle.kind not in ("state", "cross_attention")]
        for layer in layers
    ]
    caches = next((tuple(own) for own in reversed(attention) if own), None)
    if caches is None:
        raise UnsupportedModel(
            f"draft_layers: got {num_draft}, but {spec.model_type!r} has no attention layer whose caches a draft could "
            "repeat; use 0"
        )
    return tuple(LayerSpec(layer=len(layers) + draft, caches=caches) for draft in range(num_draft))
