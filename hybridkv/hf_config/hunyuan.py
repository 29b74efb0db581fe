"""Hunyuan-Large, whose layers share caches in runs."""

from dataclasses import replace

from hybridkv.errors import UnsupportedModel
from hybridkv.hf_config.attention import Decoder, Defaults, decoder, refuse_spans
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.hf_config.sharing import share_caches

HUNYUAN = Defaults(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    max_position_embeddings=2048,
)


def hunyuan(fields: ConfigFields) -> Decoder:
    """Hunyuan-Large: with `use_cla`, the first of each `cla_share_factor` layers owns the caches of all of them."""
    refuse_spans(fields)
    if fields.raw("use_mla") not in (None, False):
        raise UnsupportedModel(str(fields.error("use_mla", "no reader for latents in this family", "set it to false")))
    plain = decoder(_with_head_dim(fields), HUNYUAN, window_tokens=None, kinds=None)
    if not fields.flag("use_cla", False):
        return plain
    factor = fields.integer("cla_share_factor")
    owners = {layer: layer - layer % factor for layer in range(len(plain.layers)) if layer % factor}
    return replace(plain, layers=share_caches(plain.layers, owners))


def _with_head_dim(fields: ConfigFields) -> ConfigFields:
    """Return the fields with `head_dim`, which this family also calls `attention_head_dim`."""
    other = fields.optional_integer("attention_head_dim", None, null_means="hidden_size / num_attention_heads")
    if other is None or fields.raw("head_dim") == other:
        return fields
    if fields.raw("head_dim") is not None:
        rule = f"head_dim is {fields.raw('head_dim')!r:.60}"
        raise fields.error("attention_head_dim", rule, "remove one of them")
    return replace(fields, values={**fields.values, "head_dim": other})
