"""A random hybrid of about 100M parameters, for speeds: 9 Mamba-2 layers beside 3 of attention."""

import json
from collections.abc import Mapping

import torch
from transformers import BambaConfig, BambaForCausalLM

CONFIG: Mapping[str, object] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "attn_layer_indices": [3, 7, 11],
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


def hybrid_model() -> tuple[torch.nn.Module, dict[str, object]]:
    """Return the model in float32 and its config.json; its greedy output is not one repeated token."""
    torch.manual_seed(0)
    config = BambaConfig(**CONFIG)
    model = BambaForCausalLM._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embed" not in name:
                parameter.mul_(3)
    model.requires_grad_(False)
    return model, json.loads(config.to_json_string(use_diff=False))
