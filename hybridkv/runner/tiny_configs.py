"""Configs of tiny models of every family that the runner drives.

Sizes that a reader could confuse differ: KV heads from heads, head_dim from hidden_size / num_attention_heads, key from
value heads, convolution channels from the width of a state. Windows are short, so that a hundred tokens cross them many
times; time steps are limited where the family limits them, so that the limit shows.
"""

from collections.abc import Mapping

Config = dict[str, object]

VOCAB_SIZE = 256  # one token a byte
WINDOW = 12
MAX_MODEL_LEN = 512
NUM_LAYERS = 6
_BASE: Config = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_WINDOWED: Config = {"sliding_window": WINDOW}
_GATED: Config = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 3}
_QWEN_EXPERTS: Config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED_EXPERT: Config = {"shared_expert_intermediate_size": 32}
_LOCAL_EXPERTS: Config = {"num_local_experts": 4, "num_experts_per_tok": 2}
_YARN: Config = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
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
_GEMMA: Config = {
    "sliding_window": WINDOW,
    "head_dim": 24,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 16,
    "pad_token_id": 0,
}
_GEMMA3N: Config = {**_GEMMA, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * NUM_LAYERS}
_GEMMA4: Config = {**_GEMMA, "global_head_dim": 40, "num_global_key_value_heads": 1}
_MAMBA1: Config = {"state_size": 12, "conv_kernel": 5, "time_step_rank": 8}
_MAMBA2: Config = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 5,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
    "time_step_limit": [0.3, 1.5],
}
_GDN: Config = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 5,
}
_LINEAR3 = ["linear_attention", "linear_attention", "full_attention"]
_CONV3 = ["conv", "conv", "full_attention"]
_SHARED: Config = {
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"],
}


def _fields(*parts: Config, **fields: object) -> Config:
    merged: Config = {}
    for part in (*parts, fields):
        merged |= part
    return merged


