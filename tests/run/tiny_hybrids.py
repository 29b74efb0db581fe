"""Configs of tiny models whose layers keep more than plain keys and values, those that cannot be run included."""

from hybridkv.runner.tiny_configs import ATTENTION_ONLY, TINY_CONFIGS
from tests.config_cases import Config

SOURCE_TOKENS = 6  # of the tiny models with an encoder
SOURCE_FROM_CALLER = ("mllama", "mllama_text_model", "t5")  # their configs do not say how long a source is
_BASE = TINY_CONFIGS["llama"]
_GDN_HEADS = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")


def _without_gaps(config: Config) -> Config:
    """Return a config without the fields set to `...`."""
    return {key: value for key, value in config.items() if value is not ...}


_FAMILIES: dict[str, Config] = {
    **{family: config for family, config in TINY_CONFIGS.items() if family not in ATTENTION_ONLY and "-" not in family},
    "deepseek_v32": TINY_CONFIGS["deepseek_v3"]
    | {"model_type": "deepseek_v32", "index_head_dim": 12, "index_n_heads": 4, "index_topk": 64},
    "whisper": {
        "model_type": "whisper",
        "vocab_size": 32,
        "num_mel_bins": 8,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "max_source_positions": SOURCE_TOKENS,
        "max_target_positions": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "begin_suppress_tokens": [],
    },
    "t5": {
        "model_type": "t5",
        "vocab_size": 32,
        "d_model": 64,
        "d_kv": 24,
        "d_ff": 96,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    "mllama_text_model": _BASE
    | {
        "model_type": "mllama_text_model",
        "cross_attention_layers": [1, 4],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
}


_VARIANTS: dict[str, dict[str, Config]] = {
    "deepseek_v3": {"other latent": {"kv_lora_rank": 40, "qk_rope_head_dim": 12}},
    "falcon_h1": {"width from expand": {"mamba_d_ssm": None, "mamba_d_head": "auto", "head_dim": ...}},
    "gemma4_text": {
        "period": {"sliding_window_pattern": 3},
        "last layer forced": {"layer_types": ["full_attention", "sliding_attention"] * 3},
        "looks both ways": {"use_bidirectional_attention": "all"},
        "override": {"per_layer_config": {"5": {"head_dim": 48}}},
    },
    "granitemoehybrid": {"derived": {"mamba_d_head": "auto", "num_key_value_heads": None}},
    "jamba": {"period": {"attn_layer_period": 4, "attn_layer_offset": 0}},
    "kimi_linear": {
        "new fields": {
            "linear_attn_config": ...,
            "linear_num_heads": 2,
            "linear_head_dim": 12,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["linear_attention", "full_attention"] * 3,
        },
    },
    "lfm2": {"types": {"full_attn_idxs": ..., "layer_types": ["conv", "full_attention"] * 3}},
    "llama4_text": {
        "marks": {"no_rope_layers": [0, 1, 1, 0, 1, 1]},
        "interval": {"no_rope_layer_interval": 2},
        "types": {"layer_types": ["full_attention", "chunked_attention"] * 3},
    },
    "mamba": {"width": {"intermediate_size": 160}},
    "mimo_v2_flash": {
        "window": {"sliding_window_size": ..., "sliding_window": 6},
        "types": {"hybrid_layer_pattern": ..., "layer_types": ["sliding_attention", "full_attention"] * 3},
    },
    "minimax": {"defaults": {"layer_types": ..., "head_dim": None}},
    "nemotron_h": {
        "types": {
            "hybrid_override_pattern": ...,
            "layers_block_type": ["mamba", "mlp", "attention", "moe", "mamba", "attention"],
        },
        "old names": {"mamba_n_groups": 4, "mamba_d_conv": 3},
    },
    "olmo_hybrid": {
        "defaults": {"num_key_value_heads": None, "layer_types": ..., **dict.fromkeys(_GDN_HEADS)},
        "fewer values": {"linear_num_value_heads": 2},
    },
    "qwen3_5_text": {"interval": {"layer_types": ..., "full_attention_interval": 2}},
    "recurrent_gemma": {
        "wide": {"lru_width": 80},
        "types": {"block_types": ["attention", "recurrent"], "num_key_value_heads": None},
    },
    "t5": {"as deep as the encoder": {"num_decoder_layers": None}},
    "whisper": {"longer source": {"max_source_positions": 9}},
    "zamba": {
        "period": {"layers_block_type": ..., "num_hidden_layers": 9},
        "heads": {"n_mamba_heads": 4, "attention_head_dim": 24},
    },
    "zamba2": {"heads": {"n_mamba_heads": 4, "num_key_value_heads": None}},
}
CASES: dict[str, Config] = {
    **_FAMILIES,
    **{name.replace("-", " "): config for name, config in TINY_CONFIGS.items() if "-" in name},
} | {
    f"{family} {name}": _without_gaps(_FAMILIES[family] | variant)
    for family, variants in _VARIANTS.items()
    for name, variant in variants.items()
}
