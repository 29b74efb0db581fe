"""Families whose layers are all full attention.

Their config classes read neither a window nor a list of layer types.
"""

from collections.abc import Callable

from hybridkv.errors import UnsupportedModel
from hybridkv.hf_config.attention import Decoder, Defaults, decoder, refuse_spans
from hybridkv.hf_config.fields import ConfigFields

_NOTHING: frozenset[str] = frozenset()
_HEAD_DIM = frozenset({"head_dim"})
_KV_HEADS = frozenset({"num_key_value_heads"})

# hidden_size, layers, heads, KV heads, longest context, head_dim unless None
_LLAMA = Defaults(4096, 32, 32, None, 2048)
_BY_MODEL_TYPE = {
    "apertus": Defaults(4096, 32, 32, None, 65536),
    "arcee": Defaults(2560, 32, 32, None, 4096),
    "bitnet": Defaults(2560, 30, 20, 5, 2048),
    "cohere": Defaults(8192, 40, 64, None, 8192),
    "ernie4_5": Defaults(1024, 18, 16, 2, 131072, 128),
    "ernie4_5_moe": Defaults(2560, 28, 20, 4, 131072),
    "flex_olmo": Defaults(4096, 32, 32, None, 4096),
    "gemma": Defaults(3072, 28, 16, 16, 8192, 256, null_derives=_NOTHING),
    "glm": Defaults(4096, 40, 32, 2, 131072, 128),
    "glm4": Defaults(4096, 40, 32, 2, 131072, 128, null_derives=_NOTHING),
    "granite": _LLAMA,
    "granitemoe": _LLAMA,
    "helium": Defaults(2560, 24, 20, 20, 4096, 128, null_derives=_NOTHING),
    "hunyuan_v1_dense": _LLAMA,
    "hunyuan_v1_moe": _LLAMA,
    "llama": _LLAMA,
    # `attn_type_list` is a leftover of its predecessor
    "minimax_m2": Defaults(3072, 62, 48, 8, 196608, 128, null_derives=_NOTHING),
    "nanochat": Defaults(768, 12, 6, None, 2048),
    "nemotron": Defaults(6144, 32, 48, None, 4096),
    "olmo": _LLAMA,
    "olmo2": _LLAMA,
    "olmoe": Defaults(2048, 16, 16, None, 4096),
    "phi": Defaults(2048, 24, 32, None, 2048),
    "qwen3_vl_moe_text": Defaults(2048, 24, 16, 16, 128000, null_derives=_HEAD_DIM),
    "qwen3_vl_text": Defaults(4096, 32, 32, 32, 128000, 128, null_derives=_KV_HEADS),
    "seed_oss": Defaults(4096, 64, 80, 8, 524288, 128),
    "solar_open": Defaults(4096, 48, 64, 8, 131072, 128, null_derives=_NOTHING),
    "stablelm": Defaults(2560, 32, 32, 32, 4096, null_derives=_HEAD_DIM),
}


def _reader(defaults: Defaults) -> Callable[[ConfigFields], Decoder]:
    def read(fields: ConfigFields) -> Decoder:
        refuse_spans(fields)
        # in some releases of Hunyuan layers share caches; the config classes here do not read the field
        if fields.raw("use_cla") not in (None, False):
            problem = fields.error("use_cla", "no reader for caches shared across layers here", "set it to false")
            raise UnsupportedModel(str(problem))
        return decoder(fields, defaults, window_tokens=None, kinds=None)

    return read


ALL_FULL = {model_type: _reader(defaults) for model_type, defaults in _BY_MODEL_TYPE.items()}
