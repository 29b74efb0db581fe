"""Attention layers of Hugging Face causal LMs, Gemma 3 the first, run over the paged cache.

The model stays Hugging Face's. Only its attention function is replaced, through transformers' attention interface: it
writes the step's keys and values into the cache and attends over pages. Which tokens a layer sees follows from the
layer spec, never from the arguments of the call.
"""

from hybridkv._torch import torch
from hybridkv.attention import LayerParams
from hybridkv.errors import UnsupportedModel
from hybridkv.runner.caches import ForwardStep

ATTENTION_NAME = "hybridkv"
STEP_ARGUMENT = "hybridkv_step"
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
        STEP_ARGUMENT,
    }
)


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
    step = arguments.get(STEP_ARGUMENT)
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
        # Modules whose weights serve several layers name theirs in the call of the cache that comes before.
        layer = step.updated_layer
    if layer is None:
        raise UnsupportedModel(f"{name}: does not say which layer it is (layer_idx={layer!r})")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return step.attend(layer, query, key, value, LayerParams(scale, softcap, s_aux)), None


class StepCache:
    """What a model takes for its cache, where its attention insists on one.

    Latents go through it, and modules that serve several layers say in `update` which one they are.
    """

    def __init__(self, step: ForwardStep, positions: torch.Tensor) -> None:
        self._step = step
        self._offsets = positions - torch.arange(len(positions), device=positions.device)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's new keys and values, or latents; return what it should attend with."""
        self._step.updated_layer = layer_idx
        if layer_idx in self._step.caches.latents:
            return self._step.update_latents(layer_idx, key, value)
        return key, value

    def get_seq_length(self, *_args: object) -> torch.Tensor:
        """Return `[T]`: what must be added to 0, 1, 2, ... to give each token's position."""
        return self._offsets
