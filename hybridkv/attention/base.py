"""What an attention backend is given, what it must do.

A step calls `prepare` once per group; every layer of the group then calls `attend` on what it returned, so the work
that depends on block tables only is done once a group and not once a layer.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridkv._torch import torch
from hybridkv.arena import KVLayout
from hybridkv.batch import BatchGeometry
from hybridkv.retention import first_needed_token
from hybridkv.specs import ChunkedAttention, Lifecycle, SlidingWindow


@dataclass(frozen=True)
class LayerParams:
    """What one layer adds to the group's geometry.

    Shapes: `sinks` [num_heads], one extra logit a head that takes part in the softmax and carries no value.
    """

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class GroupBatch:
    """One group's view of a step.

    Shapes:
        block_table      [num_rows, width] int32 on the device: ordinal j in column `j % width`
        block_table_cpu  the same on the host
        slot_mapping     [T] int64
        state_slots      [columns, R] int64, the blocks of a group of states by batch position, -1 for padding; None for
                         a group that keeps tokens
    """

    lifecycle: Lifecycle
    block_size: int
    geometry: BatchGeometry
    block_table: torch.Tensor
    block_table_cpu: NDArray[np.int32]
    slot_mapping: torch.Tensor
    state_slots: torch.Tensor | None = None

    @property
    def window(self) -> int | None:
        """Tokens a query sees, itself included; None without a sliding window."""
        return self.lifecycle.window if isinstance(self.lifecycle, SlidingWindow) else None

    @property
    def chunk(self) -> int | None:
        """Tokens of a chunk; None without chunked attention."""
        return self.lifecycle.chunk if isinstance(self.lifecycle, ChunkedAttention) else None

    def first_visible(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first position that a query at each of `positions` sees."""
        return first_needed_token(self.lifecycle, positions)


class PreparedAttention(Protocol):
    """One group's attention for one step; valid until the next `commit` of the tables."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        caches: tuple[torch.Tensor, torch.Tensor],
        params: LayerParams,
    ) -> torch.Tensor:
        """Write a layer's new keys and values, then return its attention output.

        `key` and `value` are None for a layer that reads another layer's cache, which was written before.

        Shapes:
            query  [T, num_heads, head_dim]
            key    [T, num_kv_heads, head_dim], value [T, num_kv_heads, v_head_dim]
            caches key and value views as `Arena.view` gives them, in the backend's `kv_layout`
            returns [T, num_heads, v_head_dim]; rows of padding tokens are zero
        """
        ...


class AttentionBackend(Protocol):
    """Prepares groups; what it prepares never reads a position that is not visible, whatever its bytes."""

    kv_layout: KVLayout

    def prepare(self, batch: GroupBatch) -> PreparedAttention:
        """Do a group's work of one step, once for all its layers."""
        ...
