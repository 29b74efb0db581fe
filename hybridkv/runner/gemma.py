"""Attention-only Hugging Face causal LMs, Gemma 3 the first, run over the paged cache.

The model stays Hugging Face's. Only its attention function is replaced, through transformers' attention interface: it
writes the step's keys and values into the cache and attends over pages. Which tokens a layer sees follows from the
layer spec, never from the arguments of the call.
"""

from collections.abc import Sequence

from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from hybridkv._torch import torch
from hybridkv.arena import Arena
from hybridkv.attention import AttentionBackend, GroupBatch, LayerParams, PreparedAttention
from hybridkv.batch import BatchGeometry
from hybridkv.errors import UnsupportedModel
from hybridkv.plan import CachePlan
from hybridkv.runner.projection import tall_projection

ATTENTION_NAME = "hybridkv"
_STEP_ARGUMENT = "hybridkv_step"
# What attention layers pass along without any bearing on plain causal attention. `sliding_window` is among them: what a
# layer sees follows from its spec. Every other argument could change the result, so a model that passes one is refused.
_IGNORED_ARGUMENTS = frozenset(
    {
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "sliding_window",
        "use_cache",
        _STEP_ARGUMENT,
    }
)
# A rotary embedding of this type changes with the longest position of a call: packing and chunking would change it.
_ROPE_OF_A_CALL = "longrope"


class ForwardStep:
    """What the attention layers of one forward pass share.

    One object serves one pass: per group the backend's prepared batch, per layer its cache views.
    """

    def __init__(self, cache: "LayerCaches", prepared: Sequence[PreparedAttention]) -> None:
        self._cache = cache
        self._prepared = prepared
        self._attended: set[int] = set()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: LayerParams
    ) -> torch.Tensor:
        """Write and attend one layer.

        Shapes: query [1, heads, T, dim], key and value [1, kv_heads, T, dim]; returns [1, T, heads, v_dim]
        """
        self._attended.add(layer)
        return self._cache.attend(layer, self._prepared, (query, key, value), params)

    def check_complete(self) -> None:
        """Raise UnsupportedModel if a layer with a cache did not attend through it."""
        missing = sorted(self._cache.layers - self._attended)
        if missing:
            raise UnsupportedModel(
                f"layers {missing}: did not attend through the cache; their attention does not use the attention "
                "interface of transformers, so they cannot be driven"
            )


class LayerCaches:
    """Each attention layer's group and cache views."""

    def __init__(self, plan: CachePlan, arena: Arena, backend: AttentionBackend) -> None:
        self._backend = backend
        self._groups: dict[int, int] = {}
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group in plan.groups:
            for cache in group.group.caches:
                names = [tensor.name for tensor in cache.cache.tensors]
                if names != ["k", "v"] or group.group.lifecycle.kind in ("state", "cross_attention"):
                    raise UnsupportedModel(
                        f"layer {cache.layer}: keeps {names} with lifecycle {group.group.lifecycle.kind}; "
                        "this runner takes layers with self-attention keys and values only"
                    )
                if cache.layer in self._views:
                    raise UnsupportedModel(
                        f"layer {cache.layer}: has more than one cache; this runner takes one a layer"
                    )
                self._groups[cache.layer] = group.group.group_id
                self._views[cache.layer] = (arena.view(cache.layer, "k"), arena.view(cache.layer, "v"))
        for layer in plan.spec.layers:
            if any(cache.shares_kv_with is not None for cache in layer.caches):
                raise UnsupportedModel(
                    f"layer {layer.layer}: shares another layer's cache, which this runner does not take"
                )

    @property
    def layers(self) -> set[int]:
        """Layers that have a cache."""
        return set(self._views)

    def begin(self, batches: Sequence[GroupBatch]) -> ForwardStep:
        """Prepare every group for one forward pass."""
        return ForwardStep(self, [self._backend.prepare(batch) for batch in batches])

    def attend(
        self,
        layer: int,
        prepared: Sequence[PreparedAttention],
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        params: LayerParams,
    ) -> torch.Tensor:
        """Write and attend one layer; see `ForwardStep.attend`."""
        if layer not in self._views:
            raise UnsupportedModel(f"layer {layer}: attends, but its spec has no cache")
        query, key, value = (tensor[0].transpose(0, 1) for tensor in qkv)  # [T, heads, dim]
        views = self._views[layer]
        if key.shape[1:] != self._entry_shape(views[0]) or value.shape[1:] != self._entry_shape(views[1]):
            raise UnsupportedModel(
                f"layer {layer}: makes keys {tuple(key.shape[1:])} and values {tuple(value.shape[1:])}, "
                f"its spec says {self._entry_shape(views[0])} and {self._entry_shape(views[1])}"
            )
        return prepared[self._groups[layer]].attend(query, key, value, views, params)[None]

    def _entry_shape(self, view: torch.Tensor) -> tuple[int, int]:
        heads = 2 if self._backend.kv_layout == "NHD" else 1
        return view.shape[heads], view.shape[3]


