"""Claims about who is let in and who gets blocks: exact verdicts, and that nobody waits for ever."""

from __future__ import annotations

import numpy as np
import pytest

from hybridkv.admission import Verdict
from hybridkv.errors import InvalidRequest
from hybridkv.limits import BatchLimits
from hybridkv.manager import CacheManager, ManagerOptions
from hybridkv.plan import CachePlan
from hybridkv.planner import plan_cache
from hybridkv.resume_policy import ResumePolicy
from hybridkv.specs import ModelSpec
from tests.manager_steps import feed, gemma_manager, serve, step
from tests.manager_world import recut
from tests.models import FULL, gemma_like, kv_cache, limits, model, plan_slabs, state_and_attention
from tests.snapshots import TIMES, snapshot

OK, LATER, NEVER = Verdict.OK, Verdict.LATER, Verdict.NEVER
FULL_ONLY = model(kv_cache(FULL))


def test_a_watermark_is_left_to_running_rows() -> None:
    """With a quarter of 8 slabs as watermark a second prompt may take 2 fewer; a first one may take all."""
    plan = plan_slabs(FULL_ONLY, 8, limits(4, 32, 32))
    manager = CacheManager(plan, options=ManagerOptions(watermark=0.25))
    first = manager.admit(32).admitted_row
    manager.finish(first)
    first = manager.admit(8).admitted_row
    manager.reserve([first], [8])
    answer = manager.admit(20)
    assert (answer.verdict, answer.shortfall) == (LATER, (1,))
    assert manager.admit(16).verdict == OK
    assert manager.reserve([first], [24]).num_ok == 1
    with pytest.raises(ValueError, match="watermark: got 1"):
        ManagerOptions(watermark=1)
    with pytest.raises(ValueError, match="host_bytes: got -1"):
        ManagerOptions(host_bytes=-1)


def test_a_waiting_prompt_says_what_it_lacks_and_changes_nothing() -> None:
    """LATER names the blocks missing in each group, and idle bytes of others; only times of use may move on."""
    manager = gemma_manager(5)
    step(manager, manager.admit(8).admitted_row, 8)
    before = snapshot(manager, ignore=TIMES)
    answer = manager.admit(list(range(12)))
    assert (answer.verdict, answer.row, answer.shortfall) == (LATER, None, (1, 2))
    assert answer.reason.startswith("short of 1 blocks of group 0, 2 blocks of group 1; ")
    assert answer.reason.endswith("stand idle in slabs of other groups; wait for a sequence to end")
    assert snapshot(manager, ignore=TIMES) == before


def test_a_waiting_prompt_with_a_hit_leaves_its_hit_where_it_was() -> None:
    """A prompt that hits and does not fit holds nothing afterwards: its prefix is cached, unpinned and evictable."""
    manager = CacheManager(plan_slabs(FULL_ONLY, 12, limits(3, 48, 48)))
    serve(manager, list(range(12)), salt="a")
    other = manager.admit(32).admitted_row
    step(manager, other, 32)
    cached = manager.pool.num_cached.tolist()
    answer = manager.admit([*range(12), *range(50, 70)], salt="a")
    assert (answer.verdict, answer.num_hit_tokens, answer.shortfall) == (LATER, 12, (4,))
    assert (manager.pool.num_held.tolist(), manager.pool.num_cached.tolist()) == ([8], cached)
    assert manager.index.evict(0, 3) == 3
    manager.check()


def test_a_sequence_alone_is_let_in_though_its_own_cache_stands_in_its_way() -> None:
    """Law 11: where its hit needs copies that do not fit beside it, a prompt that fits alone runs without the hit."""
    spec = state_and_attention()
    plan = plan_slabs(spec, 100, limits(2, 40, 40), {1: 4})
    plan = recut(plan, 100, [1, 100])
    plan = recut(plan, plan.slabs_for(40), [1, 100])
    manager = CacheManager(plan)
    serve(manager, list(range(30)))
    tokens = list(range(38))
    answer = manager.admit(tokens)
    assert (answer.verdict, answer.num_hit_tokens) == (OK, 0)
    feed(manager, answer.admitted_row, tokens)
    manager.check()


def test_a_lone_row_is_never_told_later() -> None:
    """Law 11: for every length that fits alone, a row gets all its blocks whatever is cached and scattered."""
    rng = np.random.default_rng(3)
    for seed in range(12):
        plan = plan_slabs(
            gemma_like(1, 2, window=9),
            60,
            limits(
                3,
                60,
                8,
            ),
            4,
        )
        plan = recut(plan, 60, rng.choice([1, 2, 3, 7, 30], size=2).tolist())
        plan = recut(plan, plan.slabs_for(44) + seed % 3, [group.blocks_per_slab for group in plan.groups])
        manager = CacheManager(plan)
        for _ in range(6):
            tokens = rng.integers(0, 2, size=int(rng.integers(1, 30))).tolist()
            other = manager.admit(tokens)
            if other.row is not None:
                feed(manager, other.row, tokens)
                manager.finish(other.row)
        longest = plan.longest_sequence()
        tokens = rng.integers(0, 2, size=longest).tolist()
        feed(manager, manager.admit(tokens[:20]).admitted_row, tokens)
        manager.check()


