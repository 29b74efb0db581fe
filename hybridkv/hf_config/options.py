"""Choices of the caller that a config.json does not make."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from hybridkv.spec_base import Frozen
from hybridkv.specs import Dtype, PositiveInt


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
