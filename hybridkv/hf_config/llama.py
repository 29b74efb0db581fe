"""Families whose layers are all full attention.

Their config classes read neither a window nor a list of layer types.
"""

from hybridkv.errors import UnsupportedModel
from hybridkv.hf_config.attention import Decoder, Defaults, decoder
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.options import CacheOptions

LLAMA = Defaults(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    max_position_embeddings=2048,
)
MINIMAX_M2 = Defaults(
    hidden_size=3072,
    num_hidden_layers=62,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=196608,
    null_derives=frozenset(),
)


def llama(fields: ConfigFields, options: CacheOptions) -> Decoder:
    """Llama: all full, as many KV heads as query heads by default."""
    return _all_full(fields, options, LLAMA)


def minimax_m2(fields: ConfigFields, options: CacheOptions) -> Decoder:
    """MiniMax-M2: all full; `attn_type_list` is a leftover of its predecessor."""
    return _all_full(fields, options, MINIMAX_M2)


def hunyuan_v1_dense(fields: ConfigFields, options: CacheOptions) -> Decoder:
    """Hunyuan dense: all full; `cla_share_factor` is inert unless `use_cla`."""
    if fields.raw("use_cla") not in (None, False):
        raise UnsupportedModel(
            str(fields.error("use_cla", "no reader for caches shared across layers in this family", "set it to false"))
        )
    return _all_full(fields, options, LLAMA)


def _all_full(fields: ConfigFields, options: CacheOptions, defaults: Defaults) -> Decoder:
    for name in ("sliding_window", "attention_chunk_size"):
        if fields.raw(name) is not None:
            raise fields.error(name, "this family attends to every token", "set it to null, or correct model_type")
    return decoder(fields, options, defaults, window_tokens=None, kinds=None)
