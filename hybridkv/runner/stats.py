"""What an engine counts."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.manager import CacheManager


@dataclass(frozen=True)
class GroupStats:
    """What one KV cache group holds now, held on average during a step, held at most.

    `cached_blocks` are those that only the prefix cache keeps.
    """

    lifecycle: str
    num_layers: int
    block_size: int
    num_blocks: int
    block_bytes: int
    held_blocks: int
    mean_held_blocks: float
    peak_blocks: int
    peak_blocks_per_row: int
    num_blocks_freed_out_of_window: int
    cached_blocks: int


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made.

    `num_computed_tokens` went through the model, `num_hit_tokens` were in the cache or on the host instead when their
    sequence started or came back. `seconds` are wall time inside steps, `table_seconds` the part spent on the batch's
    geometry, the commit of the tables, the slot mapping and the attention metadata.
    """

    num_steps: int
    num_preemptions: int
    num_generated_tokens: int
    num_computed_tokens: int
    num_hit_tokens: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    seconds: float
    table_seconds: float
    groups: tuple[GroupStats, ...]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second."""
        return self.num_generated_tokens / self.seconds if self.seconds else 0.0


class Counters:
    """The running counts behind `EngineStats`, whose names they have."""

    def __init__(self, num_groups: int) -> None:
        self.num_steps = self.num_generated_tokens = 0
        self.num_draft_tokens = self.num_accepted_draft_tokens = 0
        self.seconds = 0.0
        self._held_sum: NDArray[np.int64] = np.zeros(num_groups, dtype=np.int64)

    def add_held(self, num_held: NDArray[np.int64]) -> None:
        """Take note of the blocks `[num_groups]` held in one step."""
        self._held_sum += num_held

    def group_stats(self, manager: CacheManager) -> tuple[GroupStats, ...]:
        """Return what each group of a manager holds."""
        pool = manager.pool
        return tuple(
            GroupStats(
                lifecycle=group.group.lifecycle.kind,
                num_layers=group.group.num_layers,
                block_size=group.block_size,
                num_blocks=group.num_blocks - group.blocks_per_slab,
                block_bytes=group.block_stride_bytes,
                held_blocks=int(pool.num_held[g]),
                mean_held_blocks=float(self._held_sum[g] / max(1, self.num_steps)),
                peak_blocks=int(pool.peak_held[g]),
                peak_blocks_per_row=int(manager.peak_blocks_per_row[g]),
                num_blocks_freed_out_of_window=int(manager.num_freed_out_of_window[g]),
                cached_blocks=int(pool.num_cached[g]),
            )
            for g, group in enumerate(manager.plan.groups)
        )
