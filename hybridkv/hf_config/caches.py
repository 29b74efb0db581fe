"""Layer caches from sizes: one builder for each thing a layer of tokens can keep.

All in the default policy: K, V, latents and indexer keys in bfloat16. `hybridkv.options` changes that afterwards.
"""

from hybridkv.specs import CacheTensor, FullAttention, LayerCache, Lifecycle


def kv_cache(lifecycle: Lifecycle, num_kv_heads: int, head_dim: int, *, v_head_dim: int | None = None) -> LayerCache:
    """Return K `[num_kv_heads, head_dim]` and V `[num_kv_heads, v_head_dim]`."""
    return LayerCache(
        lifecycle=lifecycle,
        tensors=(
            CacheTensor(name="k", shape=(num_kv_heads, head_dim), dtype="bfloat16"),
            CacheTensor(name="v", shape=(num_kv_heads, v_head_dim or head_dim), dtype="bfloat16"),
        ),
    )


def mla_cache(kv_lora_rank: int, qk_rope_head_dim: int) -> LayerCache:
    """Return the latent of multi-head latent attention, `[1, kv_lora_rank + qk_rope_head_dim]`."""
    latent = CacheTensor(
        name="latent",
        shape=(1, kv_lora_rank + qk_rope_head_dim),
        dtype="bfloat16",
        rotary_elements=qk_rope_head_dim,
    )
    return LayerCache(lifecycle=FullAttention(), tensors=(latent,))


def indexer_cache(index_head_dim: int) -> LayerCache:
    """Return the keys of a sparse-attention indexer, `[1, index_head_dim]`."""
    keys = CacheTensor(name="index_k", shape=(1, index_head_dim), dtype="bfloat16")
    return LayerCache(lifecycle=FullAttention(), tensors=(keys,))
