"""Layer specs from the config.json of a Hugging Face checkpoint.

Reads plain JSON, imports no transformers. What a config does not say is taken from the family's config class. A family
without a reader is read where its fields leave one reading only; what they leave open is refused, never guessed.
"""

from collections.abc import Mapping

from pydantic import ValidationError

from hybridkv.errors import SpecError
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.reader import read_config
from hybridkv.hf_config.registry import FAMILIES, WRAPPERS, find_family
from hybridkv.options import DEFAULT_OPTIONS, CacheOptions, apply_options
from hybridkv.spec_base import readable_errors, short_repr
from hybridkv.specs import ModelSpec

__all__ = ["CacheOptions", "known_families", "model_spec_from_config", "read_config"]


def model_spec_from_config(
    config: Mapping[str, object], *, name: str, options: CacheOptions = DEFAULT_OPTIONS
) -> ModelSpec:
    """Return what every layer of a checkpoint's text model keeps.

    The spec's `model_type` is the text part's. A config that transformers saved again gives an equal spec.

    Raises: SpecError for a wrong value, in one line: field, value, rule, fix; UnsupportedModel for what no rule
        explains.
    """
    if not isinstance(name, str) or not name:
        raise SpecError(f"name: got {short_repr(name)}, must be a non-empty string; name the model")
    if not isinstance(config, Mapping):
        raise SpecError(f"config of {name!r}: got {short_repr(config)}, must be an object; pass read_config(...)")
    top = ConfigFields(f"config of {name!r}: ", config, max_source_tokens=options.max_source_tokens)
    model_type, read_family, fields = find_family(top)
    try:
        decoder = read_family(fields)
        spec = ModelSpec(name=name, model_type=model_type, max_model_len=decoder.max_model_len, layers=decoder.layers)
    except ValidationError as error:
        # Fields that are right one by one may multiply to a size that no cache has.
        raise SpecError(f"config of {name!r}: {'; '.join(readable_errors(error))}") from None
    return apply_options(spec, options)


def known_families() -> list[str]:
    """Return every model_type that has a reader, sorted."""
    return sorted(FAMILIES | WRAPPERS)
