"""What a planner decides: slabs, groups, blocks.

Slabs of `slab_bytes` are the unit of exchange between groups; group g cuts a slab into `blocks_per_slab` blocks:

    arena   | slab 0 (null blocks) | slab 1      | slab 2          | ...
    group 0 | b0                   | b1          | b2              |      1 block a slab
    group 1 | b0 b1 b2 b3 b4       | b5 b6 .. b9 | b10 b11 .. b14  |      5 blocks a slab

so block b of group g starts at byte `b * block_stride_bytes` of the arena, in whichever slab it lies. Slab 0 is never
lent: it holds block 0 of every group, the null block, always zero.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from hybridkv.grouping import KVCacheGroup, TensorPlacement
from hybridkv.limits import BatchLimits
from hybridkv.retention import end_ordinal, max_live_blocks, num_needed_tokens
from hybridkv.specs import ChunkedAttention, ModelSpec
from hybridkv.units import cdiv, round_up

STRIDE_TOKENS = 128
_STRIDE_WORDS = 4
_WORD_BYTES = 4
_COUNTERS_PER_ROW = 2  # a row's first and next ordinal


class SlotMappingMode(Enum):
    """How a group's tokens map to slots."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    NONE = "none"


def row_stride(width: int, block_size: int, mode: SlotMappingMode) -> int:
    """Return the words between two rows of a block table: the width, rounded up to 128 tokens' worth of blocks."""
    per_128_tokens = max(1, cdiv(STRIDE_TOKENS, block_size))
    return round_up(width, _STRIDE_WORDS if mode is SlotMappingMode.NONE else max(per_128_tokens, _STRIDE_WORDS))


@dataclass(frozen=True)
class GroupPlan:
    """One group's share of the plan.

    Units: `block_size` in tokens (1 for a state group); `*_bytes*` in bytes; `num_blocks` counts the reserved slab's
    blocks too, so block ids run from 0 to `num_blocks - 1` and those below `blocks_per_slab` are never lent. A sequence
    of a state group holds `num_parts` blocks, each with a run of the layers (`TensorPlacement.part` says which).
    """

    group: KVCacheGroup
    mode: SlotMappingMode
    block_size: int
    num_parts: int
    payload_bytes_per_block: int
    block_stride_bytes: int
    blocks_per_slab: int
    num_blocks: int
    table_width: int
    tensors: tuple[TensorPlacement, ...]

    @property
    def padding_fraction(self) -> float:
        """Part of a slab that holds no payload."""
        return 1 - self.payload_bytes_per_block / self.block_stride_bytes

    def end_ordinal(self, num_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return per row the ordinal after the last block that `num_tokens` tokens need in this group."""
        if self.group.is_state:
            return np.full_like(num_tokens, self.num_parts)
        return end_ordinal(self.group.lifecycle, num_tokens, self.block_size)

    def expected_blocks(self, num_tokens: int) -> float:
        """Blocks that a decoding sequence of about `num_tokens` tokens holds, on average over such lengths.

        A chunk counts in full, as `needed_bytes` counts it.
        """
        if self.group.is_state:
            return self.num_parts
        needed = num_needed_tokens(self.group.lifecycle, num_tokens)
        if self.group.lifecycle.kind == "cross_attention":
            return cdiv(needed, self.block_size)
        # A run that ends anywhere fills half its last block; one that starts anywhere, half its first one too. A full
        # chunk of whole blocks does neither.
        whole_chunk = isinstance(self.group.lifecycle, ChunkedAttention) and needed % self.block_size == 0
        ends = (0 if whole_chunk else 2) if needed < num_tokens else 1
        return (needed + ends * (self.block_size - 1) / 2) / self.block_size

    def max_blocks(self, num_tokens: int, max_in_flight: int) -> int:
        """Most blocks a sequence of `num_tokens` tokens ever holds in this group."""
        if self.group.is_state:
            return self.num_parts
        return max_live_blocks(self.group.lifecycle, self.block_size, num_tokens, max_in_flight)


@dataclass(frozen=True)
class CachePlan:
    """Everything the pool, the tables and the arena are built from.

    `memory_bytes` is what was given; the arena takes whole slabs of it.
    """

    spec: ModelSpec
    limits: BatchLimits
    memory_bytes: int
    slab_bytes: int
    num_slabs: int
    groups: tuple[GroupPlan, ...]

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena, the reserved slab included."""
        return self.slab_bytes * self.num_slabs

    @property
    def num_usable_slabs(self) -> int:
        """Slabs that can be lent."""
        return max(0, self.num_slabs - 1)

    @property
    def table_bytes(self) -> int:
        """Bytes of all block tables, on the host and once more on the device."""
        words = sum(row_stride(g.table_width, g.block_size, g.mode) + _COUNTERS_PER_ROW for g in self.groups)
        return _WORD_BYTES * self.limits.max_num_seqs * words

    @property
    def min_num_slabs(self) -> int:
        """Slabs it takes at least: one with the null blocks, and what the blocks of one token need."""
        return 1 + self.slabs_for(1)

    def slabs_for(self, num_tokens: int) -> int:
        """Slabs that one sequence of `num_tokens` tokens needs when it has the arena to itself."""
        return sum(
            cdiv(group.max_blocks(num_tokens, self.limits.max_in_flight), group.blocks_per_slab)
            for group in self.groups
        )

    def longest_sequence(self) -> int:
        """Longest sequence, up to `max_model_len` tokens, that fits when it has the arena to itself; 0 if none does."""
        low, high = 0, self.limits.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.slabs_for(middle) <= self.num_usable_slabs else (low, middle - 1)
        return low
