"""Claims about what the prefix index gives up, and in which order."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from hybridkv.eviction import CostPolicy, EvictionPolicy, GhostCache, LruPolicy, PointStats, SelfTuningPolicy
from hybridkv.index_layout import IndexLayout
from hybridkv.limits import BatchLimits
from hybridkv.plan import CachePlan
from hybridkv.planner import plan_cache
from hybridkv.specs import ModelSpec, SlidingWindow
from tests.models import FULL, kv_cache, limits, model, plan_slabs, state_cache
from tests.prefix_world import CachedPrompt, PrefixWorld, cache_prompt

LONG = BatchLimits(max_num_seqs=8, max_model_len=16_384, max_num_batched_tokens=2_048)
PROMPT, SPACING = 8_192, 1_024
FULL_CACHE = kv_cache(FULL)


def plan_of(name: str) -> CachePlan:
    """A plan of a real model, or of a small one with all kinds of groups."""
    if name == "all_kinds":
        spec = model(FULL_CACHE, kv_cache(SlidingWindow(window=1_024)), state_cache())
        return plan_cache(spec, 2**24, LONG, block_size={0: 16, 1: 16})
    return plan_cache(ModelSpec.load(name), 8 * 2**30, LONG, block_size=16)


@pytest.mark.parametrize("name", ["Qwen3-8B", "gpt-oss-20b", "gemma-3-27b", "Bamba-9B-v1", "all_kinds"])
def test_a_long_prefix_goes_a_little_at_a_time(name: str) -> None:
    """Evicting k trunk blocks of 8,192 cached tokens costs at most k blocks of hit and the spacing of its points."""
    plan = plan_of(name)
    cached = cache_prompt(plan, PROMPT, list(range(SPACING, PROMPT + 1, SPACING)))
    (group,), unit = cached.index.layout.full, cached.index.unit
    spacing = SPACING if len(plan.groups) > 1 else 0
    assert cached.hit() == PROMPT
    given_up = 0
    for count in (1, 2, 7, 60, 130, 200):
        before = cached.index.num_nodes
        freed = cached.index.evict(group, count)
        cached.index.check()
        given_up += freed
        assert freed == count == before - cached.index.num_nodes
        assert PROMPT - given_up * unit - spacing <= cached.hit() <= PROMPT - given_up * unit
        # What is left of the path is what it began with, and its points go with their units.
        assert cached.index.find(cached.tokens).path.tolist() == cached.nodes[: cached.index.num_nodes].tolist()
        assert all(point.position <= PROMPT - given_up * unit for point in cached.index.points.all())
    assert cached.hit() > 0


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3-27b", "Bamba-9B-v1", "all_kinds"])
def test_points_go_whole_and_the_last_one_last(name: str) -> None:
    """Evicting window or state blocks drops whole points, and while one is left the hit is at most a step shorter."""
    plan = plan_of(name)
    groups = IndexLayout.of(plan)
    for group in (*groups.windowed, *groups.states):
        cached = cache_prompt(plan, PROMPT, list(range(SPACING, PROMPT + 1, SPACING)))
        while cached.index.num_resume_points > 1:
            left = cached.index.num_resume_points
            assert cached.index.evict(group, 1) >= 1
            cached.index.check()
            assert cached.index.num_resume_points == left - 1
            assert cached.hit() == PROMPT
        assert cached.index.evict(group, 10**6) > 0
        assert (cached.index.num_resume_points, cached.hit()) == (0, 0)
        assert cached.index.num_nodes == PROMPT // cached.index.unit
        assert not cached.pool.num_cached[group]


def test_the_trunk_goes_leaf_first_and_oldest_first() -> None:
    """Of two prefixes with a common beginning the branch that was used longest ago goes first, from its end on."""
    world = PrefixWorld(plan_slabs(model(FULL_CACHE), 100, limits(), 2))
    common = [1, 2, 3, 4]
    for branch in ([5] * 6, [6] * 6, [7] * 6):
        world.finish(world.admit(common + branch), keep=False)
    world.index.touch(world.find([*common, 5, 5, 5, 5, 5]))
    sizes = [(6, 6, 6)]
    for _ in range(11):
        assert world.evict(0, 1) == 1
        world.check()
        lengths = [world.find(common + [branch] * 6 + [0]).num_shared_tokens - 4 for branch in (5, 6, 7)]
        sizes.append(tuple(lengths))
    # The last unit of the first branch was not touched: it is as old as when that row ended.
    assert sizes[1:11] == [
        (4, 6, 6),
        (4, 4, 6),
        (4, 2, 6),
        (4, 0, 6),
        (4, 0, 4),
        (4, 0, 2),
        (4, 0, 0),
        (2, 0, 0),
        (0, 0, 0),
        (-2, -2, -2),
    ]
    assert world.index.num_nodes == 0


def test_batches_evict_as_single_blocks_do() -> None:
    """However many blocks are asked for at once, the same nodes are left, also where a queue is used again later."""

    def left(batches: list[int]) -> tuple[list[int], int]:
        world = PrefixWorld(plan_slabs(model(FULL_CACHE), 400, limits(max_model_len=256), 2))
        rng = random.Random(3)
        prompts = [[rng.randint(0, 1) for _ in range(24)] for _ in range(12)]
        for prompt in prompts:
            world.finish(world.admit(prompt), keep=False)
        for count in batches:
            if count:
                world.evict(0, count)
            else:
                world.index.touch(world.find([*prompts[2], 0]))
            world.check()
        return [world.find([*prompt, 0]).num_hit_tokens for prompt in prompts], world.index.num_nodes

    assert left([1] * 20 + [0] + [1] * 20) == left([20, 0, 20]) == left([7, 13, 0, 1, 19])
    assert left([1] * 20 + [0] + [1] * 20) != left([20, 20])


def test_old_tails_go_with_the_trunk() -> None:
    """Tails behind a node that is always in use do not pile up: those older than what is evicted go too."""
    world = PrefixWorld(plan_slabs(model(FULL_CACHE), 400, limits(max_model_len=256), 4))
    running = world.admit([1, 2, 3, 4, 5])
    for token in range(6, 20):
        world.finish(world.admit([1, 2, 3, 4, token]))
    world.finish(world.admit([9] * 8), keep=False)
    assert world.index.num_resume_points == 14
    assert world.evict(0, 1) >= 1
    world.check()
    assert world.index.num_resume_points == 0
    world.finish(running)


def test_points_of_equal_value_go_in_order_of_position() -> None:
    """The least valuable point goes first; a policy of one's own decides, and of equal ones the earliest goes."""

    class Flat(LruPolicy):
        def value(self, points: PointStats) -> np.ndarray:
            return np.zeros(len(points.position))

    class LongestFirst(LruPolicy):
        def value(self, points: PointStats) -> np.ndarray:
            return -points.position.astype(np.float64)

    for policy, expected in ((Flat(), [2048, 3072]), (LongestFirst(), [1024, 2048])):
        cached = cache_prompt(plan_of("all_kinds"), 3 * SPACING, [SPACING, 2 * SPACING, 3 * SPACING], policy=policy)
        cached.index.evict(2, 1)
        assert sorted(point.position for point in cached.index.points.all()) == expected