def test_decoding_rows_with_a_full_cache_always_get_blocks() -> None:
    """As long as what is held fits, cached prefixes make room: 400 decode steps never wait."""
    manager = CacheManager(plan_slabs(gemma_like(1, 1, window=6), 60, limits(3, 400, 16), 4))
    for base in range(0, 3000, 50):
        serve(manager, list(range(base, base + 30)))
    rows = [manager.admit([7, 8, row]).admitted_row for row in range(2)]
    for row in rows:
        feed(manager, row, [7, 8, row])
    longest = min(60, manager.plan.longest_sequence() // 3)
    for token in range(longest):
        outcome = manager.reserve(rows, [1, 1])
        assert outcome.verdicts.tolist() == [OK, OK]
        manager.commit(rows, [1, 1], [token, token])
    assert manager._store.lender.num_evictions > 20
    manager.check()


def test_reserve_says_never_to_a_row_that_outgrows_the_memory_and_later_to_others() -> None:
    """Rows that would fit alone wait, one that would not is told so, each with what all before it lack too."""
    manager = CacheManager(plan_slabs(FULL_ONLY, 4, limits(3, 40, 40)))
    rows = [manager.admit(4).admitted_row for _ in range(3)]
    outcome = manager.reserve(rows, [4, 20, 16])
    assert outcome.verdicts.tolist() == [OK, NEVER, LATER]
    assert outcome.shortfall.tolist() == [[0, 2, 6]]


# Slabs that go back and forth


REAL = BatchLimits(64, 16_384, 2048)


def small_plan(name: str, num_long: int, per_slab: int | None = None) -> CachePlan:
    """A real model's plan with memory for about `num_long` sequences of 8,192 tokens."""
    spec = ModelSpec.load(name)
    plan = plan_cache(spec, 2**36, REAL, block_size=16)
    counts = [group.blocks_per_slab if per_slab is None else per_slab for group in plan.groups]
    num_parts = max(group.num_parts for group in plan.groups)
    least = recut(plan, 10_000, counts, num_parts).slabs_for(8192)
    return recut(plan, num_long * least, counts, num_parts)


@pytest.mark.parametrize("per_slab", [None, 1, 7, 100])
@pytest.mark.parametrize("name", ["gemma-3-27b", "Bamba-9B-v1", "Qwen3.5-9B"])
def test_long_contexts_and_many_sequences_take_turns(name: str, per_slab: int | None) -> None:
    """A full cache never refuses what fits without it: phases of 2 long and of many short sequences alternate."""
    plan = small_plan(name, 3, per_slab)
    manager = CacheManager(plan, options=ManagerOptions(resume_points=ResumePolicy(every=4096)))
    rng = np.random.default_rng(5)
    many = next(n for n in range(64, 0, -1) if _slabs(plan, 256, n) <= plan.num_usable_slabs * 2 // 3)
    for phase in range(6):
        length, count = ((8000, 2), (200, many))[phase % 2]
        rows, prompts = [], []
        for _ in range(count):
            tokens = rng.integers(0, 50_000, size=length).tolist()
            answer = manager.admit(tokens)
            assert answer.verdict == OK, answer.reason
            feed(manager, answer.admitted_row, tokens, 2048)
            rows.append(answer.admitted_row)
            prompts.append(tokens)
        for _ in range(20):
            outcome = manager.reserve(rows, [1] * len(rows))
            assert outcome.num_ok == len(rows), outcome.shortfall
            manager.take_copies()
            manager.commit(rows, [1] * len(rows), [1] * len(rows))
        manager.check()
        for row in rows:
            manager.finish(row)
    assert (manager.pool.num_cached > 0).all()


def _slabs(plan: CachePlan, num_tokens: int, num_seqs: int) -> int:
    """Slabs for so many sequences at once, however their blocks lie."""
    blocks = [group.max_blocks(num_tokens, plan.limits.max_in_flight) * num_seqs for group in plan.groups]
    return sum(-(-count // group.blocks_per_slab) for count, group in zip(blocks, plan.groups, strict=True))


def test_ids_and_lengths_that_are_none_are_refused() -> None:
    """A prompt longer than `max_model_len` raises; a total too long for the memory is NEVER, before a row is taken."""
    manager = CacheManager(plan_slabs(FULL_ONLY, 4, limits(3, 40, 40)))
    with pytest.raises(InvalidRequest, match="max_model_len=40"):
        manager.admit(list(range(41)))
    answer = manager.admit(list(range(8)), 20)
    assert (answer.verdict, answer.row, answer.shortfall) == (NEVER, None, (1,))
    assert manager.num_free_rows == 3
