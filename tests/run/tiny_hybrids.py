"""Configs of tiny models of the families whose layers keep more than one kind of cache.

Sizes that a reader could confuse differ: KV heads from heads, head_dim from hidden_size / num_attention_heads, key from
value heads, convolution channels from the width of a state.
"""

from tests.config_cases import Config

WINDOW = 8
SOURCE_TOKENS = 6  # of the tiny models with an encoder
SOURCE_FROM_CALLER = ("mllama", "mllama_text_model", "t5")  # their configs do not say how long a source is
_BASE: Config = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_MLA: Config = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_EXPERTS: Config = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LOCAL_EXPERTS: Config = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GEMMA: Config = {
    "sliding_window": WINDOW,
    "head_dim": 24,
    "vocab_size_per_layer_input": 32,
    "hidden_size_per_layer_input": 16,
    "pad_token_id": 0,
}
_GEMMA3N: Config = {**_GEMMA, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 6}
_MAMBA1: Config = {"state_size": 12, "conv_kernel": 5, "time_step_rank": 8}
_MAMBA2_HEADS: Config = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12}
_MAMBA2: Config = {**_MAMBA2_HEADS, "mamba_d_conv": 5, "mamba_expand": 2, "mamba_chunk_size": 8}
_GDN_HEADS: Config = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_GDN: Config = {**_GDN_HEADS, "linear_conv_kernel_dim": 5}
_QWEN_EXPERTS: Config = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_LINEAR3 = ["linear_attention", "linear_attention", "full_attention"]
_CONV3 = ["conv", "conv", "full_attention"]
_SHARED = ["sliding_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"]


def _case(model_type: str, *parts: Config, **fields: object) -> Config:
    """Return one config; a field set to `...` is left out."""
    config: Config = {"model_type": model_type, **_BASE}
    for part in (*parts, fields):
        config |= part
    return _without_gaps(config)


def _without_gaps(config: Config) -> Config:
    return {key: value for key, value in config.items() if value is not ...}


