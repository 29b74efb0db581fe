"""The claim that whatever verbs come, a block pool is what a simple model of it says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hybridkv.block_pool import BlockPool
from hybridkv.errors import InvariantError, OutOfBlocks
from hybridkv.plan import CachePlan
from tests.pool_model import MisuseError, PoolModel, known, plan_of

PLANS: dict[str, tuple[int, ...]] = {
    "one_group": (6, 4),
    "one_and_three_blocks": (7, 1, 3),
    "up_to_100_blocks": (5, 1, 100, 9),
    "states_in_parts": (12, 2, 5, 1),
    "many_groups": (16, 1, 1, 2, 3, 4),
}


class Walk:
    """Random verbs on a pool and on the model beside it; some of them misuse both."""

    def __init__(self, plan: CachePlan, seed: int) -> None:
        self.pool, self.model = BlockPool(plan), PoolModel(plan)
        self.rng = np.random.default_rng(seed)
        give_up = [self.release, self.release, self.uncache]
        self.verbs = [*[self.take] * 3, self.hold, self.cache, *give_up * 2, self.move, self.settle, self.settle]

    def chance(self, probability: float) -> bool:
        """A coin that falls heads with this probability."""
        return bool(self.rng.random() < probability)

    def some(self, kind: str) -> list[int]:
        """Blocks with holders or references: a few or many, rarely one of them twice, rarely one without."""
        blocks = [f for f, block in self.model.blocks.items() if getattr(block, kind)]
        most = len(blocks) if self.chance(0.2) else min(6, len(blocks))
        chosen = self.rng.permutation(blocks)[: self.rng.integers(0, most + 1)].tolist()
        if chosen and self.chance(0.2):
            chosen.append(chosen[0])
        if self.chance(0.05):
            chosen.append(int(self.rng.integers(-1, self.model.starts[-1] + 1)))
        return chosen

    def need(self, *columns: int) -> np.ndarray:
        """Counts for each group, most of them small, some near what a group can have."""
        share = self.rng.choice([1, 2, 4, 12, self.model.num_slabs * 2], (len(self.model.per_slab), *columns))
        most = np.array(self.model.per_slab).reshape(-1, *[1] * len(columns)) * self.model.num_slabs
        return (self.rng.random(share.shape) * most / share).astype(np.int64)

    def step(self) -> None:
        """One verb; then pool and model know the same."""
        self.verbs[self.rng.integers(len(self.verbs))]()
        self.compare()

    def both(self, in_pool: Callable[[], object], in_model: Callable[[], object]) -> None:
        """Call both; what the model refuses the pool refuses too, and nothing changes."""
        try:
            in_model()
        except MisuseError:
            before = known(self.pool)
            with pytest.raises((InvariantError, ValueError)):
                in_pool()
            assert known(self.pool) == before
        else:
            in_pool()

    def take(self) -> None:
        counts = self.need()
        missing = self.model.missing(counts)
        if any(missing):
            before = known(self.pool)
            with pytest.raises(OutOfBlocks) as raised:
                self.pool.take(counts)
            assert raised.value.shortfall == {group: count for group, count in enumerate(missing) if count}
            assert known(self.pool) == before
        else:
            lent = self.pool.take(counts).tolist()
            assert list(map(self.model.group_of, lent)) == np.arange(len(counts)).repeat(counts).tolist()
            self.model.take(lent)

    def hold(self) -> None:
        ids = self.some(str(self.rng.choice(["holders", "cached"])))
        self.both(lambda: self.pool.hold(np.array(ids, np.int64)), lambda: self.model.hold(ids))

    def release(self) -> None:
        ids, after_next = self.some("holders"), self.chance(0.2)
        self.both(
            lambda: self.pool.release(np.array(ids, np.int64), after_next=after_next),
            lambda: self.model.release(ids, after_next),
        )

    def cache(self) -> None:
        ids = self.some(str(self.rng.choice(["holders", "cached"])))
        self.both(lambda: self.pool.cache(np.array(ids, np.int64)), lambda: self.model.cache(ids))

    def uncache(self) -> None:
        ids = self.some("cached")
        self.both(lambda: self.pool.uncache(np.array(ids, np.int64)), lambda: self.model.uncache(ids))

    def move(self) -> None:
        sources = self.some(str(self.rng.choice(["holders", "cached"])))[:3]
        owners, targets = self.model.owners(), []
        for source in sources:
            free = [
                f
                for f in range(self.model.starts[-1])
                if self.model.state(f) == "free" and owners.get(self.model.slab_of(f)) == self.model.group_of(source)
            ]
            mine = [f for f in free if self.model.group_of(f) == self.model.group_of(source) and f not in targets]
            choice = mine if mine and self.chance(0.95) else [*free, *self.model.blocks]
            targets.append(int(self.rng.choice(choice or [0])))
        self.both(
            lambda: self.pool.move(np.array(sources, np.int64), np.array(targets, np.int64)),
            lambda: self.model.move(sources, targets),
        )

    def settle(self) -> None:
        if self.model.launched - self.model.settled < self.rng.integers(3):
            self.model.launched += 1
            assert self.pool.launch() == self.model.launched
        else:
            step = int(self.rng.integers(self.model.settled, self.model.launched + 2))
            step = self.model.launched if self.chance(0.6) else step
            self.both(lambda: self.pool.settle(step), lambda: self.model.settle(step))

    def compare(self) -> None:
        """The accounting adds up, and every block, count and verdict is the model's."""
        pool, model = self.pool, self.model
        pool.check()
        holders, cached = np.zeros_like(pool.holders), np.zeros_like(pool.cached)
        for f, block in model.blocks.items():
            holders[f], cached[f] = block.holders, block.cached
        assert np.array_equal(holders, pool.holders)
        assert np.array_equal(cached, pool.cached)
        draining = [f for f in sorted(model.blocks) if model.state(f) == "draining"]
        assert np.flatnonzero(pool.draining).tolist() == draining
        assert pool.peak_held.tolist() == model.peaks
        owners = model.owners()
        assert {s: pool.slab_owner[s] for s in np.flatnonzero(pool.slab_used).tolist()} == owners
        assert pool.num_free_slabs + pool.num_empty_slabs.sum() == model.num_slabs - 1 - len(owners)
        need, evicted = self.need(1), model.evicted()
        for column, counts in enumerate(need.T.tolist()):
            missing = evicted.missing(counts)
            assert pool.fits(need)[column] == (not any(missing))
            assert pool.shortfall(need)[:, column].tolist() == missing
            assert pool.fits_now(need)[column] == (not any(model.missing(counts)))


@pytest.mark.parametrize("num_verbs", [2_200, pytest.param(22_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", PLANS)
def test_any_verbs_leave_the_pool_as_the_model_says(name: str, num_verbs: int) -> None:
    """After thousands of random verbs, misuse included, every state, count and verdict is that of the simple model."""
    num_slabs, *per_slab = PLANS[name]
    walk = Walk(plan_of(num_slabs, *per_slab), seed=num_verbs)
    for _ in range(num_verbs):
        walk.step()
