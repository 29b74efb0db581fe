"""Small configs of the families with attention alone, in the variants that decide which layers slide."""

from tests.config_cases import Config

_VARIANTS: dict[str, list[Config]] = {
    "cohere2": [{"sliding_window_pattern": 3}, {"head_dim": 32}],
    "cwm": [],
    "dots1": [{"max_window_layers": 3}, {"sliding_window": None}],
    "exaone4": [{"sliding_window_pattern": 3}, {"layer_types": ["full_attention"] * 8}],
    "gemma2": [],
    "gemma3_text": [
        {"sliding_window_pattern": 3},
        {"use_bidirectional_attention": True},
        {"layer_types": ["full_attention"] * 8},
    ],
    "gpt_oss": [],
    "granite_swa": [],
    "hunyuan_v1_dense": [],
    "llama": [{"head_dim": 24}],
    "minimax_m2": [],
    "ministral": [{"sliding_window": None}, {"layer_types": ["full_attention", "sliding_attention"] * 4}],
    "ministral3": [],
    "mistral": [{"sliding_window": None}],
    "mixtral": [],
    "olmo3": [],
    "phi3": [],
    "phimoe": [],
    "qwen2": [{"use_sliding_window": True, "max_window_layers": 3}],
    "qwen2_moe": [{"use_sliding_window": True, "max_window_layers": 3}, {"use_sliding_window": True}],
    "qwen3": [
        {"use_sliding_window": True, "max_window_layers": 3},
        {"use_sliding_window": True, "max_window_layers": 0},
    ],
    "qwen3_moe": [{"use_sliding_window": True}],
    "smollm3": [
        {"use_sliding_window": True},
        {"use_sliding_window": True, "no_rope_layers": [0, 1] * 4},
        {"use_sliding_window": True, "no_rope_layer_interval": 3},
    ],
    "starcoder2": [],
    "vaultgemma": [],
}
# fields without which no model of the family runs
NEEDED: dict[str, Config] = {
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 24},
    "ministral": {"head_dim": 24},
}
_WINDOWLESS = {"llama", "minimax_m2", "hunyuan_v1_dense"}  # a window is an error there


def tiny(model_type: str) -> Config:
    """Return a config of eight small layers with a window of 8."""
    config: Config = {
        "model_type": model_type,
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "vocab_size": 32,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        **NEEDED.get(model_type, {}),
    }
    return config if model_type in _WINDOWLESS else config | {"sliding_window": 8}


def _name(family: str, variant: Config) -> str:
    return " ".join(
        [family, *(f"{key}={'list' if isinstance(value, list) else value}" for key, value in variant.items())]
    )


CASES: dict[str, Config] = {
    _name(family, variant): tiny(family) | variant
    for family, variants in _VARIANTS.items()
    for variant in ({}, *variants)
}
