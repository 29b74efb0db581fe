"""Claims about what a sequence finds in the cache: how long a hit is, what is shared or copied, where points lie."""

from __future__ import annotations

import numpy as np
import pytest

from hybridkv.admission import Verdict
from hybridkv.manager import CacheManager, ManagerOptions
from hybridkv.resume_policy import ResumePolicy
from hybridkv.specs import ModelSpec
from tests.manager_steps import feed, row_ids, serve
from tests.models import FULL, gemma_like, kv_cache, limits, model, plan_slabs, state_and_attention, state_cache

FULL_ONLY = model(kv_cache(FULL))
LIMITS = limits(max_num_seqs=4, max_model_len=200, max_num_batched_tokens=200)


def manager_of(spec: ModelSpec = FULL_ONLY, num_slabs: int = 400, **policy: object) -> CacheManager:
    """A manager with blocks of 4 tokens and plenty of memory."""
    options = ManagerOptions(resume_points=ResumePolicy(**policy))  # type: ignore[arg-type]
    return CacheManager(plan_slabs(spec, num_slabs, LIMITS, dict.fromkeys(_token_groups(spec), 4)), options=options)


def _token_groups(spec: ModelSpec) -> list[int]:
    plan = plan_slabs(spec, 400, LIMITS)
    return [g for g, group in enumerate(plan.groups) if not group.group.is_state]


def points(manager: CacheManager) -> list[int]:
    """The positions of all resume points, rising."""
    return sorted(point.position for point in manager.index.points.all())