_FAMILIES: dict[str, Config] = {
    "deepseek_v2": _case("deepseek_v2", _MLA, _EXPERTS),
    "deepseek_v3": _case("deepseek_v3", _MLA, _EXPERTS),
    "deepseek_v32": _case("deepseek_v32", _MLA, _EXPERTS, index_head_dim=12, index_n_heads=4, index_topk=64),
    "llama4_text": _case(
        "llama4_text", _LOCAL_EXPERTS, head_dim=24, intermediate_size_mlp=96, attention_chunk_size=WINDOW
    ),
    "gemma3n_text": _case("gemma3n_text", _GEMMA3N, num_kv_shared_layers=0),
    "gemma4_text": _case("gemma4_text", _GEMMA, global_head_dim=40, num_global_key_value_heads=1),
    "mimo_v2_flash": _case(
        "mimo_v2_flash",
        _EXPERTS,
        head_dim=24,
        v_head_dim=20,
        sliding_window_size=WINDOW,
        hybrid_layer_pattern=[0, 1, 1, 1, 1, 0],
        swa_num_key_value_heads=4,
        swa_head_dim=24,
        swa_v_head_dim=20,
    ),
    "mamba": _case("mamba", _MAMBA1, expand=3, intermediate_size=..., num_key_value_heads=...),
    "falcon_mamba": _case("falcon_mamba", _MAMBA1, expand=16, intermediate_size=160, num_key_value_heads=...),
    "mamba2": _case(
        "mamba2", num_heads=8, head_dim=24, expand=3, state_size=12, n_groups=2, conv_kernel=5, chunk_size=8
    ),
    "jamba": _case(
        "jamba",
        attn_layer_period=3,
        attn_layer_offset=1,
        num_experts=2,
        mamba_d_state=12,
        mamba_d_conv=5,
        mamba_expand=3,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "bamba": _case("bamba", _MAMBA2, attn_layer_indices=[2, 5], mamba_d_head="auto"),
    "zamba": _case(
        "zamba",
        layers_block_type=["mamba", "mamba", "hybrid"] * 2,
        num_key_value_heads=4,
        n_mamba_heads=2,
        mamba_d_state=12,
        mamba_d_conv=5,
        mamba_expand=3,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "zamba2": _case(
        "zamba2",
        layers_block_type=["mamba", "mamba", "hybrid"] * 2,
        num_key_value_heads=4,
        n_mamba_heads=8,
        mamba_ngroups=2,
        mamba_d_state=12,
        mamba_d_conv=5,
        mamba_expand=3,
        chunk_size=8,
        use_mamba_kernels=False,
        adapter_rank=8,
    ),
    "nemotron_h": _case(
        "nemotron_h",
        _EXPERTS,
        hybrid_override_pattern="ME*M-*",
        head_dim=24,
        mamba_num_heads=8,
        mamba_head_dim=20,
        n_groups=2,
        ssm_state_size=12,
        conv_kernel=5,
        expand=2,
        chunk_size=8,
        moe_shared_expert_intermediate_size=32,
        use_mamba_kernels=False,
    ),
    "granitemoehybrid": _case(
        "granitemoehybrid", _LOCAL_EXPERTS, _MAMBA2, layer_types=["mamba", "mamba", "attention"] * 2
    ),
    "falcon_h1": _case("falcon_h1", _MAMBA2, head_dim=24, mamba_d_ssm=96, mamba_d_head=12, attn_layer_indices=None),
    "qwen3_next": _case("qwen3_next", _GDN, _QWEN_EXPERTS, head_dim=24, full_attention_interval=3),
    "qwen3_5_text": _case("qwen3_5_text", _GDN, head_dim=24, layer_types=_LINEAR3 * 2),
    "qwen3_5_moe_text": _case("qwen3_5_moe_text", _GDN, _QWEN_EXPERTS, head_dim=24, layer_types=_LINEAR3 * 2),
    "olmo_hybrid": _case("olmo_hybrid", _GDN, pad_token_id=0, layer_types=_LINEAR3 * 2),
    "kimi_linear": _case(
        "kimi_linear",
        _MLA,
        q_lora_rank=None,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        linear_attn_config={
            "full_attn_layers": [3, 6],
            "kda_layers": [1, 2, 4, 5],
            "num_heads": 3,
            "head_dim": 20,
            "short_conv_kernel_size": 5,
        },
    ),
    "recurrent_gemma": _case(
        "recurrent_gemma", num_key_value_heads=1, lru_width=64, conv1d_width=5, attention_window_size=WINDOW
    ),
    "lfm2": _case("lfm2", full_attn_idxs=[2, 5], conv_L_cache=4, block_auto_adjust_ff_dim=False),
    "lfm2_moe": _case(
        "lfm2_moe",
        layer_types=_CONV3 * 2,
        conv_L_cache=4,
        num_dense_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "minimax": _case("minimax", _LOCAL_EXPERTS, head_dim=24, block_size=4, layer_types=_LINEAR3 * 2),
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
    "mllama_text_model": _case(
        "mllama_text_model", cross_attention_layers=[1, 4], bos_token_id=1, eos_token_id=2, pad_token_id=0
    ),
}


_VARIANTS: dict[str, dict[str, Config]] = {
    "deepseek_v3": {"other latent": {"kv_lora_rank": 40, "qk_rope_head_dim": 12}},
    "falcon_h1": {"width from expand": {"mamba_d_ssm": None, "mamba_d_head": "auto", "head_dim": ...}},
    "gemma3n_text": {"shared": {"num_kv_shared_layers": 2, "layer_types": _SHARED}},
    "gemma4_text": {
        "shared": {"num_kv_shared_layers": 2, "layer_types": _SHARED},
        "k_eq_v": {"attention_k_eq_v": True},
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
CASES: dict[str, Config] = _FAMILIES | {
    f"{family} {name}": _without_gaps(_FAMILIES[family] | variant)
    for family, variants in _VARIANTS.items()
    for name, variant in variants.items()
}
