"""The families with a reader, by model_type."""

from collections.abc import Callable, Mapping

from hybridkv.errors import UnsupportedModel
from hybridkv.hf_config.attention import Decoder
from hybridkv.hf_config.exaone import exaone4
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.gemma import gemma2, gemma3_text
from hybridkv.hf_config.llama import hunyuan_v1_dense, llama, minimax_m2
from hybridkv.hf_config.mistral import ministral, ministral3, mistral, mixtral, phi3, starcoder2
from hybridkv.hf_config.options import CacheOptions
from hybridkv.hf_config.periodic import cohere2, cwm, gpt_oss, granite_swa, olmo3
from hybridkv.hf_config.qwen import dots1, qwen2, qwen2_moe, qwen3, qwen3_moe
from hybridkv.hf_config.smollm import smollm3
from hybridkv.spec_base import short_repr

FamilyReader = Callable[[ConfigFields, CacheOptions], Decoder]

FAMILIES: dict[str, FamilyReader] = {
    "cohere2": cohere2,
    "cwm": cwm,
    "dots1": dots1,
    "exaone4": exaone4,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "gpt_oss": gpt_oss,
    "granite_swa": granite_swa,
    "hunyuan_v1_dense": hunyuan_v1_dense,
    "llama": llama,
    "minimax_m2": minimax_m2,
    "ministral": ministral,
    "ministral3": ministral3,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmo3": olmo3,
    "phi3": phi3,
    "phimoe": mixtral,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "smollm3": smollm3,
    "starcoder2": starcoder2,
    "vaultgemma": gemma2,
}

# multimodal model_type -> model_type of its text_config where that names none
WRAPPERS = {"gemma3": "gemma3_text", "mistral3": "mistral"}

# what decides caches in one family or another: shown when a model has no reader
_TELLING = (
    "attention_chunk_size",
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_configs",
    "block_types",
    "conv_L_cache",
    "full_attention_interval",
    "head_dim",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "index_topk",
    "is_encoder_decoder",
    "kv_lora_rank",
    "layer_types",
    "layers_block_type",
    "linear_attn_config",
    "mamba_d_state",
    "no_rope_layers",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_kv_shared_layers",
    "per_layer_config",
    "sliding_window",
    "sliding_window_pattern",
    "ssm_state_size",
    "state_size",
    "text_config",
    "use_cla",
)


def find_family(config: ConfigFields) -> tuple[str, FamilyReader, ConfigFields]:
    """Return the text part's model_type, its reader, its fields.

    A `mistral` with `layer_types` is a `ministral`, as for transformers' AutoConfig: saved again, it says so.

    Raises: UnsupportedModel if no reader is registered; nothing is guessed from other fields.
    """
    model_type = config.text("model_type")
    fields = config
    if model_type in WRAPPERS:
        fields = config.child("text_config")
        model_type = fields.text("model_type", WRAPPERS[model_type])
    if model_type == "mistral" and fields.has("layer_types"):
        model_type = "ministral"
    if model_type not in FAMILIES:
        raise _unsupported(fields, model_type)
    return model_type, FAMILIES[model_type], fields


def _unsupported(fields: ConfigFields, model_type: str) -> UnsupportedModel:
    known = ", ".join(sorted(FAMILIES | WRAPPERS))
    seen = ", ".join(f"{name}={short_repr(fields.raw(name), 40)}" for name in _TELLING if fields.has(name)) or "none"
    nested = fields.raw("text_config")
    inner = nested.get("model_type") if isinstance(nested, Mapping) else None
    readable = isinstance(inner, str) and inner in FAMILIES
    fix = f"pass its text_config alone ({inner!r} has a reader)" if readable else "write its ModelSpec by hand"
    return UnsupportedModel(
        f"{fields.where}model_type: got {short_repr(model_type)}, which has no reader; {fix}; known: {known}; "
        f"fields that decide caches, seen here: {seen}"
    )
