"""A block pool that is obviously right: a dict of the blocks that are not free, everything else counted afresh."""

from __future__ import annotations

import bisect
import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridkv.block_pool import BlockPool
from hybridkv.plan import CachePlan
from hybridkv.specs import SlidingWindow
from tests.models import kv_cache, model, plan_slabs
from tests.snapshots import snapshot

Verb = Callable[[BlockPool], object]


class MisuseError(Exception):
    """A call that the pool has to refuse."""


@dataclass
class Block:
    """What is known of a block that is not free."""

    holders: int = 0
    cached: int = 0
    until: int = 0


class PoolModel:
    """Blocks by flat id; a block that is held, drains or is cached has an entry, a free one has none."""

    def __init__(self, plan: CachePlan) -> None:
        self.per_slab = [group.blocks_per_slab for group in plan.groups]
        self.starts = np.cumsum([0, *(group.num_blocks for group in plan.groups)]).tolist()
        self.num_slabs = plan.num_slabs
        self.blocks: dict[int, Block] = {}
        self.launched = 0
        self.settled = 0
        self.peaks = [0] * len(self.per_slab)

    def group_of(self, flat: int) -> int:
        """The group whose block this is."""
        return bisect.bisect(self.starts, flat) - 1

    def slab_of(self, flat: int) -> int:
        """The slab a block lies in."""
        group = self.group_of(flat)
        return (flat - self.starts[group]) // self.per_slab[group]

    def state(self, flat: int) -> str:
        """Held, draining, cached or free."""
        block = self.blocks.get(flat, Block())
        if block.holders:
            return "held"
        if block.until > self.settled:
            return "draining"
        return "cached" if block.cached else "free"

    def num(self, group: int, state: str) -> int:
        """How many blocks of a group are in a state."""
        return sum(self.group_of(flat) == group and self.state(flat) == state for flat in self.blocks)

    def owners(self) -> dict[int, int]:
        """The slabs that are not empty, with the group each belongs to."""
        return {self.slab_of(flat): self.group_of(flat) for flat in self.blocks}

    def evicted(self) -> PoolModel:
        """The pool without the blocks that are only cached."""
        other = copy.copy(self)
        other.blocks = {flat: block for flat, block in self.blocks.items() if self.state(flat) != "cached"}
        return other

    def missing(self, need: Sequence[int]) -> list[int]:
        """Blocks of each group that cannot be lent as things are, if groups help themselves one after the other."""
        owners = self.owners()
        num_slabs, in_use = Counter(owners.values()), Counter(map(self.group_of, self.blocks))
        num_empty = self.num_slabs - 1 - len(owners)
        missing = []
        for group, count in enumerate(need):
            per_slab = self.per_slab[group]
            available = num_slabs[group] * per_slab - in_use[group]
            while available < count and num_empty > 0:
                available, num_empty = available + per_slab, num_empty - 1
            missing.append(max(0, count - available))
        return missing

    def take(self, lent: Sequence[int]) -> None:
        """Lend the blocks that a pool chose; each has to be free, in a slab that its group can have."""
        owners = self.owners()
        for flat in lent:
            group, slab = self.group_of(flat), self.slab_of(flat)
            assert self.state(flat) == "free", f"{flat} is {self.state(flat)}"
            assert 0 < slab < self.num_slabs, f"{flat} lies in slab {slab}"
            assert owners.setdefault(slab, group) == group, f"{flat} lies in another group's slab"
            self.blocks[flat] = Block(holders=1)
        self._note_peaks()

    def hold(self, flat: Sequence[int]) -> None:
        """One more holder each."""
        self._refuse(any(self.state(f) == "free" or not self.blocks[f].holders + self.blocks[f].cached for f in flat))
        for f in flat:
            self.blocks[f].holders += 1
        self._note_peaks()

    def release(self, flat: Sequence[int], after_next: bool) -> None:
        """One holder less each."""
        self._refuse(any(self.blocks.get(f, Block()).holders < times for f, times in Counter(flat).items()))
        for f in flat:
            block = self.blocks[f]
            block.holders -= 1
            if not block.holders:
                block.until = max(block.until, self.launched + after_next)
        self._drop_free()

    def cache(self, flat: Sequence[int]) -> None:
        """One more reference of the index each."""
        self._refuse(any(self.state(f) == "free" or not self.blocks[f].holders + self.blocks[f].cached for f in flat))
        for f in flat:
            self.blocks[f].cached += 1

    def uncache(self, flat: Sequence[int]) -> None:
        """One reference of the index less each."""
        self._refuse(any(self.blocks.get(f, Block()).cached < times for f, times in Counter(flat).items()))
        for f in flat:
            self.blocks[f].cached -= 1
        self._drop_free()

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """The targets become what the sources were; the sources drain."""
        owners, last = self.owners(), self.starts[-1] - 1
        self._refuse(any(not 0 <= f <= last for f in (*sources, *targets)))
        self._refuse(len({*sources, *targets}) < len(sources) + len(targets))
        for source, target in zip(sources, targets, strict=True):
            group = self.group_of(target)
            self._refuse(self.state(source) not in ("held", "cached") or self.group_of(source) != group)
            self._refuse(self.state(target) != "free" or owners.get(self.slab_of(target)) != group)
        for source, target in zip(sources, targets, strict=True):
            block = self.blocks[source]
            self.blocks[target] = Block(block.holders, block.cached)
            self.blocks[source] = Block(until=max(block.until, self.launched + 1))

    def settle(self, step: int) -> None:
        """Steps up to this one have finished."""
        self._refuse(not self.settled < step <= self.launched)
        self.settled = step
        self._drop_free()

    def _drop_free(self) -> None:
        self.blocks = {flat: block for flat, block in self.blocks.items() if self.state(flat) != "free"}

    def _note_peaks(self) -> None:
        self.peaks = [max(peak, self.num(group, "held")) for group, peak in enumerate(self.peaks)]

    def _refuse(self, is_misuse: bool) -> None:
        if is_misuse:
            raise MisuseError