def test_blocks_that_rows_hold_are_not_counted() -> None:
    """Points whose blocks are all held free nothing and stay; `evict` and `num_freed` count what became free."""
    world = PrefixWorld(plan_slabs(model(FULL_CACHE, kv_cache(SlidingWindow(window=4))), 100, limits(), 2))
    row = world.admit([1, 2, 3, 4])
    world.keep(row)
    assert world.evict(1, 5) == 0
    assert world.index.num_resume_points == 1
    world.finish(row, keep=False)
    assert world.evict(1, 5) == 2
    assert world.evict(0, 5) == 2
    assert world.index.num_freed.tolist() == [2, 2]
    assert world.index.evict(0, 5) == 0


def test_draining_blocks_are_not_counted() -> None:
    """Blocks that a step in flight may touch do not become free by eviction, and are not counted as if they did."""
    world = PrefixWorld(plan_slabs(model(FULL_CACHE), 100, limits(), 2))
    row = world.admit([1, 2, 3, 4])
    step = world.pool.launch()
    world.finish(row)
    assert world.index.evict(0, 1) == 0
    assert world.index.num_nodes == 0
    world.index.check()
    world.pool.settle(step)
    assert world.pool.num_draining[0] == world.pool.num_cached[0] == 0


def test_blocks_are_as_old_as_their_owners() -> None:
    """The slab ladder sees for each block when its node or point was last used, 0 for blocks that are not cached."""
    cached: CachedPrompt = cache_prompt(plan_of("all_kinds"), 2 * SPACING, [SPACING, 2 * SPACING])
    index = cached.index
    index.touch(index.find(np.append(cached.tokens[:SPACING], 1)))
    used = index.last_used_of_blocks()
    assert ((used > 0) == (cached.pool.cached > 0)).all()
    young, old = sorted(index.points.all(), key=lambda point: point.position)
    assert used[young.states].min() > used[old.states].max() > 0
    trunk = used[index.trunk.nodes.blocks[cached.nodes, 0]]
    assert (np.diff(trunk) <= 0).all()
    assert trunk[0] > trunk[-1]


