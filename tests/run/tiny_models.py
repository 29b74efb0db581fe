"""Tiny random checkpoints of every family the runner drives."""

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

VOCAB_SIZE = 256  # one token a byte
WINDOW = 12
MAX_MODEL_LEN = 512
NUM_LAYERS = 6
_BASE: dict[str, object] = {
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
_WINDOWED = {"sliding_window": WINDOW}
_GATED = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 3}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_FAMILY_FIELDS: dict[str, Mapping[str, object]] = {
    "cohere2": {**_WINDOWED, "sliding_window_pattern": 3, "head_dim": 16},
    "cwm": {**_WINDOWED, "head_dim": 16, "bos_token_id": 0},
    "dots1": {
        **_WINDOWED,
        "max_window_layers": 3,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 16,
    },
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
    "qwen2_moe": {**_GATED, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": {**_GATED, "head_dim": 16},
    "qwen3_moe": {**_GATED, **_EXPERTS, "head_dim": 16},
    "smollm3": {**_WINDOWED, "use_sliding_window": True, "no_rope_layer_interval": 3},
    "starcoder2": {**_WINDOWED, "use_bias": True},
    "vaultgemma": {**_WINDOWED, "head_dim": 16, "query_pre_attn_scalar": 16},
}
FAMILIES: tuple[str, ...] = tuple(sorted(_FAMILY_FIELDS))
WINDOWED_FAMILIES = frozenset(family for family in FAMILIES if "sliding_window" in _FAMILY_FIELDS[family])


def make_tiny(
    family: str, folder: Path, *, seed: int = 0, tokenizer: bool = False, fields: Mapping[str, object] | None = None
) -> Path:
    """Write a tiny random float32 checkpoint without an end token; return its folder.

    The weights are spread wide enough that greedy output is not one repeated token. The tokenizer has a token a byte.
    """
    config = AutoConfig.for_model(family, **(_BASE | dict(_FAMILY_FIELDS[family]) | dict(fields or {})))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _spread(model, seed)
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)
    if tokenizer:
        _byte_tokenizer().save_pretrained(folder)
    return Path(folder)


def _spread(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed" in name or "lm_head" in name:
                parameter.copy_(0.5 * noise)
            elif parameter.ndim >= 2 and "bias" not in name:
                parameter.copy_(0.2 * noise)
            else:  # norms, biases, sinks stay near their initial value
                parameter.add_(0.1 * noise)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
