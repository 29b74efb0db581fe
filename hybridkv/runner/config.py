"""Sizes and choices that an engine is made with."""

from dataclasses import dataclass

from hybridkv.arena import ArenaLayout
from hybridkv.errors import InvalidRequest
from hybridkv.limits import BatchLimits
from hybridkv.manager import ManagerOptions
from hybridkv.resume_policy import ResumePolicy
from hybridkv.specs import ModelSpec

DEFAULT_MAX_MODEL_LEN = 32_768


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the cache and of a step.

    Attributes:
        memory_bytes: bytes of the cache arena.
        block_size: tokens a block, in every attention group.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step.
        max_model_len: tokens of the longest sequence; the model's own by default.
        preempt_every: preempt the youngest sequence every so many steps, for tests; 0 never.
        layout: how the arena is laid out.
        prefix_caching: keep what ended sequences computed for prompts that begin alike.
        resume_every: tokens between the positions at which windows and states are kept, besides the ends of prompts
            and of sequences and where prompts part; None for none.
        host_memory_bytes: memory on the host to which preempted sequences go; 0 to compute them again.
        watermark: part of the memory that admissions leave free for running sequences, 0 to 1.
    """

    memory_bytes: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    preempt_every: int = 0
    layout: ArenaLayout = "slab"
    prefix_caching: bool = True
    resume_every: int | None = None
    host_memory_bytes: int = 0
    watermark: float = 0.0

    def limits(self, spec: ModelSpec) -> BatchLimits:
        """Return the limits of a step of a model.

        Raises: InvalidRequest if `max_model_len` is more than the model's own.
        """
        own = spec.max_model_len
        wanted = self.max_model_len
        if wanted is not None and own is not None and wanted > own:
            raise InvalidRequest(f"max_model_len: got {wanted}, the model was made for at most {own}")
        return BatchLimits(
            max_num_seqs=self.max_num_seqs,
            max_model_len=next(length for length in (wanted, own, DEFAULT_MAX_MODEL_LEN) if length is not None),
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    @property
    def manager_options(self) -> ManagerOptions:
        """What the manager does beyond lending blocks."""
        return ManagerOptions(
            prefix_caching=self.prefix_caching,
            resume_points=ResumePolicy(every=self.resume_every),
            watermark=self.watermark,
            host_bytes=self.host_memory_bytes,
        )
