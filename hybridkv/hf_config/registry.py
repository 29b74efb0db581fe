"""The families with a reader, by model_type."""

from collections.abc import Callable

from hybridkv.hf_config.attention import Decoder
from hybridkv.hf_config.bamba import bamba, falcon_h1, granitemoehybrid
from hybridkv.hf_config.encoder_decoder import mllama_text, t5, whisper
from hybridkv.hf_config.exaone import exaone4
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.gated_delta import olmo_hybrid, qwen3_5_moe_text, qwen3_5_text, qwen3_next
from hybridkv.hf_config.gemma import gemma2, gemma3_text
from hybridkv.hf_config.gemma_shared import gemma3n_text, gemma4_text, gemma4_unified_text
from hybridkv.hf_config.generic import generic
from hybridkv.hf_config.hunyuan import hunyuan
from hybridkv.hf_config.jamba import jamba
from hybridkv.hf_config.kimi_linear import kimi_linear
from hybridkv.hf_config.lfm2 import lfm2, lfm2_moe
from hybridkv.hf_config.llama import ALL_FULL
from hybridkv.hf_config.llama4 import llama4_text
from hybridkv.hf_config.mamba import mamba, mamba2
from hybridkv.hf_config.mimo import mimo_v2_flash
from hybridkv.hf_config.minimax import minimax, minimax_text_01
from hybridkv.hf_config.mistral import ministral, ministral3, mistral, mixtral, phi3, starcoder2
from hybridkv.hf_config.mla import (
    axk1,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    glm4_moe_lite,
    minicpm3,
    mistral4,
    youtu,
)
from hybridkv.hf_config.nemotron_h import nemotron_h
from hybridkv.hf_config.nemotron_nas import nemotron_nas
from hybridkv.hf_config.periodic import cohere2, cwm, gpt_oss, granite_swa, olmo3
from hybridkv.hf_config.qwen import dots1, qwen2, qwen2_moe, qwen2_vl_text, qwen3, qwen3_moe
from hybridkv.hf_config.recurrent_gemma import recurrent_gemma
from hybridkv.hf_config.smollm import smollm3
from hybridkv.hf_config.zamba import zamba, zamba2

FamilyReader = Callable[[ConfigFields], Decoder]

FAMILIES: dict[str, FamilyReader] = {
    **ALL_FULL,
    "axk1": axk1,
    "bamba": bamba,
    "cohere2": cohere2,
    "cwm": cwm,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "dots1": dots1,
    "exaone4": exaone4,
    "falcon_h1": falcon_h1,
    "falcon_mamba": mamba,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "gemma3n_text": gemma3n_text,
    "gemma4_text": gemma4_text,
    "gemma4_unified_text": gemma4_unified_text,
    "glm4_moe_lite": glm4_moe_lite,
    "gpt_oss": gpt_oss,
    "granite_swa": granite_swa,
    "granitemoehybrid": granitemoehybrid,
    "hunyuan": hunyuan,
    "jamba": jamba,
    "kimi_k2": deepseek_v3,
    "kimi_linear": kimi_linear,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "llama4_text": llama4_text,
    "mamba": mamba,
    "mamba2": mamba2,
    "mimo_v2_flash": mimo_v2_flash,
    "minicpm3": minicpm3,
    "minimax": minimax,
    "minimax_text_01": minimax_text_01,
    "ministral": ministral,
    "ministral3": ministral3,
    "mistral": mistral,
    "mistral4": mistral4,
    "mixtral": mixtral,
    "mllama_text_model": mllama_text,
    "nemotron-nas": nemotron_nas,
    "nemotron_h": nemotron_h,
    "olmo3": olmo3,
    "olmo_hybrid": olmo_hybrid,
    "phi3": phi3,
    "phimoe": mixtral,
    "qwen2": qwen2,
    "qwen2_5_vl_text": qwen2_vl_text,
    "qwen2_moe": qwen2_moe,
    "qwen2_vl_text": qwen2_vl_text,
    "qwen3": qwen3,
    "qwen3_5_moe_text": qwen3_5_moe_text,
    "qwen3_5_text": qwen3_5_text,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "recurrent_gemma": recurrent_gemma,
    "smollm3": smollm3,
    "starcoder2": starcoder2,
    "t5": t5,
    "vaultgemma": gemma2,
    "whisper": whisper,
    "youtu": youtu,
    "zamba": zamba,
    "zamba2": zamba2,
}

# multimodal model_type -> model_type of its text_config where that names none
WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "mllama": "mllama_text_model",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
# their released configs have the text part's fields beside vision_config
_FLAT = ("qwen2_5_vl", "qwen2_vl")


def find_family(config: ConfigFields) -> tuple[str, FamilyReader, ConfigFields]:
    """Return the text part's model_type, its reader, its fields.

    A `mistral` with `layer_types` is a `ministral`, as for transformers' AutoConfig: saved again, it says so.
    The reader of an unregistered model_type is the generic one.

    Raises: SpecError for a multimodal config without its text part.
    """
    model_type = config.text("model_type")
    if model_type in _FLAT and not config.has("text_config"):
        return WRAPPERS[model_type], FAMILIES[WRAPPERS[model_type]], config
    fields = config
    if model_type in WRAPPERS:
        fields = config.child("text_config")
        model_type = fields.text("model_type", WRAPPERS[model_type])
    elif model_type not in FAMILIES and config.raw("text_config") is not None:
        fields = config.child("text_config")
        model_type = fields.text("model_type")
    if model_type in WRAPPERS:
        raise fields.error("model_type", "names a multimodal model inside another", "correct it")
    if model_type == "mistral" and fields.has("layer_types"):
        model_type = "ministral"
    return model_type, FAMILIES.get(model_type, generic), fields