def paged_attention(  # noqa: PLR0913 - the signature is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **arguments: object,
) -> tuple[torch.Tensor, None]:
    """Attend through the cache; has the signature of transformers' attention functions.

    Raises: UnsupportedModel if the model passes a mask or a bias of its own, is not causal, or hides the step.
    """
    name = type(module).__name__
    step = arguments.get(_STEP_ARGUMENT)
    if not isinstance(step, ForwardStep):
        raise UnsupportedModel(f"{name}: does not pass keyword arguments on to its attention, so it cannot be driven")
    if attention_mask is not None:
        raise UnsupportedModel(
            f"{name}: passes an attention mask of its own; only plain causal, windowed or chunked "
            "attention can be run over the cache"
        )
    causal = getattr(module, "is_causal", True) and arguments.pop("is_causal", None) in (None, True)
    foreign = sorted(k for k, v in arguments.items() if v is not None and k not in _IGNORED_ARGUMENTS)
    if foreign or not causal:
        reason = f"it passes {', '.join(foreign)}" if foreign else "is_causal is False"
        raise UnsupportedModel(f"{name}: its attention is not plainly causal ({reason})")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or layer < 0:
        raise UnsupportedModel(f"{name}: does not say which layer it is (layer_idx={layer!r})")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return step.attend(layer, query, key, value, LayerParams(scale, softcap, s_aux)), None


class AttentionModel:
    """A Hugging Face causal LM whose attention layers use the cache in `forward`.

    Afterwards the model keeps the attention of this library; `model.set_attn_implementation("sdpa")` makes it Hugging
    Face's own again, until the next `forward`.
    """

    def __init__(self, model: PreTrainedModel, caches: LayerCaches, max_model_len: int) -> None:
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "use_bidirectional_attention", False):
            raise UnsupportedModel(
                f"{type(model).__name__}: use_bidirectional_attention is set; only causal models generate"
            )
        _check_rope(config, max_model_len)
        AttentionInterface.register(ATTENTION_NAME, paged_attention)
        self._model = model
        self._caches = caches

    def begin(self, batches: Sequence[GroupBatch]) -> ForwardStep:
        """Prepare every group's attention for one forward pass."""
        return self._caches.begin(batches)

    @torch.inference_mode()
    def forward(
        self, input_ids: torch.Tensor, geometry: BatchGeometry, step: ForwardStep, sampled: Sequence[int]
    ) -> torch.Tensor:
        """Run the packed batch; the cache holds its keys and values afterwards.

        Args:
            sampled: batch positions whose last token's logits are wanted.

        Shapes: input_ids [T] int64; returns [len(sampled), vocab_size]
        """
        if self._model.config._attn_implementation != ATTENTION_NAME:
            self._model.set_attn_implementation(ATTENTION_NAME)
        last_tokens = torch.from_numpy(geometry.last_token_indices[list(sampled)]).to(input_ids.device)
        with tall_projection(self._model.get_output_embeddings()):
            output = self._model(
                input_ids=input_ids[None],
                position_ids=geometry.positions[None],
                use_cache=False,
                logits_to_keep=last_tokens,
                **{_STEP_ARGUMENT: step},
            )
        step.check_complete()
        logits: torch.Tensor = output.logits[0]
        return logits


def _check_rope(config: PretrainedConfig, max_model_len: int) -> None:
    """Refuse lengths at which a rotary embedding would depend on the other tokens of the same call."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *(part for part in parameters.values() if isinstance(part, dict))]:
        if rope.get("rope_type") == _ROPE_OF_A_CALL:
            own = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", config.max_position_embeddings
            )
            if max_model_len > own:
                raise UnsupportedModel(
                    f"rope_type: got {_ROPE_OF_A_CALL!r}, whose frequencies past {own} tokens follow the longest "
                    f"sequence of a batch, so outputs would depend on neighbours; use max_model_len={own} at most"
                )
