"""Groups with a byte budget become a `CachePlan`.

Slabs of `slab_bytes` are the unit of exchange between groups; group g cuts a slab into `blocks_per_slab` blocks:

    arena   | slab 0 (null blocks) | slab 1      | slab 2          | ...
    group 0 | b0                   | b1          | b2              |      1 block a slab
    group 1 | b0 b1 b2 b3 b4       | b5 b6 .. b9 | b10 b11 .. b14  |      5 blocks a slab

so block b of group g starts at byte `b * block_stride_bytes` of the arena, in whichever slab it lies. Slab 0 is never
lent: it holds block 0 of every group, the null block, always zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import lcm

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import SpecError
from hybridkv.grouping import KVCacheGroup, TensorPlacement, group_layers
from hybridkv.retention import end_ordinal, max_live_blocks
from hybridkv.specs import ModelSpec
from hybridkv.units import INT32_MAX, cdiv, format_bytes, round_up

BLOCK_ALIGNMENT_BYTES = 128
MAX_SLAB_BYTES = 64 * 2**20
MAX_PADDING = 0.005
DEFAULT_BLOCK_SIZE = 16


class SlotMappingMode(Enum):
    """How a group's tokens map to slots."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    NONE = "none"


@dataclass(frozen=True)
class BatchLimits:
    """The largest batch the tables are made for.

    Attributes:
        max_num_seqs: rows of every table.
        max_model_len: tokens of the longest sequence.
        max_num_batched_tokens: tokens of one step, hence the most one row schedules.
        max_unsettled_tokens: tokens a row may have in flight beside those of the current step.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_unsettled_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("max_num_seqs", 1),
            ("max_model_len", 1),
            ("max_num_batched_tokens", 1),
            ("max_unsettled_tokens", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= INT32_MAX:
                raise SpecError(f"{name}: got {value!r}, expected an integer from {least} to {INT32_MAX}")

    @property
    def max_in_flight(self) -> int:
        """Tokens a row may have scheduled or unsettled at once."""
        return min(self.max_num_batched_tokens, self.max_model_len) + self.max_unsettled_tokens


@dataclass(frozen=True)
class GroupPlan:
    """One group's share of the plan.

    Units: `block_size` in tokens (1 for a state group); `*_bytes*` in bytes; `num_blocks` counts the reserved slab's
    blocks too, so block ids run from 0 to `num_blocks - 1` and those below `blocks_per_slab` are never lent.
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

    def max_blocks(self, num_tokens: int, max_in_flight: int) -> int:
        """Most blocks a sequence of `num_tokens` tokens ever holds in this group."""
        if self.group.is_state:
            return self.num_parts
        return max_live_blocks(self.group.lifecycle, self.block_size, num_tokens, max_in_flight)


@dataclass(frozen=True)
class CachePlan:
    """Everything the pool, the tables and the arena are built from."""

    spec: ModelSpec
    limits: BatchLimits
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
        return self.num_slabs - 1

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


