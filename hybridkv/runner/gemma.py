"""Attention-only Hugging Face causal LMs, Gemma 3 the first, run over the paged cache.

The model stays Hugging Face's. Only its attention function is replaced, through transformers' attention interface: it
writes the step's keys and values into the cache and attends over pages. Which tokens a layer sees follows from the
layer spec, never from the arguments of the call.
"""

from collections.abc import Sequence

from transformers import AttentionInterface, PreTrainedModel

from hybridkv._torch import torch
from hybridkv.arena import Arena
from hybridkv.attention import AttentionBackend, GroupBatch, LayerParams, PreparedAttention
from hybridkv.batch import BatchGeometry
from hybridkv.errors import UnsupportedModel
from hybridkv.planner import CachePlan

ATTENTION_NAME = "hybridkv"
_STEP_ARGUMENT = "hybridkv_step"
# Arguments that change what attention computes and that no backend knows: a model that passes one is refused.
_FOREIGN_ARGUMENTS = ("position_bias", "alibi", "head_mask", "indices", "block_mask")


class ForwardStep:
    """What the attention layers of one forward pass share.

    One object serves one pass: per group the backend's prepared batch, per layer its cache views.
    """

    def __init__(self, cache: "LayerCaches", prepared: Sequence[PreparedAttention]) -> None:
        self._cache = cache
        self._prepared = prepared

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: LayerParams
    ) -> torch.Tensor:
        """Write and attend one layer.

        Shapes: query [1, heads, T, dim], key and value [1, kv_heads, T, dim]; returns [1, T, heads, v_dim]
        """
        return self._cache.attend(layer, self._prepared, (query, key, value), params)


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
    foreign = [argument for argument in _FOREIGN_ARGUMENTS if arguments.get(argument) is not None]
    if foreign or not getattr(module, "is_causal", True):
        raise UnsupportedModel(f"{name}: its attention is not plainly causal ({foreign or 'is_causal is False'})")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or layer < 0:
        raise UnsupportedModel(f"{name}: does not say which layer it is (layer_idx={layer!r})")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return step.attend(layer, query, key, value, LayerParams(scale, softcap, s_aux)), None


class AttentionModel:
    """A Hugging Face causal LM whose attention layers use the cache from now on.

    `model.set_attn_implementation("sdpa")` makes it Hugging Face's own again.
    """

    def __init__(self, model: PreTrainedModel, caches: LayerCaches) -> None:
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "use_bidirectional_attention", False):
            raise UnsupportedModel(
                f"{type(model).__name__}: use_bidirectional_attention is set; only causal models generate"
            )
        AttentionInterface.register(ATTENTION_NAME, paged_attention)
        model.set_attn_implementation(ATTENTION_NAME)
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
        last_tokens = torch.from_numpy(geometry.last_token_indices[list(sampled)]).to(input_ids.device)
        output = self._model(
            input_ids=input_ids[None],
            position_ids=geometry.positions[None],
            use_cache=False,
            logits_to_keep=last_tokens,
            **{_STEP_ARGUMENT: step},
        )
        logits: torch.Tensor = output.logits[0]
        return logits