# Policies


def stats_of(**columns: list[float]) -> PointStats:
    """Statistics of a few points."""
    count = len(next(iter(columns.values())))
    whole = {
        name: np.array(columns.get(name, [1] * count), dtype=np.int64)
        for name in ("last_used", "num_tokens", "num_bytes", "position")
    }
    return PointStats(uses=np.array(columns.get("uses", [1] * count), dtype=np.float64), **whole)


def test_the_policies_rank_as_they_say() -> None:
    """LRU looks at the last use alone; the cost-aware one at uses, tokens saved and bytes, old uses counting less."""
    assert LruPolicy().value(stats_of(last_used=[5, 3], uses=[1, 99])).tolist() == [5, 3]
    for better in ({"uses": [1, 2]}, {"num_tokens": [10, 20]}, {"num_bytes": [20, 10]}, {"last_used": [1, 9_000]}):
        worse, best = CostPolicy().value(stats_of(**better)).tolist()
        assert worse < best
    assert CostPolicy().value(PointStats.empty(0)).shape == (0,)


Access = tuple[int, int, int]


def tenants_and_noise(num_uses: int, seed: int = 0) -> Iterator[Access]:
    """Big prompts that come again now and then, lost under LRU in a stream of small ones that never do."""
    rng = random.Random(seed)
    for i in range(num_uses):
        yield (rng.randint(0, 9), 8_000, 10) if i % 8 == 0 else (1_000 + i, 100, 10)


def moving_focus(num_uses: int, seed: int = 1) -> Iterator[Access]:
    """A few prompts used over and over, then never again, and other, cheaper ones instead."""
    rng = random.Random(seed)
    for i in range(num_uses):
        phase = i // 400
        yield phase * 100 + rng.randint(0, 11), max(8_000 - 700 * phase, 50), 10


def saved(policy: EvictionPolicy, accesses: Iterator[Access], num_bytes: int = 150) -> int:
    """Tokens that hits save in a cache of so many bytes under a policy that hears of every use."""
    there: dict[int, dict[str, float]] = {}
    total = 0
    for now, (identity, num_tokens, size) in enumerate(accesses):
        if identity in there:
            total += num_tokens
        policy.record(identity, num_tokens, size)
        point = there.setdefault(identity, {"uses": 0, "last_used": now, "num_tokens": num_tokens, "num_bytes": size})
        point["uses"] = point["uses"] * 0.5 ** ((now - point["last_used"]) / 4096) + 1
        point["last_used"] = now
        while sum(point["num_bytes"] for point in there.values()) > num_bytes:
            names = [name for name in there if name != identity]
            columns = {
                key: [there[name][key] for name in names] for key in ("uses", "last_used", "num_tokens", "num_bytes")
            }
            del there[names[int(policy.value(stats_of(**columns)).argmin())]]
    return total


