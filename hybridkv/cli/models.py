"""Finding the model that a command names: a file, a folder, a known name, a Hub id."""

import re
from difflib import get_close_matches
from pathlib import Path

from hybridkv.cli.terminal import hidden_stderr
from hybridkv.errors import CheckpointError
from hybridkv.options import CacheOptions, apply_options
from hybridkv.specs import ModelSpec, known_models

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_NUM_SUGGESTIONS = 4


def find_model(model: str, options: CacheOptions) -> ModelSpec:
    """Return what one rank keeps of a model under `options`.

    Args:
        model: a config.json, a folder with one, a model spec's JSON; else a known name; else a Hub id, of which the
            config.json alone is fetched.

    Raises: CheckpointError or SpecError if there is no such model, or it cannot be read.
    """
    path = Path(model)
    if path.exists():
        spec = _from_file(path, path.stem if path.is_file() else path.resolve().name, options)
    elif model in known_models():
        spec = ModelSpec.load(model)
    elif _HUB_ID.fullmatch(model):
        spec = _from_file(_fetch_config(model), model, options)
    else:
        raise CheckpointError(f"model: {model!r} is no existing file or folder and no known name; {_suggestion(model)}")
    return apply_options(spec, options)


def _from_file(path: Path, name: str, options: CacheOptions) -> ModelSpec:
    # Late: a known name needs no reader of configs.
    from hybridkv.hf_config import model_spec_from_config, read_config

    config = read_config(path)
    if path.is_file() and isinstance(config.get("layers"), list):
        return ModelSpec.load(path)
    # A config may leave its longest source open; every other option is applied to the spec that it gives.
    return model_spec_from_config(config, name=name, options=CacheOptions(max_source_tokens=options.max_source_tokens))


def _fetch_config(model: str) -> Path:
    problem = f"model: {model!r} is no existing file or folder and no known name"
    try:
        with hidden_stderr():
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(model, "config.json"))
    except ImportError:
        reason = "huggingface_hub is not installed, so no config.json can be fetched"
    except Exception as error:
        # Offline, no such repository, no access: the Hub's errors, and those of what it is built on, share no base.
        reason = f"its config.json cannot be fetched from the Hugging Face Hub ({' '.join(str(error).split()):.120})"
    raise CheckpointError(f"{problem}; {reason}; {_suggestion(model)}")


def _suggestion(model: str) -> str:
    wanted = model.rsplit("/", 1)[-1].lower()
    names = {name.lower(): name for name in known_models()}
    close = [names[name] for name in get_close_matches(wanted, names, n=_NUM_SUGGESTIONS, cutoff=0.5)]
    hint = f"did you mean {', '.join(close)}? " if close else ""
    return f"{hint}hybridkv spec --list prints the known models"