def plan_cache(
    spec: ModelSpec, memory_bytes: int, limits: BatchLimits, *, block_size: int | Mapping[int, int] = DEFAULT_BLOCK_SIZE
) -> CachePlan:
    """Plan the arena of `spec` in `memory_bytes`.

    Args:
        memory_bytes: bytes of the whole arena, the reserved slab included.
        block_size: tokens a block, for all groups or per group index; state groups take none.

    Raises: SpecError if a block size is wrong, if a slab would pass 64 MiB, if a table entry would pass int32 or if
        the memory does not hold one block of every group beside the reserved slab.
    """
    groups = group_layers(spec)
    if isinstance(block_size, Mapping) and not set(block_size) <= set(range(len(groups))):
        raise SpecError(f"block_size: got groups {sorted(block_size)}, the model has groups 0..{len(groups) - 1}")
    sizes = [_block_size_of(group, block_size) for group in groups]
    tensors = [group.place_tensors(size) for group, size in zip(groups, sizes, strict=True)]
    payloads = [max(t.offset_bytes + t.num_bytes for t in placements) for placements in tensors]
    slab_bytes = _choose_slab_bytes([round_up(payload, BLOCK_ALIGNMENT_BYTES) for payload in payloads])
    num_slabs = memory_bytes // slab_bytes
    if num_slabs < 1 + len(groups):
        raise SpecError(
            f"memory: got {format_bytes(memory_bytes)}, expected at least "
            f"{format_bytes((1 + len(groups)) * slab_bytes)} "
            f"({1 + len(groups)} slabs of {format_bytes(slab_bytes)}: one per group and one of null blocks)"
        )
    plans = []
    for group, size, placements, payload in zip(groups, sizes, tensors, payloads, strict=True):
        blocks_per_slab = _blocks_per_slab(slab_bytes, payload)
        num_blocks = num_slabs * blocks_per_slab
        if num_blocks * size > 2**63 - 1 or num_blocks > INT32_MAX:
            raise SpecError(
                f"memory: group {group.group_id} ({group.lifecycle.kind}) would have {num_blocks} blocks, block tables "
                f"hold int32 ids up to {INT32_MAX}; use a larger block_size than {size} or at most "
                f"{format_bytes(INT32_MAX // blocks_per_slab * slab_bytes)}"
            )
        width = max_live_blocks(group.lifecycle, size, limits.max_model_len, limits.max_in_flight)
        plans.append(
            GroupPlan(
                group,
                _mode_of(group),
                size,
                1,
                payload,
                slab_bytes // blocks_per_slab,
                blocks_per_slab,
                num_blocks,
                width,
                placements,
            )
        )
    return CachePlan(spec, limits, slab_bytes, num_slabs, tuple(plans))


def _block_size_of(group: KVCacheGroup, block_size: int | Mapping[int, int]) -> int:
    if group.is_state:
        return 1
    size = block_size.get(group.group_id) if isinstance(block_size, Mapping) else block_size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise SpecError(f"block_size: got {size!r} for group {group.group_id}, expected at least 1 token a block")
    return size


def _mode_of(group: KVCacheGroup) -> SlotMappingMode:
    match group.lifecycle.kind:
        case "state" | "cross_attention":
            # The step's tokens are the decoder's: they have no slots among states or among a source's keys.
            return SlotMappingMode.NONE
        case "sliding_window" | "chunked_attention":
            return SlotMappingMode.SLIDING_WINDOW
        case _:
            return SlotMappingMode.FULL


def _blocks_per_slab(slab_bytes: int, payload_bytes: int) -> int:
    """Most equal, aligned blocks of at least `payload_bytes` that a slab can be cut into."""
    num_units = slab_bytes // BLOCK_ALIGNMENT_BYTES
    most = slab_bytes // round_up(payload_bytes, BLOCK_ALIGNMENT_BYTES)
    return next(n for n in range(most, 0, -1) if num_units % n == 0)


def _choose_slab_bytes(payloads: list[int]) -> int:
    """Pick a slab that every block size divides, or else one of little padding.

    If the common multiple is too large, candidates hold 1, 2, 3, ... of the largest blocks and are rounded up so that
    each group's blocks divide them: the first within the bound is taken, or the one that pads least.
    """
    exact = lcm(*payloads)
    if exact <= MAX_SLAB_BYTES:
        return exact
    largest = max(payloads)
    if largest > MAX_SLAB_BYTES:
        raise SpecError(
            f"block_size: a block of {format_bytes(largest)} passes the slab limit of "
            f"{format_bytes(MAX_SLAB_BYTES)}; use a smaller block_size"
        )
    best, best_padding = largest, 1.0
    for num_largest in range(1, MAX_SLAB_BYTES // largest + 1):
        counts = [num_largest * largest // payload for payload in payloads]
        slab_bytes = round_up(num_largest * largest, BLOCK_ALIGNMENT_BYTES * lcm(*counts))
        padding = max(1 - count * payload / slab_bytes for count, payload in zip(counts, payloads, strict=True))
        if slab_bytes <= MAX_SLAB_BYTES and padding < best_padding:
            best, best_padding = slab_bytes, padding
        if best_padding <= MAX_PADDING:
            break
    return best