def test_cost_awareness_wins_where_cost_tells() -> None:
    """Where big prompts return through noise the cost-aware policy saves several times more; the tuning one follows."""
    by_lru, by_cost = (saved(policy, tenants_and_noise(4_000)) for policy in (LruPolicy(), CostPolicy()))
    tuning = SelfTuningPolicy(150)
    assert by_cost > 2 * by_lru
    assert saved(tuning, tenants_and_noise(4_000)) > 0.9 * by_cost
    assert isinstance(tuning.leader, CostPolicy)


def test_the_tuning_policy_never_stays_below_lru() -> None:
    """Where costs mislead LRU saves more, and the tuning policy is back with it: never below by more than noise."""
    by_lru, by_cost = (saved(policy, moving_focus(4_000)) for policy in (LruPolicy(), CostPolicy()))
    tuning = SelfTuningPolicy(150)
    assert by_cost < 0.9 * by_lru
    assert saved(tuning, moving_focus(4_000)) >= 0.98 * by_lru
    assert isinstance(tuning.leader, LruPolicy)


def test_the_tuning_policy_switches_back() -> None:
    """After a time in which cost told, a time in which it misleads brings least-recently-used back."""
    tuning = SelfTuningPolicy(150)
    for access in tenants_and_noise(3_000):
        tuning.record(*access)
    assert isinstance(tuning.leader, CostPolicy)
    shifted = ((10**6 + identity, num_tokens, size) for identity, num_tokens, size in moving_focus(400))
    for access in shifted:
        tuning.record(*access)
    assert isinstance(tuning.leader, LruPolicy)
    assert 2 <= tuning.num_switches < 20


def test_a_ghost_keeps_to_its_bytes() -> None:
    """A ghost cache holds at most its bytes, forgets by its policy, and takes nothing larger than itself."""
    ghost = GhostCache(LruPolicy(), 1_000)
    rng = random.Random(0)
    for i in range(3_000):
        ghost.record(rng.randint(0, 900), 7, rng.randint(1, 9))
        assert ghost.num_used_bytes <= 1_000 + 9
        assert len(ghost) > 100 or i < 400
    before = len(ghost)
    ghost.record(10**6, 7, 1_001)
    assert len(ghost) == before
    small = GhostCache(LruPolicy(), 30)
    for identity in (1, 2, 3, 1, 4):
        small.record(identity, 100, 10)
    small.record(1, 100, 10)
    assert small.saved_tokens == pytest.approx(200, rel=0.01)
    small.record(2, 100, 10)
    assert small.saved_tokens == pytest.approx(200, rel=0.01)


def test_an_index_can_be_run_by_the_tuning_policy() -> None:
    """With the tuning policy a history keeps every law, and every new or used point is heard of."""
    heard = []

    class Listening(SelfTuningPolicy):
        def record(self, identity: int, num_tokens: int, num_bytes: int) -> None:
            heard.append((identity, num_tokens, num_bytes))
            super().record(identity, num_tokens, num_bytes)

    spec = model(FULL_CACHE, kv_cache(SlidingWindow(window=5)), state_cache())
    world = PrefixWorld(plan_slabs(spec, 40, limits(max_model_len=256), {0: 2, 1: 2, 2: 1}), policy=Listening(10**4))
    rng = random.Random(0)
    for _ in range(60):
        row = world.admit([rng.randint(0, 1) for _ in range(rng.randint(4, 20))])
        if row is not None:
            world.finish(row)
        world.check()
    assert len(heard) > 60
    assert min(min(num_tokens, num_bytes) for _, num_tokens, num_bytes in heard) > 0
    assert len({identity for identity, _, _ in heard}) < len(heard)
