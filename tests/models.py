"""Small model specs, plans and snapshots for tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from hybridkv.change_log import DirtySpans
from hybridkv.limits import BatchLimits
from hybridkv.plan import CachePlan
from hybridkv.planner import plan_cache
from hybridkv.specs import (
    CacheTensor,
    ChunkedAttention,
    CrossAttention,
    Dtype,
    FullAttention,
    LayerCache,
    LayerSpec,
    Lifecycle,
    ModelSpec,
    SlidingWindow,
    State,
)
from hybridkv.table_arrays import TableArrays

FULL = FullAttention()


def kv_cache(lifecycle: Lifecycle, num_heads: int = 1, head_dim: int = 8, dtype: Dtype = "float32") -> LayerCache:
    """Keys and values of one attention layer."""
    tensors = tuple(CacheTensor(name=name, shape=(num_heads, head_dim), dtype=dtype) for name in ("k", "v"))
    return LayerCache(lifecycle=lifecycle, tensors=tensors)


def state_cache(conv_dtype: Dtype = "bfloat16") -> LayerCache:
    """A Mamba-like state: a convolution tail and a matrix of another dtype."""
    return LayerCache(
        lifecycle=State(family="mamba2"),
        tensors=(
            CacheTensor(name="conv", kind="per_sequence", shape=(6, 3), dtype=conv_dtype),
            CacheTensor(name="ssm", kind="per_sequence", shape=(2, 4, 4), dtype="float32"),
        ),
    )


def model(*caches: LayerCache | Iterable[LayerCache], max_model_len: int | None = None) -> ModelSpec:
    """A model with one layer per argument: a cache, or the layer's several caches."""
    layers = [
        LayerSpec(layer=layer, caches=(cache,) if isinstance(cache, LayerCache) else tuple(cache))
        for layer, cache in enumerate(caches)
    ]
    return ModelSpec(name="tiny", model_type="test", max_model_len=max_model_len, layers=tuple(layers))


def gemma_like(
    num_sliding: int = 3, num_full: int = 1, window: int = 8, num_heads: int = 1, head_dim: int = 8
) -> ModelSpec:
    """Two groups: sliding window layers (group 0), then full attention layers (group 1)."""
    sliding = [kv_cache(SlidingWindow(window=window), num_heads, head_dim)] * num_sliding
    return model(*sliding, *[kv_cache(FULL, num_heads, head_dim)] * num_full)


def gemma_3_270m() -> ModelSpec:
    """Fifteen layers with a window of 512 and three full ones, one KV head of 256 floats each."""
    sliding, full = kv_cache(SlidingWindow(window=512), 1, 256), kv_cache(FULL, 1, 256)
    return model(*([sliding] * 5 + [full]) * 3)


def chunked_and_full(chunk: int = 8) -> ModelSpec:
    """Two groups: chunked attention (group 0) and full attention (group 1)."""
    return model(kv_cache(ChunkedAttention(chunk=chunk)), kv_cache(FULL))


def state_and_attention() -> ModelSpec:
    """Two groups: a state beside attention in layer 0, a state in layer 1, no cache in layer 2."""
    return model([state_cache(), kv_cache(FULL)], state_cache(), [])


def encoder_decoder(max_source_tokens: int = 10) -> ModelSpec:
    """Two groups: cross attention (group 0) and the decoder's own full attention (group 1)."""
    return model([kv_cache(CrossAttention(max_source_tokens=max_source_tokens)), kv_cache(FULL)])


def mixed_dtypes() -> ModelSpec:
    """Two groups whose tensors have 1, 2 and 4 byte elements and odd sizes."""
    odd = LayerCache(
        lifecycle=FULL,
        tensors=(
            CacheTensor(name="k", shape=(1, 3), dtype="int8"),
            CacheTensor(name="v", shape=(3, 5), dtype="float32"),
            CacheTensor(name="scale", shape=(1,), dtype="bfloat16"),
        ),
    )
    return model(odd, kv_cache(SlidingWindow(window=5), 2, 3, "float16"), odd)


def limits(max_num_seqs: int = 4, max_model_len: int = 64, max_num_batched_tokens: int = 8) -> BatchLimits:
    """Limits of a small batch."""
    return BatchLimits(max_num_seqs, max_model_len, max_num_batched_tokens)


def plan_slabs(
    spec: ModelSpec,
    num_usable_slabs: int,
    batch_limits: BatchLimits | None = None,
    block_size: int | Mapping[int, int] = 4,
) -> CachePlan:
    """Plan a model in exactly `num_usable_slabs` slabs beside the reserved one."""
    batch_limits = batch_limits or limits()
    slab_bytes = plan_cache(spec, 2**30, batch_limits, block_size=block_size).slab_bytes
    return plan_cache(spec, (num_usable_slabs + 1) * slab_bytes, batch_limits, block_size=block_size)


def copy_dirty(arrays: TableArrays, mirror: NDArray[np.int32]) -> int:
    """Bring a mirror on the host up to date; return the words that took."""
    return arrays.copy_dirty(mirror, arrays.views(mirror))


def apply_spans(arrays: TableArrays, spans: DirtySpans, mirror: NDArray[np.int32]) -> None:
    """Bring a mirror up to date from what travels alone: each span's payload, then nulls, and its row's live range."""
    ends = spans.num_payload.cumsum()
    payloads = np.split(arrays.words[spans.source], ends[:-1])
    for pair, low, num_words, payload in zip(spans.pairs, spans.low, spans.num_words, payloads, strict=False):
        group, row = divmod(int(pair), arrays.num_rows)
        begin = arrays.offsets[group] + row * arrays.strides[group] + low
        mirror[begin : begin + num_words] = 0
        mirror[begin : begin + len(payload)] = payload
        for offset in (arrays.first_offset, arrays.count_offset):
            mirror[offset + pair] = arrays.words[offset + pair]
