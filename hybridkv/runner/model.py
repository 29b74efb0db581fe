"""A Hugging Face causal LM whose layers use the cache in `forward`."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from hybridkv._torch import torch
from hybridkv.attention import GroupBatch
from hybridkv.batch import BatchGeometry
from hybridkv.errors import UnsupportedModel
from hybridkv.runner.caches import ForwardStep, LayerCaches
from hybridkv.runner.gemma import ATTENTION_NAME, STEP_ARGUMENT, StepCache, paged_attention
from hybridkv.runner.mamba_hybrid import MixerHost
from hybridkv.runner.projection import tall_projection

# A rotary embedding of this type changes with the longest position of a call: packing and chunking would change it.
_ROPE_OF_A_CALL = "longrope"
# Model types whose attention asks the cache for its layer's number or for the tokens before the call.
_ASKS_THE_CACHE = frozenset({"llama4_text", "zamba", "zamba2"})


class _PassLock:
    """Lets one forward pass at a time into a model; a copy of the model gets a lock of its own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[type["_PassLock"], tuple[()]]:
        return _PassLock, ()


class HostedModel:
    """A Hugging Face causal LM over our caches.

    Afterwards the model keeps the attention of this library; `model.set_attn_implementation("sdpa")` makes it Hugging
    Face's own again, until the next `forward`. Engines in several threads may share a model, they take turns; nothing
    else may call the model meanwhile.
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
        self._mixers = MixerHost(model, caches)
        # The model keeps it, since all engines on a model must take the same one.
        self._pass_lock: _PassLock = model.__dict__.setdefault("_hybridkv_pass_lock", _PassLock())
        self._asks_the_cache = bool(caches.latents) or config.model_type in _ASKS_THE_CACHE

    def begin(self, batches: Sequence[GroupBatch], num_prompt_tokens: Sequence[int]) -> ForwardStep:
        """Prepare every group for one forward pass; see `LayerCaches.begin`."""
        return self._caches.begin(batches, num_prompt_tokens)

    @torch.inference_mode()
    def forward(
        self, input_ids: torch.Tensor, geometry: BatchGeometry, step: ForwardStep, logits_at: Sequence[int]
    ) -> torch.Tensor:
        """Run the packed batch; the cache holds its keys and values afterwards.

        Args:
            logits_at: which of the T tokens' logits are wanted.

        Shapes: input_ids [T] int64; returns [len(logits_at), vocab_size]
        """
        wanted = torch.tensor(list(logits_at), dtype=torch.int64, device=input_ids.device)
        with self._pass_lock.lock, self._hosted(step):
            output = self._model(
                input_ids=input_ids[None],
                position_ids=geometry.positions[None],
                use_cache=False,
                logits_to_keep=wanted,
                past_key_values=StepCache(step, geometry.positions) if self._asks_the_cache else None,
                **{STEP_ARGUMENT: step},
            )
        step.check_complete()
        logits: torch.Tensor = output.logits[0]
        return logits

    @contextmanager
    def _hosted(self, step: ForwardStep) -> Iterator[None]:
        """Let the model use the step's caches meanwhile."""
        if self._model.config._attn_implementation != ATTENTION_NAME:
            self._model.set_attn_implementation(ATTENTION_NAME)
        with tall_projection(self._model.get_output_embeddings()), self._mixers.attached(step):
            yield


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
