"""Families with multi-head latent attention in every layer, some with an indexer for sparse attention."""

from dataclasses import dataclass

from hybridkv.hf_config.attention import Decoder, layer_count, max_model_len, refuse_spans
from hybridkv.hf_config.caches import indexer_cache, mla_cache
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.hybrid import ATTENTION, listed_layers
from hybridkv.specs import LayerSpec

_PLAIN = ("full_attention", "attention")
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")


@dataclass(frozen=True)
class MlaDefaults:
    """What a family's config class assumes for a missing key."""

    num_hidden_layers: int
    max_position_embeddings: int
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64


AXK1 = MlaDefaults(num_hidden_layers=61, max_position_embeddings=32768)
DEEPSEEK_V2 = MlaDefaults(num_hidden_layers=32, max_position_embeddings=2048)
DEEPSEEK_V3 = MlaDefaults(num_hidden_layers=61, max_position_embeddings=4096)
DEEPSEEK_V32 = MlaDefaults(num_hidden_layers=61, max_position_embeddings=163840)
GLM4_MOE_LITE = MlaDefaults(num_hidden_layers=47, max_position_embeddings=202752)
MISTRAL4 = MlaDefaults(num_hidden_layers=36, max_position_embeddings=1048576, kv_lora_rank=256)
MINICPM3 = MlaDefaults(num_hidden_layers=62, max_position_embeddings=32768, kv_lora_rank=256, qk_rope_head_dim=32)
YOUTU = MlaDefaults(num_hidden_layers=32, max_position_embeddings=131072)


def axk1(fields: ConfigFields) -> Decoder:
    """A.X K1: a latent in every layer."""
    return _mla(fields, AXK1)


def deepseek_v2(fields: ConfigFields) -> Decoder:
    """DeepSeek-V2: a latent in every layer."""
    return _mla(fields, DEEPSEEK_V2)


def deepseek_v3(fields: ConfigFields) -> Decoder:
    """DeepSeek-V3, Kimi K2: a latent in every layer; head counts say nothing about it."""
    return _mla(fields, DEEPSEEK_V3)


def deepseek_v32(fields: ConfigFields) -> Decoder:
    """DeepSeek-V3.2: V3 with an indexer in every layer unless `index_topk` is null."""
    top_k = fields.optional_integer("index_topk", 2048, null_means="attention to every token")
    return _mla(fields, DEEPSEEK_V32, has_indexer=top_k is not None)


def glm4_moe_lite(fields: ConfigFields) -> Decoder:
    """GLM-4.7-Flash: a latent in every layer."""
    return _mla(fields, GLM4_MOE_LITE)


def mistral4(fields: ConfigFields) -> Decoder:
    """Mistral 4: a latent of 256 by default."""
    return _mla(fields, MISTRAL4)


def minicpm3(fields: ConfigFields) -> Decoder:
    """MiniCPM3: a latent of 256 with a rotary part of 32 by default."""
    return _mla(fields, MINICPM3)


def youtu(fields: ConfigFields) -> Decoder:
    """Youtu-LLM: a latent in every layer."""
    return _mla(fields, YOUTU)


def _mla(fields: ConfigFields, defaults: MlaDefaults, *, has_indexer: bool = False) -> Decoder:
    refuse_spans(fields)
    count = layer_count(fields, "num_hidden_layers", defaults.num_hidden_layers)
    latent = fields.integer("kv_lora_rank", defaults.kv_lora_rank)
    caches = [mla_cache(latent, fields.integer("qk_rope_head_dim", defaults.qk_rope_head_dim))]
    if has_indexer:
        caches.append(indexer_cache(fields.integer("index_head_dim", 128)))
    elif fields.raw("index_topk") is not None:
        raise fields.error("index_topk", "this family has no indexer", "set it to null, or correct model_type")
    # all layers are alike: the list is read to refuse one that says otherwise
    listed_layers(fields, "layer_types", dict.fromkeys(_INDEXED if has_indexer else _PLAIN, ATTENTION), count)
    layers = tuple(LayerSpec(layer=layer, caches=tuple(caches)) for layer in range(count))
    return Decoder(max_model_len(fields, defaults.max_position_embeddings), layers)