_ATTENTION: Mapping[str, Config] = {
    "cohere2": {**_WINDOWED, "sliding_window_pattern": 3, "head_dim": 16},
    "cwm": {**_WINDOWED, "head_dim": 16, "bos_token_id": 0},
    "dots1": {**_WINDOWED, **_EXPERTS, "max_window_layers": 3, "head_dim": 16},
    "exaone4": {**_WINDOWED, "sliding_window_pattern": 3, "head_dim": 16},
    "gemma2": {**_WINDOWED, "head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_WINDOWED, "sliding_window_pattern": 3, "head_dim": 24, "query_pre_attn_scalar": 24},
    "gpt_oss": {**_WINDOWED, **_LOCAL_EXPERTS, "head_dim": 16, "rope_parameters": _YARN},
    "granite_swa": {**_WINDOWED, "head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "llama": {},
    "minimax_m2": {**_LOCAL_EXPERTS, "head_dim": 16, "rotary_dim": 8},
    "ministral": {
        **_WINDOWED,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * (NUM_LAYERS // 3),
    },
    "ministral3": {**_WINDOWED, "head_dim": 16},
    "mistral": {**_WINDOWED, "head_dim": 16},
    "mixtral": {**_WINDOWED, **_LOCAL_EXPERTS},
    "olmo3": _WINDOWED,
    "phi3": _WINDOWED,
    "phimoe": {**_WINDOWED, **_LOCAL_EXPERTS},
    "qwen2": _GATED,
    "qwen2_moe": {**_GATED, **_QWEN_EXPERTS, **_SHARED_EXPERT},
    "qwen3": {**_GATED, "head_dim": 16},
    "qwen3_moe": {**_GATED, **_QWEN_EXPERTS, "head_dim": 16},
    "smollm3": {**_WINDOWED, "use_sliding_window": True, "no_rope_layer_interval": 3},
    "starcoder2": {**_WINDOWED, "use_bias": True},
    "vaultgemma": {**_WINDOWED, "head_dim": 16, "query_pre_attn_scalar": 16},
}
_HYBRID: Mapping[str, Config] = {
    "deepseek_v2": _fields(_MLA, _EXPERTS),
    "deepseek_v3": _fields(_MLA, _EXPERTS),
    "llama4_text": _fields(_LOCAL_EXPERTS, head_dim=24, intermediate_size_mlp=96, attention_chunk_size=WINDOW),
    "gemma3n_text": _fields(_GEMMA3N, num_kv_shared_layers=0),
    "gemma3n_text-shared": _fields(_GEMMA3N, _SHARED),
    "gemma4_text": _GEMMA4,
    "gemma4_text-k_eq_v": _fields(_GEMMA4, attention_k_eq_v=True),
    "gemma4_text-shared": _fields(_GEMMA4, _SHARED),
    "mimo_v2_flash": _fields(
        _EXPERTS,
        head_dim=24,
        v_head_dim=20,
        sliding_window_size=WINDOW,
        hybrid_layer_pattern=[0, 1, 1, 1, 1, 0],
        swa_num_key_value_heads=4,
        swa_head_dim=24,
        swa_v_head_dim=20,
    ),
    "mamba": _fields(_MAMBA1, expand=3, intermediate_size=..., num_key_value_heads=...),
    "falcon_mamba": _fields(_MAMBA1, expand=16, intermediate_size=160, num_key_value_heads=...),
    "mamba2": _fields(
        time_step_limit=[0.3, 1.5],
        num_heads=8,
        head_dim=24,
        expand=3,
        state_size=12,
        n_groups=2,
        conv_kernel=5,
        chunk_size=8,
    ),
    "jamba": _fields(
        attn_layer_period=3,
        attn_layer_offset=1,
        num_experts=2,
        mamba_d_state=12,
        mamba_d_conv=5,
        mamba_expand=3,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "bamba": _fields(_MAMBA2, attn_layer_indices=[2, 5], mamba_d_head="auto"),
    "zamba": _fields(
        layers_block_type=["mamba", "mamba", "hybrid"] * 2,
        num_key_value_heads=4,
        n_mamba_heads=2,
        mamba_d_state=12,
        mamba_d_conv=5,
        mamba_expand=3,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "zamba2": _fields(
        layers_block_type=["mamba", "mamba", "hybrid"] * 2,
        num_key_value_heads=4,
        n_mamba_heads=8,
        mamba_ngroups=2,
        mamba_d_state=12,
        mamba_d_conv=5,
        mamba_expand=3,
        chunk_size=8,
        time_step_min=0.3,
        time_step_max=0.6,
        use_mamba_kernels=False,
        adapter_rank=8,
    ),
    "nemotron_h": _fields(
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
        time_step_min=0.3,
        time_step_max=0.6,
        use_mamba_kernels=False,
    ),
    "granitemoehybrid": _fields(
        _LOCAL_EXPERTS, _MAMBA2, shared_intermediate_size=32, layer_types=["mamba", "mamba", "attention"] * 2
    ),
    "falcon_h1": _fields(_MAMBA2, head_dim=24, mamba_d_ssm=96, mamba_d_head=12, attn_layer_indices=None),
    "qwen3_next": _fields(_GDN, _QWEN_EXPERTS, _SHARED_EXPERT, head_dim=24, full_attention_interval=3),
    "qwen3_5_text": _fields(_GDN, head_dim=24, layer_types=_LINEAR3 * 2),
    "qwen3_5_moe_text": _fields(_GDN, _QWEN_EXPERTS, _SHARED_EXPERT, head_dim=24, layer_types=_LINEAR3 * 2),
    "olmo_hybrid": _fields(_GDN, pad_token_id=0, layer_types=_LINEAR3 * 2),
    "kimi_linear": _fields(
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
    "recurrent_gemma": _fields(num_key_value_heads=1, lru_width=64, conv1d_width=5, attention_window_size=WINDOW),
    "lfm2": _fields(full_attn_idxs=[2, 5], conv_L_cache=4, block_auto_adjust_ff_dim=False),
    "lfm2_moe": _fields(
        layer_types=_CONV3 * 2,
        conv_L_cache=4,
        num_dense_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "minimax": _fields(_LOCAL_EXPERTS, head_dim=24, block_size=4, layer_types=_LINEAR3 * 2),
}
_FIELDS = {**_ATTENTION, **_HYBRID}


def _config(family: str) -> Config:
    """Return a family's config; a field set to `...` is left out."""
    config = {"model_type": family.partition("-")[0], **_BASE, **_FIELDS[family]}
    return {key: value for key, value in config.items() if value is not ...}


TINY_CONFIGS: Mapping[str, Config] = {family: _config(family) for family in sorted(_FIELDS)}
"""By family, with a variant's name after a hyphen; config classes change lists in place, so copy before use."""
ATTENTION_ONLY = frozenset(_ATTENTION)
"""Families whose layers keep plain keys and values."""
