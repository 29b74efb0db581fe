"""Nemotron models from an architecture search, where each layer has its own number of KV heads or no attention."""

from hybridkv.errors import UnsupportedModel
from hybridkv.hf_config.attention import Decoder, Defaults, decoder, num_layers, refuse_spans
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.specs import LayerSpec

NEMOTRON_NAS = Defaults(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    max_position_embeddings=2048,
)


def nemotron_nas(fields: ConfigFields) -> Decoder:
    """Nemotron-NAS: `block_configs` gives `n_heads_in_group` query heads of a layer a KV head, or no attention."""
    refuse_spans(fields)
    count = num_layers(fields, NEMOTRON_NAS)
    blocks = fields.optional_list("block_configs")
    if blocks is None or len(blocks) != count:
        raise fields.error("block_configs", f"must be a list of {count} (num_hidden_layers) blocks", "give them all")
    heads = fields.integer("num_attention_heads", NEMOTRON_NAS.num_attention_heads)
    table = ConfigFields(f"{fields.where}block_configs.", {str(layer): block for layer, block in enumerate(blocks)})
    overrides, without = {}, set()
    for layer in range(count):
        own = table.child(str(layer)).child("attention")
        num_kv_heads = _num_kv_heads(own, heads)
        if num_kv_heads is None:
            without.add(layer)
        else:
            overrides[layer] = ConfigFields(own.where, {"num_key_value_heads": num_kv_heads})
    plain = decoder(fields, NEMOTRON_NAS, window_tokens=None, kinds=None, overrides=overrides)
    layers = tuple(LayerSpec(layer=spec.layer) if spec.layer in without else spec for spec in plain.layers)
    if len(without) == count:
        raise fields.error("block_configs", "no block has attention", "a model without caches needs no cache manager")
    return Decoder(plain.max_model_len, layers)


def _num_kv_heads(own: ConfigFields, heads: int) -> int | None:
    """Return one layer's KV heads, None where it has no attention."""
    for name in ("window_length", "num_sink_tokens", "sparsify"):
        if own.raw(name) is not None:
            raise UnsupportedModel(str(own.error(name, "no reader for this kind of attention", "set it to null")))
    if own.flag("no_op", False) or own.flag("replace_with_linear", False):
        return None
    per_group = own.integer("n_heads_in_group")
    if heads % per_group:
        raise own.error("n_heads_in_group", f"must divide num_attention_heads {heads}", "correct one of them")
    return heads // per_group
