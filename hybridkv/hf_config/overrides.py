"""Overrides of single layers from `per_layer_config`."""

import re

from hybridkv.errors import UnsupportedModel
from hybridkv.hf_config.fields import ConfigFields


def layer_overrides(fields: ConfigFields, num_layers: int) -> dict[int, ConfigFields]:
    """Return the overrides by layer index.

    Keys are integers or their text, zero-padded in saved files (`"04"`).

    Raises: SpecError for a key that is no layer or comes twice; UnsupportedModel for a layer that skips its attention.
    """
    if fields.raw("per_layer_config") is None:
        return {}
    table = fields.child("per_layer_config")
    overrides: dict[int, ConfigFields] = {}
    for key in table.values:
        text = str(key)
        if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) >= num_layers:
            raise fields.error(
                "per_layer_config", f"key {text!r:.60} must be a layer index 0..{num_layers - 1}", "correct the key"
            )
        if int(text) in overrides:
            raise fields.error("per_layer_config", f"layer {int(text)} comes twice", "merge the two entries")
        own = table.child(key)
        _check(own, fields)
        overrides[int(text)] = own
    return overrides


def _check(own: ConfigFields, fields: ConfigFields) -> None:
    if own.raw("skip"):
        raise UnsupportedModel(str(own.error("skip", "a layer with skipped parts has no known caches", "remove it")))
    derives_head_dim = not any(isinstance(f.raw("head_dim"), int) for f in (own, fields))
    for name in ("num_attention_heads", "hidden_size"):
        if own.has(name) and derives_head_dim:
            raise own.error(name, "leaves head_dim of this layer open", "give head_dim")
