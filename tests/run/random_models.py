"""Random models of any config, for what their caches hold."""

from copy import deepcopy

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    MllamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    T5ForConditionalGeneration,
    WhisperForConditionalGeneration,
)

from tests.config_cases import Config
from tests.run.tiny_hybrids import SOURCE_TOKENS

CLASSES: dict[str, type[PreTrainedModel]] = {  # those that AutoModelForCausalLM lacks or builds without the encoder
    "mllama_text_model": MllamaForCausalLM,
    "t5": T5ForConditionalGeneration,
    "whisper": WhisperForConditionalGeneration,
}


def build_config(config: Config) -> PreTrainedConfig:
    """Return the config object that transformers makes of a raw config."""
    return AutoConfig.for_model(**deepcopy(config))  # config classes change lists in place


def build_model(config: PreTrainedConfig, device: str = "cpu") -> PreTrainedModel:
    """Return a random bfloat16 model in evaluation mode; on the device `meta` it has shapes but no weights."""
    torch.manual_seed(0)
    if config.model_type in CLASSES:
        make = CLASSES[config.model_type]._from_config
    else:  # a text part may have no class with a language-model head
        has_head = type(config) in AutoModelForCausalLM._model_mapping
        make = (AutoModelForCausalLM if has_head else AutoModel).from_config
    with torch.device(device):
        return make(config, dtype=torch.bfloat16, experts_implementation="batched_mm").eval()


def source_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the inputs of the encoder or the image, none for a plain decoder."""
    model_type, like = model.config.model_type, {"dtype": model.dtype, "device": model.device}
    if model_type == "whisper":
        num_frames = 2 * model.config.max_source_positions  # the encoder halves them
        return {"input_features": torch.zeros(1, model.config.num_mel_bins, num_frames, **like)}
    if model_type == "t5":
        return {"input_ids": torch.zeros(1, SOURCE_TOKENS, dtype=torch.int64, device=model.device)}
    if model_type == "mllama_text_model":
        return {"cross_attention_states": torch.zeros(1, SOURCE_TOKENS, model.config.hidden_size, **like)}
    return {}