def plan_of(num_usable_slabs: int, *blocks_per_slab: int) -> CachePlan:
    """A plan whose groups cut a slab into these numbers of blocks."""
    spec = model(*[kv_cache(SlidingWindow(window=8 + i)) for i in range(len(blocks_per_slab))])
    plan = plan_slabs(spec, len(blocks_per_slab) + num_usable_slabs)
    groups = [
        replace(group, blocks_per_slab=count, num_blocks=count * (num_usable_slabs + 1))
        for group, count in zip(plan.groups, blocks_per_slab, strict=True)
    ]
    return replace(plan, num_slabs=num_usable_slabs + 1, groups=tuple(groups))


def pool_of(num_slabs: int, *blocks_per_slab: int) -> BlockPool:
    """A pool whose groups cut a slab into these numbers of blocks."""
    return BlockPool(plan_of(num_slabs, *blocks_per_slab))


def one_and_three(num_slabs: int) -> BlockPool:
    """Group 0 cuts a slab into 1 block, group 1 into 3: slab 2 is block 2 of group 0, or 6, 7, 8 of group 1."""
    return pool_of(num_slabs, 1, 3)


def three_and_two(num_slabs: int) -> BlockPool:
    """Group 0 cuts a slab into 3 blocks, group 1 into 2."""
    return pool_of(num_slabs, 3, 2)


def flat(pool: BlockPool, group: int, *block_ids: int) -> np.ndarray:
    """The flat ids of blocks of one group."""
    return pool.offsets[group] + np.array(block_ids, dtype=np.int64)


def take(pool: BlockPool, *counts: int) -> list[list[int]]:
    """Take blocks; return each group's block ids."""
    lent = np.split(pool.take(counts), np.cumsum(counts)[:-1])
    return [(ids - offset).tolist() for ids, offset in zip(lent, pool.offsets.tolist(), strict=True)]


def known(pool: BlockPool) -> object:
    """Everything a pool remembers, its counts brought up to date."""
    pool.check()
    return snapshot(pool)


def states(pool: BlockPool) -> list[list[int]]:
    """Held, draining, cached and free blocks of each group."""
    return [pool.num_held.tolist(), pool.num_draining.tolist(), pool.num_cached.tolist(), pool.num_free.tolist()]
