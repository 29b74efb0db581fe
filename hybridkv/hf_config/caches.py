"""Layer caches from sizes and options: one builder for each thing a layer can keep.

A size is a whole model's; the builder divides it over `options.tp_size` ranks.
"""

from hybridkv.errors import SpecError
from hybridkv.hf_config.options import CacheOptions
from hybridkv.specs import (
    DTYPE_BYTES,
    CacheTensor,
    Dtype,
    FullAttention,
    LayerCache,
    Lifecycle,
    State,
    StateFamily,
)

_SCALE_GROUP = 128  # elements of a latent or an indexer key that share one float32 scale


def kv_cache(
    lifecycle: Lifecycle, num_kv_heads: int, head_dim: int, options: CacheOptions, *, v_head_dim: int | None = None
) -> LayerCache:
    """Return K `[num_kv_heads, head_dim]` and V `[num_kv_heads, v_head_dim]`, with scales if they are 8 bits wide.

    Raises: SpecError if the heads neither divide over the ranks nor repeat evenly.
    """
    heads = _kv_heads_of_rank(num_kv_heads, options)
    tensors = [
        CacheTensor(name="k", shape=(heads, head_dim), dtype=options.kv_dtype),
        CacheTensor(name="v", shape=(heads, v_head_dim or head_dim), dtype=options.kv_dtype),
    ]
    if _has_scales(options):
        tensors += [CacheTensor(name=f"{name}_scale", shape=(heads, 1), dtype="float32") for name in ("k", "v")]
    return LayerCache(lifecycle=lifecycle, tensors=tuple(tensors))


def mla_cache(kv_lora_rank: int, qk_rope_head_dim: int, options: CacheOptions) -> LayerCache:
    """Return the latent of multi-head latent attention, `[1, kv_lora_rank + qk_rope_head_dim]`, on every rank.

    In 8 bits only the compressed part is quantised; the rotary part stays bfloat16.
    """
    if not _has_scales(options):
        latent = CacheTensor(name="latent", shape=(1, kv_lora_rank + qk_rope_head_dim), dtype=options.kv_dtype)
        return LayerCache(lifecycle=FullAttention(), tensors=(latent,))
    return LayerCache(
        lifecycle=FullAttention(),
        tensors=(
            CacheTensor(name="latent", shape=(1, kv_lora_rank), dtype=options.kv_dtype),
            CacheTensor(name="latent_scale", shape=(1, -(-kv_lora_rank // _SCALE_GROUP)), dtype="float32"),
            CacheTensor(name="rope", shape=(1, qk_rope_head_dim), dtype="bfloat16"),
        ),
    )


def indexer_cache(index_head_dim: int, options: CacheOptions) -> LayerCache:
    """Return the keys of a sparse-attention indexer, `[1, index_head_dim]`, on every rank."""
    tensors = [CacheTensor(name="index_k", shape=(1, index_head_dim), dtype=options.kv_dtype)]
    if _has_scales(options):
        scales = -(-index_head_dim // _SCALE_GROUP)
        tensors.append(CacheTensor(name="index_k_scale", shape=(1, scales), dtype="float32"))
    return LayerCache(lifecycle=FullAttention(), tensors=tuple(tensors))


def state_cache(family: StateFamily, options: CacheOptions, **shapes: tuple[int, ...]) -> LayerCache:
    """Return a state whose tensors are named by keyword, in that order; the shapes are one rank's.

    A tensor named `conv` takes the convolution's dtype, any other the recurrent state's.
    """

    def dtype(name: str) -> Dtype:
        return options.conv_dtype if name == "conv" else options.state_dtype

    tensors = tuple(
        CacheTensor(name=name, kind="per_sequence", shape=shape, dtype=dtype(name)) for name, shape in shapes.items()
    )
    return LayerCache(lifecycle=State(family=family), tensors=tensors)


def conv_columns(kernel_size: int, options: CacheOptions) -> int:
    """Return the columns a causal convolution of `kernel_size` taps keeps."""
    return kernel_size if options.conv_columns == "K" else kernel_size - 1


def sharded(name: str, size: int, options: CacheOptions) -> int:
    """Return one rank's part of `size` heads or channels.

    Raises: SpecError if the ranks do not divide it.
    """
    if size % options.tp_size:
        raise SpecError(f"tp_size: got {options.tp_size}, must divide {name} {size}; use a divisor of it")
    return size // options.tp_size


def _has_scales(options: CacheOptions) -> bool:
    return DTYPE_BYTES[options.kv_dtype] == 1 and options.kv_scales == "per_head"


def _kv_heads_of_rank(num_kv_heads: int, options: CacheOptions) -> int:
    ranks = options.tp_size
    if num_kv_heads % ranks == 0:
        return num_kv_heads // ranks
    if ranks % num_kv_heads == 0:
        return 1
    raise SpecError(
        f"tp_size: got {ranks}, must divide the {num_kv_heads} KV heads or be a multiple of them; use one that does"
    )
