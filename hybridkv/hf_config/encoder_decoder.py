"""Decoders that attend to an encoder's output: a cache that grows, one that is written once."""

from hybridkv.errors import SpecError
from hybridkv.hf_config.attention import Decoder, Defaults, kv_geometry, layer_count, max_model_len, refuse_spans
from hybridkv.hf_config.caches import kv_cache
from hybridkv.hf_config.fields import ConfigFields
from hybridkv.specs import CrossAttention, FullAttention, LayerSpec

MLLAMA = Defaults(
    hidden_size=4096,
    num_hidden_layers=40,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    null_derives=frozenset({"head_dim"}),
)
_MLLAMA_CROSS = (3, 8, 13, 18, 23, 28, 33, 38)


def whisper(fields: ConfigFields) -> Decoder:
    """Whisper: each of `decoder_layers` keeps its own tokens, and the audio's up to `max_source_positions`.

    `num_hidden_layers` is the encoder's.
    """
    heads = fields.integer("decoder_attention_heads", 6)
    width = fields.integer("d_model", 384)
    if width % heads:
        raise fields.error("d_model", f"must be a multiple of decoder_attention_heads {heads}", "correct one of them")
    source = fields.max_source_tokens or fields.integer("max_source_positions", 1500)
    layers = _both(layer_count(fields, "decoder_layers", 4), (heads, width // heads), source)
    return Decoder(max_model_len(fields, 448, "max_target_positions"), layers)


def t5(fields: ConfigFields) -> Decoder:
    """T5: each decoder layer keeps its own tokens, and the encoder's; `n_positions`, if given, bounds both."""
    count = layer_count(fields, "num_layers", 6)
    if fields.raw("num_decoder_layers") is not None:
        count = layer_count(fields, "num_decoder_layers", None)
    source = fields.max_source_tokens
    if source is None and fields.raw("n_positions") is not None:
        source = fields.integer("n_positions")
    if source is None:
        raise _no_source(fields, "n_positions")
    layers = _both(count, (fields.integer("num_heads", 8), fields.integer("d_kv", 64)), source)
    return Decoder(max_model_len(fields, None, "n_positions"), layers)


def mllama_text(fields: ConfigFields) -> Decoder:
    """Llama 3.2 Vision: the layers of `cross_attention_layers` keep the tokens of one image, the others the text's."""
    refuse_spans(fields)
    count = layer_count(fields, "num_hidden_layers", MLLAMA.num_hidden_layers)
    name = "cross_attention_layers"
    cross = fields.layer_indices(name, count)
    if cross is None:
        cross = frozenset(_MLLAMA_CROSS)
    source = fields.max_source_tokens or _image_tokens(fields)
    geometry = kv_geometry(fields, MLLAMA)
    text = kv_cache(FullAttention(), *geometry)
    image = kv_cache(CrossAttention(max_source_tokens=source), *geometry)
    layers = [LayerSpec(layer=layer, caches=(image if layer in cross else text,)) for layer in range(count)]
    return Decoder(max_model_len(fields, MLLAMA.max_position_embeddings), tuple(layers))


def _both(num_layers: int, geometry: tuple[int, int], source: int) -> tuple[LayerSpec, ...]:
    """Return layers that each have a growing cache, a cross-attention cache."""
    own = kv_cache(FullAttention(), *geometry)
    cross = kv_cache(CrossAttention(max_source_tokens=source), *geometry)
    return tuple(LayerSpec(layer=layer, caches=(own, cross)) for layer in range(num_layers))


def _image_tokens(fields: ConfigFields) -> int:
    """Return the tokens of one image: a class token and the patches of every tile."""
    if fields.parent is None:
        raise _no_source(fields, "vision_config")
    empty = ConfigFields(f"{fields.parent.where}vision_config.", {})
    vision = fields.parent.child("vision_config") if fields.parent.has("vision_config") else empty
    side, patch = vision.integer("image_size", 448), vision.integer("patch_size", 14)
    if side < patch:
        raise vision.error("image_size", f"must be at least patch_size {patch}", "correct one of them")
    return ((side // patch) ** 2 + 1) * vision.integer("max_num_tiles", 4)


def _no_source(fields: ConfigFields, name: str) -> SpecError:
    rule = "nothing bounds the source of its cross attention"
    return fields.error(name, rule, "give the option max_source_tokens, the longest source")
