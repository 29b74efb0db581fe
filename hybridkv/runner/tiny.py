"""Tiny random checkpoints of every family that the runner drives."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from hybridkv._torch import torch
from hybridkv.errors import InvalidRequest
from hybridkv.runner.tiny_configs import TINY_CONFIGS

FAMILIES: tuple[str, ...] = tuple(TINY_CONFIGS)


def make_tiny(
    family: str, folder: Path, *, seed: int = 0, tokenizer: bool = False, fields: Mapping[str, object] | None = None
) -> Path:
    """Write a random float32 checkpoint of about 1 MiB without an end token; return its folder.

    The weights are spread wide enough that greedy output is not one repeated token. The tokenizer has a token a byte.

    Args:
        fields: what to change in the family's config.json.

    Raises: InvalidRequest for an unknown family, a folder that holds something or cannot be made.
    """
    if family not in TINY_CONFIGS:
        raise InvalidRequest(f"family: got {family!r}, expected one of {', '.join(FAMILIES)}")
    _make_empty(folder)
    model = tiny_model(family, seed=seed, fields=fields)
    model.save_pretrained(folder)
    if tokenizer:
        _byte_tokenizer().save_pretrained(folder)
    return folder


def _make_empty(folder: Path) -> None:
    try:
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise InvalidRequest(f"output: {str(folder)!r} exists and is not an empty folder; give a new one")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"output: {str(folder)!r} cannot be made ({error.strerror}); give another") from error


def tiny_model(family: str, *, seed: int = 0, fields: Mapping[str, object] | None = None) -> PreTrainedModel:
    """Return the random model of a family in evaluation mode; equal seeds give equal weights."""
    config = AutoConfig.for_model(**deepcopy(TINY_CONFIGS[family] | dict(fields or {})))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    _spread(model, seed)
    model.generation_config = GenerationConfig()
    return model


def _spread(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed" in name or "lm_head" in name:
                parameter.copy_(0.5 * noise)
            elif parameter.ndim >= 2 and "bias" not in name:
                parameter.copy_(0.2 * noise)
            else:  # norms, biases, sinks, decays stay near their initial value
                parameter.add_(0.1 * noise)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
