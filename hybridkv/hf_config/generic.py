"""A model_type that nobody registered: read where its fields leave one reading only, refused otherwise.

The rules know K and V of full, sliding or chunked attention. Whatever may say more about caches than `layer_types`,
`per_layer_config` and the geometry makes them refuse.
"""

import re
from collections.abc import Iterator, Mapping

from hybridkv.errors import UnsupportedModel
from hybridkv.hf_config.attention import CHUNKED, FULL, SLIDING, Decoder, Defaults, decoder, explicit_kinds, window
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.spec_base import short_repr

_KINDS = (FULL, SLIDING, CHUNKED, "attention")
_REQUIRED = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_UNDERSTOOD = {
    *_REQUIRED,
    "attention_chunk_size",
    "head_dim",
    "hidden_size",
    "layer_types",
    "max_position_embeddings",
    "per_layer_config",
    "sliding_window",
}
# names that stand for caches, states, or a choice of layers in one family or another
_HINTS = re.compile(
    r"""mamba | ssm | conv_ | _conv | conv1d | state_size | d_state | recurren | rwkv | lru | linear_ | delta_rule
    | gated_delta | retention | kda | lightning | time_mix | lora_rank | latent | use_mla | index_ | indexer
    | sparse_att | moba | nsa_ | compress | shared_layers | kv_shar | shar\w*_kv | (^|_)cla(_|$) | yoco
    | pattern | interval | block_type | block_configs | attn_type | attention_type | attn_layer | attention_layer
    | full_attn | layers_block | hybrid | no_op | skip_layer | no_rope | nope_layer | window | chunk | swa_ | _swa
    | global_ | local_(?!experts) | ut_steps | loop | cross | encoder | multi_query | kv_heads | n_head_kv
    | kv_channels | query_groups | key_value_groups | attention_groups | qk_\w*dim | v_head_dim | value_\w*dim
    | head_dims | head_size | attention_head_dim | attn_config | attention_config | attn_cfg
    | (^|_)(mla|swa|gla|mlstm|slstm)(_|$) | (key|kv|head|value)\w*_(heads|per_layer) | per_layer_heads
    | (sliding|full|local|k|v|key|value|swa)_head | head_dim_ | delta | rnn | lstm | retnet | hyena | kv_\w*shar
    | kv_cache""",
    re.VERBOSE | re.IGNORECASE,
)
# model types of encoders, of other modalities, of halves of a model
_NOT_A_DECODER = re.compile(
    r"(^|_)(encoder|decoder|vision|visual|audio|speech|embedding|vit|bert)(_|$)|bert", re.IGNORECASE
)
_CAUSAL = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
# lists with an entry a layer that say nothing about caches
_OTHER_LISTS = re.compile("mlp|moe|expert|router|dense|rope|deepstack|spars", re.IGNORECASE)
# nested objects that say nothing about caches of the text model
_IGNORED = re.compile(
    r"^rope_|rope_theta|rotary|quant|compression|id2label|label2id|auto_map|vision|audio|image|video|text_config|per_layer_config"
    r"|generation|task_specific|tokenizer|projector|feed_forward|no_repeat_ngram|tie_encoder",
    re.IGNORECASE,
)
_NO_DEFAULTS = Defaults(
    hidden_size=1,  # never used: what is missing is refused first
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    max_position_embeddings=None,
    null_derives=frozenset({"head_dim"}),
)


def generic(fields: ConfigFields) -> Decoder:
    """Read a decoder from explicit fields alone.

    `layer_types` or windows in `per_layer_config` give the kinds; without them all layers are full.

    Raises: UnsupportedModel if a field is missing or a field may say something about caches that these rules do not
        know; SpecError for a wrong value.
    """
    _check_decodes(fields)
    outer = [fields.parent] if fields.parent is not None else []
    hints = [hint for config in (fields, *outer) for hint in _hints(config.values)]
    if hints:
        shown = ", ".join(f"{_one_line(name)}={short_repr(value, 40)}" for name, value in hints)
        raise _unsupported(fields, f"these fields may say more about its caches: {shown}")
    missing = [name for name in _REQUIRED if fields.raw(name) is None]
    if fields.raw("head_dim") is None and fields.raw("hidden_size") is None:
        missing.append("head_dim or hidden_size")
    if missing:
        raise _unsupported(fields, f"missing: {', '.join(missing)}")
    unknown = [name for name in fields.optional_list("layer_types") or [] if name not in _KINDS]
    if unknown:
        raise _unsupported(fields, f"layer_types has {short_repr(unknown[0], 40)}, known are {', '.join(_KINDS)}")
    listed = fields.optional_list("layer_types") or []
    if "attention" in listed and (fields.raw("sliding_window"), fields.raw("attention_chunk_size")) != (None, None):
        raise _unsupported(fields, "layer_types says 'attention', which beside a window may or may not slide")
    kinds = explicit_kinds(fields, _NO_DEFAULTS, (FULL, SLIDING, CHUNKED))
    tokens = window(fields, _NO_DEFAULTS)
    if kinds is None:
        for name in ("sliding_window", "attention_chunk_size"):
            if fields.raw(name) is not None:
                raise _unsupported(fields, f"missing: layer_types, which says the layers that {name} is for")
    return decoder(fields, _NO_DEFAULTS, window_tokens=tokens, kinds=kinds)


def _check_decodes(fields: ConfigFields) -> None:
    """Refuse what is no plain decoder by name: an encoder keeps no cache, a half of a model not all of it."""
    model_type = str(fields.raw("model_type"))
    named = fields.raw("architectures")
    if named is None and fields.parent is not None:
        named = fields.parent.raw("architectures")
    names = [str(name) for name in named] if isinstance(named, list | tuple) else []
    if _NOT_A_DECODER.search(model_type) or (names and not any(name.endswith(_CAUSAL) for name in names)):
        raise _unsupported(fields, f"it does not look like a causal language model (architectures: {names or 'none'})")


def _unsupported(fields: ConfigFields, reason: str) -> UnsupportedModel:
    """Return the error of a model_type without a reader."""
    seen = [f"{name}={short_repr(fields.raw(name), 40)}" for name in sorted(_UNDERSTOOD) if fields.has(name)]
    return UnsupportedModel(
        f"{fields.where}model_type: got {short_repr(fields.raw('model_type'))}, which has no reader, and is not plain "
        f"enough to read without: {reason}; seen: {', '.join(seen) or 'nothing'}; write its ModelSpec by hand, or "
        "correct model_type (hybridkv.hf_config.known_families lists those with a reader)"
    )


def _one_line(name: str) -> str:
    return name if name.isprintable() else repr(name)


def _hints(values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the fields, nested ones included, that may say something about caches that the rules do not know."""
    count = values.get("num_hidden_layers")
    for name, value in values.items():
        if name in _UNDERSTOOD or value is None or value is False or _IGNORED.search(str(name)):
            continue
        is_per_layer = isinstance(value, list | tuple) and len(value) == count and not _OTHER_LISTS.search(str(name))
        if _HINTS.search(str(name)) or is_per_layer:
            yield str(name), value
        elif isinstance(value, Mapping):
            # geometry inside another object is that of some other part, or of the real decoder
            yield from ((f"{name}.{inner}", value[inner]) for inner in value if inner in _UNDERSTOOD)
            yield from ((f"{name}.{inner}", hint) for inner, hint in _hints(value))