SPECS = {
    "full": FULL_ONLY,
    "window": gemma_like(1, 1, window=6),
    "state": state_and_attention(),
    "window and state": model(*gemma_like(1, 1, window=6).layers[0].caches, kv_cache(FULL), state_cache()),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_a_prompt_of_exactly_k_blocks_hits_all_but_the_last(name: str, num_blocks: int) -> None:
    """Law 9: at least one token is left to compute, so of k whole blocks k-1 are hit, whatever the groups."""
    manager = manager_of(SPECS[name])
    prompt = list(range(4 * num_blocks))
    serve(manager, prompt)
    for _ in range(2):  # looking it up changes nothing
        answer = manager.admit(prompt)
        assert answer.num_hit_tokens == 4 * (num_blocks - 1)
        manager.finish(answer.admitted_row)
    feed(manager, (answer := manager.admit(prompt)).admitted_row, prompt)
    manager.check()


@pytest.mark.parametrize("name", SPECS)
def test_the_next_turn_hits_the_whole_last_turn(name: str) -> None:
    """A conversation of 22 tokens is hit whole by its next turn; the frozen part of a block is copied, not written."""
    manager = manager_of(SPECS[name])
    last_turn = list(range(22))
    serve(manager, last_turn, num_prompt=13)
    answer = manager.admit([*last_turn, 90, 91])
    assert answer.num_hit_tokens == 22
    row = answer.admitted_row
    copies = manager.take_copies()
    frozen = {(group, source) for group, source, _ in copies.within.tolist()}
    for group, ids in enumerate(row_ids(manager, row)):
        cached = manager.pool.cached[manager.pool.offsets[group] + np.array(ids)] > 0
        is_state = manager.plan.groups[group].group.is_state
        assert cached.tolist() == [not is_state] * (len(ids) - 1) + [False]
        assert sum(g == group for g, _ in frozen) == 1
    assert [target for _, _, target in copies.within.tolist()] == [ids[-1] for ids in row_ids(manager, row)]
    feed(manager, row, [*last_turn, 90, 91])
    manager.check()
    other = manager.admit([*last_turn, 70])
    assert other.num_hit_tokens == 22
    assert {(g, s) for g, s, _ in manager.take_copies().within.tolist()} == frozen


def test_what_is_shared_is_held_twice_and_the_rest_is_its_own() -> None:
    """Two rows with one prefix of 9 tokens share its 2 whole blocks in place and nothing else."""
    manager = manager_of()
    rows = []
    for last in (50, 60):
        answer = manager.admit([*range(9), last])
        rows.append(answer.admitted_row)
        feed(manager, rows[-1], [*range(9), last, 1, 2, 3])
    first, second = (row_ids(manager, row)[0] for row in rows)
    assert first[:2] == second[:2]
    assert set(first[2:]).isdisjoint(second[2:])
    assert manager.pool.holders[first].tolist() == [2, 2, 1, 1]
    manager.finish(rows[0])
    assert manager.pool.holders[second].tolist() == [1, 1, 1, 1]
    assert row_ids(manager, rows[0]) == [[]]
    manager.check()


def test_a_salt_and_features_keep_caches_apart() -> None:
    """Equal tokens hit only under an equal salt and with equal features at equal places, as far as they are equal."""
    manager = manager_of()
    prompt = list(range(20))
    serve(manager, prompt, salt="tenant", features=[(9, "image a")])

    def hit(**identity: object) -> int:
        answer = manager.admit(prompt, **identity)  # type: ignore[arg-type]
        manager.finish(answer.admitted_row)
        return answer.num_hit_tokens

    assert hit() == 0
    assert hit(salt="tenant", features=[(9, "image a")]) == 16
    assert hit(salt="other", features=[(9, "image a")]) == 0
    assert hit(salt="tenant", features=[(9, "image b")]) == 8
    assert hit(salt="tenant", features=[(10, "image a")]) == 8
    assert hit(salt="tenant") == 8
    assert hit(salt="tenant", features=[(9, "image a"), (17, "image c")]) == 16


def test_without_caching_or_without_ids_nothing_is_found() -> None:
    """A manager without prefix caching, or a prompt that is only a length, hits nothing and caches nothing."""
    plan = plan_slabs(FULL_ONLY, 100, LIMITS)
    without = CacheManager(plan, options=ManagerOptions(prefix_caching=False))
    assert without.index is None
    for _ in range(2):
        assert serve(without, list(range(20))).num_hit_tokens == 0
    assert without.pool.num_held.tolist() == [0]
    manager = manager_of()
    for _ in range(2):
        row = manager.admit(20).admitted_row
        manager.reserve([row], [20])
        manager.commit([row], [20])
        manager.finish(row)
    assert (manager.index.num_nodes, manager.pool.num_cached.tolist()) == (0, [0])


def test_tokens_committed_without_ids_end_what_a_row_caches() -> None:
    """A commit without ids keeps what was cached of the row before and adds nothing behind it."""
    manager = manager_of()
    row = manager.admit(list(range(8))).admitted_row
    feed(manager, row, list(range(8)))
    manager.reserve([row], [8])
    manager.commit([row], [8])
    manager.finish(row)
    manager.check()
    assert manager.admit([*range(16), 1]).num_hit_tokens == 8


@pytest.mark.parametrize("name", ["full", "window", "state"])
def test_external_tokens_get_blocks_and_are_computed_once_committed(name: str) -> None:
    """Of 150 tokens that come from elsewhere a row has what the next query sees; it goes on behind them."""
    manager = manager_of(SPECS[name])
    prompt = list(range(160))
    row = manager.admit(prompt, external_tokens=150).admitted_row
    assert (manager.num_computed_tokens[row], manager.capacity_tokens[row]) == (0, 150)
    for group, plan in enumerate(manager.plan.groups):
        first, count = manager.tables[group].first_block_per_row[row], manager.tables[group].num_blocks_per_row[row]
        wanted = {"full_attention": (0, 38), "sliding_window": (145 // 4, 38), "state": (0, plan.num_parts)}
        assert (first, count) == wanted[plan.group.lifecycle.kind]
    manager.commit([row], [150], prompt[:150])
    manager.check()
    assert manager.num_settled_tokens[row] == 150
    feed(manager, row, prompt)
    manager.finish(row)
    answer = manager.admit([*prompt, 1], external_tokens=100)
    assert answer.num_hit_tokens == 160
    assert manager.capacity_tokens[answer.admitted_row] == 160


def test_more_external_tokens_than_a_prompt_leaves_are_cut() -> None:
    """At least one token of a prompt is left to compute, whatever comes from elsewhere."""
    manager = manager_of()
    row = manager.admit(list(range(12)), external_tokens=12).admitted_row
    assert manager.capacity_tokens[row] == 11


# Resume points


def test_points_lie_at_fixed_steps_and_before_the_prompts_volatile_end() -> None:
    """With a point every 8 tokens and a volatile suffix of 6, a prompt of 31 tokens keeps its states at 8, 16, 24."""
    manager = manager_of(SPECS["state"], every=8, volatile_suffix_tokens=6, finish=False)
    serve(manager, list(range(31)))
    assert points(manager) == [8, 16, 24]
    manager = manager_of(SPECS["state"], volatile_suffix_tokens=6, finish=False)
    serve(manager, list(range(31)))
    assert points(manager) == [24]
    assert manager.admit([*range(25), 99, 99]).num_hit_tokens == 24


def test_a_branch_keeps_a_point_where_others_left() -> None:
    """A prompt that shares 18 tokens of which no state is kept gets a point at 16: the third one hits it."""
    manager = manager_of(SPECS["state"], prompt_end=False, finish=False)
    shared = list(range(18))
    assert serve(manager, [*shared, 50, 51, 52, 53]).num_hit_tokens == 0
    assert points(manager) == []
    assert serve(manager, [*shared, 60, 61, 62, 63]).num_hit_tokens == 0
    assert points(manager) == [16]
    assert serve(manager, [*shared, 70, 71]).num_hit_tokens == 16


@pytest.mark.parametrize("name", ["window", "state", "window and state"])
def test_a_finished_row_gives_its_blocks_away_without_a_copy(name: str) -> None:
    """The end of a sequence is kept by moving its last blocks to the index: no copy, no new block."""
    manager = manager_of(SPECS[name], prompt_end=False)
    row = manager.admit(list(range(18))).admitted_row
    feed(manager, row, list(range(18)))
    held = row_ids(manager, row)
    manager.finish(row)
    assert len(manager.take_copies()) == 0
    assert points(manager) == [18]
    for group, ids in enumerate(held):
        flat = manager.pool.offsets[group] + np.array(ids)
        assert (manager.pool.cached[flat] > 0).all()
    assert manager.pool.num_held.sum() == 0
    assert manager.pool.num_cached.tolist() == [len(ids) for ids in held]


def test_a_path_has_no_more_points_than_allowed() -> None:
    """With at most 2 points a path, a long sequence keeps 2 of those it passes, and its end is among them."""
    manager = manager_of(SPECS["state"], every=4, max_per_path=2)
    serve(manager, list(range(42)))
    assert len(points(manager)) == 2
    assert 42 in points(manager)
    assert manager.pool.num_cached[0] == 2 * manager.plan.groups[0].num_parts


def test_chunks_end_where_a_state_is_to_be_kept_and_reserve_refuses_to_cross() -> None:
    """`chunk_limits` counts down to the next point; one token more is refused, and nothing changes."""
    manager = manager_of(SPECS["state"], every=8)
    row = manager.admit(list(range(30))).admitted_row
    assert manager.chunk_limits([row]).tolist() == [8]
    with pytest.raises(ValueError, match=r"row 0 would pass the end of its chunk, .* after 8 tokens"):
        manager.reserve([row], [9])
    manager.reserve([row], [5])
    manager.commit([row], [5], list(range(5)))
    assert manager.chunk_limits([row]).tolist() == [3]
    feed(manager, row, list(range(8)))
    assert points(manager) == [8]
    assert manager.chunk_limits([row]).tolist() == [8]


@pytest.mark.parametrize("name", ["full", "window"])
def test_chunks_of_models_without_states_may_end_anywhere(name: str) -> None:
    """Without states a chunk is never cut, and a point inside it is kept all the same."""
    manager = manager_of(SPECS[name], every=8, finish=False, prompt_end=False)
    row = manager.admit(list(range(30))).admitted_row
    assert manager.chunk_limits([row])[0] >= 2**31 - 1
    manager.reserve([row], [30])
    manager.commit([row], [30], list(range(30)))
    assert points(manager) == ([8, 16, 24] if name == "window" else [])


def test_a_window_point_is_kept_though_its_step_settled_before_it_was_committed() -> None:
    """Asynchronously too, a prompt's end is kept with its whole window: blocks stay until the commit that keeps it."""
    manager = manager_of(SPECS["window"], finish=False)
    prompt = list(range(17))
    row = manager.admit(prompt).admitted_row
    manager.reserve([row], [17])
    step = manager.launch([row], [17])
    manager.settle(step)
    assert manager.tables[0].first_block_per_row[row] == (16 - 5) // 4
    manager.commit([row], [17], prompt)
    assert manager.tables[0].first_block_per_row[row] == (17 - 5) // 4
    assert points(manager) == [16]
    assert manager.admit([*prompt[:16], 99]).num_hit_tokens == 16
    manager.check()


def test_a_point_without_room_for_its_states_is_skipped_and_counted() -> None:
    """Where memory has no block for a copy of the states, the step goes on and the point is counted as skipped."""
    plan = plan_slabs(state_and_attention(), 3, limits(2, 16, 16), {1: 4})
    plan_blocks = [group.blocks_per_slab for group in plan.groups]
    manager = CacheManager(plan, options=ManagerOptions(resume_points=ResumePolicy(every=4)))
    hog = manager.pool.take([max(3 * plan_blocks[0] - plan.groups[0].num_parts - plan_blocks[0], 0), 0])
    row = manager.admit(list(range(12))).admitted_row
    manager.reserve([row], [4])
    hog = np.concatenate([hog, manager.pool.take(_all_free(manager))])
    manager.commit([row], [4], list(range(4)))
    assert manager._store.recorder.num_skipped_points == 1
    assert (points(manager), len(manager.take_copies())) == ([], 0)
    manager.pool.release(hog)
    feed(manager, row, list(range(8)))
    assert points(manager) == [8]
    manager.check()


def _all_free(manager: CacheManager) -> list[int]:
    """Blocks of states, as many as are left."""
    count = 0
    while manager.pool.fits(np.array([count + 1, 0])):
        count += 1
    return [count, 0]


def test_what_is_cached_serves_until_memory_is_short_and_then_goes_oldest_first() -> None:
    """Under pressure the prefix used longest ago goes; the one that was hit in between stays."""
    manager = CacheManager(plan_slabs(FULL_ONLY, 12, limits(2, 48, 48), {0: 4}))
    assert manager.plan.groups[0].blocks_per_slab == 1
    for base in (0, 100, 200):
        serve(manager, list(range(base, base + 16)))
    assert manager.pool.num_cached.tolist() == [12]
    assert serve(manager, [*range(16), 7]).num_hit_tokens == 16
    row = manager.admit(list(range(300, 315))).admitted_row
    feed(manager, row, list(range(300, 315)))
    assert manager.admit([*range(16), 8]).num_hit_tokens == 16


def test_a_hit_is_not_evicted_to_make_room_for_its_own_row() -> None:
    """A prompt whose hit and rest fill the memory gets both: what it is to share stays, others' cache goes."""
    manager = CacheManager(plan_slabs(FULL_ONLY, 8, limits(2, 32, 32), {0: 4}))
    serve(manager, list(range(16)))
    serve(manager, list(range(100, 116)))
    prompt = [*range(16), *range(200, 216)]
    answer = manager.admit(prompt)
    assert (answer.verdict, answer.num_hit_tokens) == (Verdict.OK, 16)
    feed(manager, answer.admitted_row, prompt)
    assert manager.pool.num_held.tolist() == [8]
    manager.check()
