"""What each layer keeps: said by a spec, said by transformers' config, held by transformers' cache.

A layer's tensors are `{name: (shape, dtype)}`, the batch left out: `k` and `v` `[heads, tokens, dim]`, `cross_k` and
`cross_v` those of cross-attention, `latent` and `index_k` `[1, tokens, dim]`, `conv` `[channels, columns]`, `state` for
any recurrent state.
"""

from collections.abc import Iterator

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from hybridkv.specs import CacheTensor, ChunkedAttention, LayerCache, LayerSpec, ModelSpec, SlidingWindow, State
from tests.run.random_models import source_inputs

Tensors = dict[str, tuple[tuple[int, ...], str]]
LayerType = tuple[str, int | None]  # transformers' name, its window or chunk
NAMES = {
    "full_attention": "full_attention",
    "cross_attention": "full_attention",  # to transformers a cache that does not grow
    "sliding_window": "sliding_attention",
    "chunked_attention": "chunked_attention",
}
ATTRIBUTES = {"keys": "k", "values": "v", "indexer_keys": "index_k", "conv_states": "conv", "recurrent_states": "state"}


def types_of_spec(spec: ModelSpec) -> list[LayerType]:
    """Return transformers' name for each layer, with its window or chunk."""
    return [_type_of_layer(layer) for layer in spec.layers]


def _type_of_layer(layer: LayerSpec) -> LayerType:
    owned = [cache for cache in layer.caches if cache.shares_kv_with is None]
    if not owned:
        return "dummy", None
    states = [cache.lifecycle for cache in owned if isinstance(cache.lifecycle, State)]
    attention = [cache.lifecycle for cache in owned if not isinstance(cache.lifecycle, State)]
    if states:
        alone = "conv" if states[0].family == "short_conv" else "linear_attention"
        return "hybrid" if attention else alone, None
    window = {SlidingWindow: "window", ChunkedAttention: "chunk"}.get(type(attention[0]))
    if any(tensor.name == "index_k" for cache in owned for tensor in cache.tensors):
        return "indexed_attention", None
    return NAMES[attention[0].kind], getattr(attention[0], window) if window else None


def types_of_transformers(config: PreTrainedConfig) -> list[LayerType]:
    """Return the layer types of which transformers builds a cache."""
    types, kwargs = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    if config.model_type == "t5":  # transformers counts the encoder's layers
        return [(types[0], None)] * config.num_decoder_layers
    return list(zip(types, (layer.get("sliding_window") for layer in kwargs), strict=True))


def tensors_of_spec(spec: ModelSpec, num_tokens: int) -> list[Tensors]:
    """Return what a transformers cache must hold after one forward pass over `num_tokens` tokens."""
    layers: list[Tensors] = [{} for _ in spec.layers]
    for layer_idx, _, cache in spec.owned_caches():
        for tensor in cache.tensors:
            layers[layer_idx][_name(cache, tensor)] = _shape(cache, tensor, num_tokens), tensor.dtype
    return layers


def kept_tokens(cache: LayerCache, num_tokens: int) -> int:
    """Return how many of `num_tokens` tokens transformers keeps: the next one completes the window or the chunk."""
    lifecycle = cache.lifecycle
    if lifecycle.kind == "sliding_window":
        return min(num_tokens, lifecycle.window - 1)
    if lifecycle.kind == "chunked_attention":
        return min(num_tokens, lifecycle.chunk - 1)
    return lifecycle.max_source_tokens if lifecycle.kind == "cross_attention" else num_tokens


def _name(cache: LayerCache, tensor: CacheTensor) -> str:
    if isinstance(cache.lifecycle, State):
        return tensor.name if tensor.name == "conv" else "state"
    return f"cross_{tensor.name}" if cache.lifecycle.kind == "cross_attention" else tensor.name


def _shape(cache: LayerCache, tensor: CacheTensor, num_tokens: int) -> tuple[int, ...]:
    if tensor.kind == "per_token":
        heads, dim = tensor.shape
        return heads, kept_tokens(cache, num_tokens), dim
    is_delta_state = cache.lifecycle.family == "gated_delta_net" and tensor.name != "conv"
    if is_delta_state:  # kernels keep [value, key] for each head, transformers' reference code [key, value]
        heads, value_dim, key_dim = tensor.shape
        return heads, key_dim, value_dim
    return tensor.shape


@torch.no_grad()
def tensors_of_transformers(model: PreTrainedModel, num_tokens: int) -> list[Tensors]:
    """Run `num_tokens` tokens of one sequence through a model and return what it holds afterwards."""
    inputs = source_inputs(model)
    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=model.device)
    inputs["decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"] = ids
    cache = None
    if model.config.model_type == "recurrent_gemma":  # its output has no cache
        cache = inputs["past_key_values"] = DynamicCache(config=model.config)
    output = model(**inputs, use_cache=True)
    cache = cache or output.get("past_key_values") or output["cache_params"]
    parts = [cache]
    if hasattr(cache, "cross_attention_cache"):
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    num_layers = max(len(parts[0].layers), len(getattr(cache, "linear_cache", ())))
    layers: list[Tensors] = [{} for _ in range(num_layers)]
    for part_idx, part in enumerate(parts):
        for layer_idx, layer in enumerate(part.layers):
            is_cross = part_idx or layer_idx in (getattr(model.config, "cross_attention_layers", None) or ())
            held = _merged_latent(dict(_tensors(layer))) if hasattr(model.config, "kv_lora_rank") else _tensors(layer)
            layers[layer_idx] |= {f"cross_{name}" if is_cross else name: seen for name, seen in dict(held).items()}
    for layer_idx, seen in _states_elsewhere(model, cache):
        layers[layer_idx] |= seen
    return layers


def _tensors(layer: object) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    for attribute, name in ATTRIBUTES.items():
        tensor = getattr(layer, attribute, None)
        if isinstance(tensor, dict):  # states by number; these families have one
            assert set(tensor) == {0}
            tensor = tensor[0]
        if tensor is not None:
            yield name, _seen(tensor.unsqueeze(1) if name == "index_k" else tensor)


def _seen(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    assert tensor.shape[0] == 1
    return tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")


def _merged_latent(seen: Tensors) -> Tensors:
    """Join what transformers keeps of MLA, the compressed part as keys, the rotary part as values."""
    if "k" in seen:
        (shape, dtype), (rope_shape, _) = seen.pop("k"), seen.pop("v")
        seen["latent"] = (*shape[:-1], shape[-1] + rope_shape[-1]), dtype
    return seen


def _states_elsewhere(model: PreTrainedModel, cache: object) -> Iterator[tuple[int, Tensors]]:
    """Yield the states that lie outside the layers of the cache: on modules (RecurrentGemma), in a list (MiniMax)."""
    if model.config.model_type == "recurrent_gemma":
        for layer_idx, layer in enumerate(model.model.layers):
            block = layer.temporal_block
            if hasattr(block, "rg_lru"):
                yield layer_idx, {"conv": _seen(block.conv1d_state), "state": _seen(block.rg_lru.recurrent_states)}
    for layer_idx, state in enumerate(getattr(cache, "linear_cache", ())):
        if isinstance(state, torch.Tensor):
            yield layer_idx, {"state": _seen(state)}
