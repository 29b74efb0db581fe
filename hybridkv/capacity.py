"""How many sequences a plan holds, how long they may be, where the rest of the memory goes.

All answers come from the block pool that serves the plan. N sequences fit if N-1 of them decode and the last one is
being prefilled in the widest chunk, each at its worst phase: the pool then never has to preempt one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.block_pool import BlockPool
from hybridkv.errors import SpecError
from hybridkv.plan import CachePlan
from hybridkv.retention import needed_bytes
from hybridkv.units import INT32_MAX, check_integer


@dataclass(frozen=True)
class MixedCapacity:
    """How many sequences of a mixed load fit at once, over many places of the load to start from.

    Units: `tokens` are those of the sequences that fit together, at their full lengths.
    """

    min_concurrency: int
    mean_concurrency: float
    max_concurrency: int
    mean_tokens: float


@dataclass(frozen=True)
class Waste:
    """Where the memory goes while `num_seqs` sequences of `context` tokens run; the bytes add up to the memory.

    Attributes:
        needed_bytes: what the sequences must keep.
        padding_bytes: unused ends of blocks, in all slabs that are lent.
        partly_used_slab_bytes: blocks without an owner in lent slabs.
        tail_bytes: tokens that blocks hold beyond those needed: ends of sequences, both ends of windows.
        in_flight_bytes: blocks for the chunk of the one sequence that is being prefilled.
        null_block_bytes: the reserved slab of null blocks.
        unused_bytes: slabs that no further sequence fits into, and the memory's end that is no whole slab.
        table_host_bytes, table_device_bytes: block tables, beside the memory.
    """

    context: int
    num_seqs: int
    needed_bytes: int
    padding_bytes: int
    partly_used_slab_bytes: int
    tail_bytes: int
    in_flight_bytes: int
    null_block_bytes: int
    unused_bytes: int
    table_host_bytes: int
    table_device_bytes: int

    @property
    def held_bytes(self) -> int:
        """Bytes of the lent slabs."""
        return (
            self.needed_bytes
            + self.padding_bytes
            + self.partly_used_slab_bytes
            + self.tail_bytes
            + self.in_flight_bytes
        )

    @property
    def waste_fraction(self) -> float:
        """Part of the lent slabs that the sequences do not need; 0 where nothing is lent."""
        return 1 - self.needed_bytes / self.held_bytes if self.held_bytes else 0.0


def blocks_of(plan: CachePlan, context: int, num_seqs: int) -> NDArray[np.int64]:
    """Return `[num_groups]`: the most blocks that `num_seqs` sequences of up to `context` tokens hold at once."""
    decoding = _blocks_of_one(plan, context, plan.limits.decode_in_flight)
    prefilling = _blocks_of_one(plan, context, plan.limits.max_in_flight)
    total: NDArray[np.int64] = decoding * (num_seqs - 1) + prefilling
    return total if num_seqs else np.zeros_like(total)


def max_concurrency(plan: CachePlan, context: int) -> int:
    """Return how many sequences of `context` tokens the plan's pool holds at once, rows aside; 0 if not even one.

    Raises: SpecError for a context of no token.
    """
    _check_context(plan, "context", context)
    pool = BlockPool(plan)
    usable = plan.num_usable_slabs * pool.blocks_per_slab
    low, high = 0, int((usable // _blocks_of_one(plan, context, plan.limits.decode_in_flight)).min())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(pool, plan, context, middle) else (low, middle - 1)
    return low


def longest_context(plan: CachePlan, num_seqs: int) -> int:
    """Return the longest context, up to `max_model_len`, at which the plan's pool holds `num_seqs` sequences at once.

    Raises: SpecError for no sequence.
    """
    check_integer("num_seqs", num_seqs, 1, INT32_MAX)
    pool = BlockPool(plan)
    low, high = 0, plan.limits.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(pool, plan, middle, num_seqs) else (low, middle - 1)
    return low


def mixed_capacity(plan: CachePlan, lengths: Sequence[int], max_starts: int = 256) -> MixedCapacity:
    """Return how many sequences of a load fit at once when they come in its order, each at its full length.

    From up to `max_starts` places, evenly spread, sequences are admitted until the next one does not fit; the load is
    repeated as often as it takes.

    Raises: SpecError for no sequence, one of no token, or one longer than `max_model_len`.
    """
    check_integer("max_starts", max_starts)
    if not lengths:
        raise SpecError("lengths: got none, expected at least one sequence")
    for length in lengths:
        _check_context(plan, "lengths", length)
    pool = BlockPool(plan)
    distinct, index = np.unique(np.asarray(lengths, dtype=np.int64), return_inverse=True)
    # [num_groups, num_distinct]
    decoding = np.stack([_blocks_of_one(plan, n, plan.limits.decode_in_flight) for n in distinct.tolist()], axis=1)
    prefilling = np.stack([_blocks_of_one(plan, n, plan.limits.max_in_flight) for n in distinct.tolist()], axis=1)
    held, extra = decoding[:, index], (prefilling - decoding)[:, index]
    starts = np.unique(np.linspace(0, len(lengths) - 1, min(max_starts, len(lengths))).astype(np.int64))
    counts, tokens = [], []
    # No more sequences fit than of the shortest one.
    most = max_concurrency(plan, int(distinct[0]))
    for start in starts.tolist():
        order = (start + np.arange(most)) % len(lengths)
        blocks = np.cumsum(held[:, order], axis=1) + np.maximum.accumulate(extra[:, order], axis=1)
        counts.append(int(pool.fits_now(blocks).sum()))
        tokens.append(int(np.asarray(lengths)[order[: counts[-1]]].sum()))
    return MixedCapacity(min(counts), float(np.mean(counts)), max(counts), float(np.mean(tokens)))


def measure_waste(plan: CachePlan, context: int, num_seqs: int) -> Waste:
    """Return where the memory goes while the pool holds `num_seqs` sequences of `context` tokens.

    Raises: SpecError if they do not fit.
    """
    _check_context(plan, "context", context)
    check_integer("num_seqs", num_seqs, 0, INT32_MAX)
    pool = BlockPool(plan)
    blocks = blocks_of(plan, context, num_seqs)
    lent_slabs = -(-blocks // pool.blocks_per_slab)
    if lent_slabs.sum() > pool.num_free_slabs:
        raise SpecError(
            f"num_seqs: got {num_seqs} of {context} tokens, which take {lent_slabs.sum()} slabs; the plan has "
            f"{pool.num_free_slabs}, room for {max_concurrency(plan, context)}"
        )
    payload = np.array([group.payload_bytes_per_block for group in plan.groups], dtype=np.int64)
    stride = np.array([group.block_stride_bytes for group in plan.groups], dtype=np.int64)
    lent_blocks = lent_slabs * pool.blocks_per_slab
    decoding = _blocks_of_one(plan, context, plan.limits.decode_in_flight) * num_seqs
    needed = needed_bytes(plan.spec, context) * num_seqs
    null_block_bytes = min(plan.num_slabs, 1) * plan.slab_bytes
    return Waste(
        context=context,
        num_seqs=num_seqs,
        needed_bytes=needed,
        padding_bytes=int((lent_blocks * (stride - payload)).sum()),
        partly_used_slab_bytes=int(((lent_blocks - blocks) * payload).sum()),
        tail_bytes=int((decoding * payload).sum()) - needed,
        in_flight_bytes=int(((blocks - decoding) * payload).sum()),
        null_block_bytes=null_block_bytes,
        unused_bytes=plan.memory_bytes - null_block_bytes - int(lent_slabs.sum()) * plan.slab_bytes,
        table_host_bytes=plan.table_bytes,
        table_device_bytes=plan.table_bytes,
    )


def _blocks_of_one(plan: CachePlan, context: int, in_flight: int) -> NDArray[np.int64]:
    return np.array([group.max_blocks(context, in_flight) for group in plan.groups], dtype=np.int64)


def _fits(pool: BlockPool, plan: CachePlan, context: int, num_seqs: int) -> bool:
    return bool(pool.fits_now(blocks_of(plan, context, num_seqs)))


def _check_context(plan: CachePlan, name: str, context: int) -> None:
    """Raise SpecError for a length that the plan's tables are not made for."""
    most = plan.limits.max_model_len
    if check_integer(name, context) > most:
        raise SpecError(f"{name}: got {context} tokens, the plan's tables are made for max_model_len={most}")
