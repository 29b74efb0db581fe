"""Claims about sequences that share a past: what forks and beams copy, and that all go on from what they had."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import InvalidRequest, OutOfBlocks
from hybridkv.limits import BatchLimits
from hybridkv.manager import CacheManager, ManagerOptions
from hybridkv.specs import SlidingWindow
from tests.manager_content import Story
from tests.manager_steps import feed, row_ids
from tests.manager_world import World
from tests.models import FULL, kv_cache, limits, model, plan_slabs, state_cache
from tests.snapshots import TIMES, snapshot

MIXED = model(kv_cache(SlidingWindow(window=40)), state_cache(), kv_cache(FULL))
PROMPT = list(range(1003))


def parent_of(num_slabs: int = 2000, *, caching: bool = True) -> CacheManager:
    """Row 0 has computed 1,003 tokens in blocks of 16: a window of 40, a state and full attention."""
    plan = plan_slabs(MIXED, num_slabs, BatchLimits(12, 2048, 1024), {0: 16, 2: 16})
    manager = CacheManager(plan, options=ManagerOptions(prefix_caching=caching))
    feed(manager, manager.admit(PROMPT).admitted_row, PROMPT)
    manager.take_copies()
    return manager


def test_eight_children_cost_eight_parts_of_blocks_a_group_and_eight_states() -> None:
    """Law 2: forks share the 62 whole blocks and the window's; each copies its last 11 tokens' block and the state."""
    manager = parent_of()
    held = manager.pool.num_held.copy()
    parent = row_ids(manager, 0)
    children = manager.fork(0, 8)
    assert children == list(range(1, 9))
    copies = manager.take_copies()
    assert Counter(copies.within[:, 0].tolist()) == {0: 8, 1: 8, 2: 8}
    assert len(copies) == 24
    assert (manager.pool.num_held - held).tolist() == [8, 8, 8]
    for group, (source, shared) in enumerate(((parent[0][-1], 2), (parent[1][0], 0), (parent[2][-1], 62))):
        of_group = copies.within[copies.within[:, 0] == group]
        assert set(of_group[:, 1].tolist()) == {source}
        assert sorted(of_group[:, 2].tolist()) == sorted(row_ids(manager, child)[group][-1] for child in children)
        for child in children:
            assert row_ids(manager, child)[group][:-1] == parent[group][:-1]
        assert len(parent[group]) == shared + 1
    assert (manager.num_committed_tokens[:9] == 1003).all()
    assert (manager.capacity_tokens[1:9] == 1003).all()
    manager.check()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
@pytest.mark.parametrize("caching", [True, False])
def test_a_family_ends_in_any_order(order: list[int], caching: bool) -> None:
    """Whoever of parent and children ends first, the others keep what they share, and all is free at last."""
    manager = parent_of(caching=caching)
    manager.fork(0, 3)
    for row in range(4):
        feed(manager, row, [*PROMPT, row, row])
    for ended, row in enumerate(order):
        before = {other: row_ids(manager, other) for other in order[ended + 1 :]}
        manager.finish(row)
        manager.check()
        assert {other: row_ids(manager, other) for other in before} == before
    manager.take_copies()
    manager.commit([], [])
    assert manager.pool.num_held.tolist() == [0, 0, 0]
    assert bool(manager.pool.num_cached.any()) == caching


def test_a_fork_of_a_whole_number_of_blocks_copies_states_alone() -> None:
    """At 992 tokens, 62 blocks, a child shares every block of tokens and copies the state."""
    manager = CacheManager(plan_slabs(MIXED, 2000, BatchLimits(12, 2048, 1024), {0: 16, 2: 16}))
    feed(manager, manager.admit(PROMPT[:992]).admitted_row, PROMPT[:992])
    manager.take_copies()
    manager.fork(0, 1)
    assert manager.take_copies().within[:, 0].tolist() == [1]


def test_a_row_without_tokens_forks_into_rows_without_tokens() -> None:
    """A child of a row that has computed nothing has no block, and both can go on."""
    manager = CacheManager(plan_slabs(MIXED, 200, BatchLimits(3, 64, 32), {0: 16, 2: 16}))
    row = manager.admit(list(range(20))).admitted_row
    manager.reserve([row], [16])
    (child,) = manager.fork(row, 1)
    assert (row_ids(manager, child), len(manager.take_copies())) == ([[], [], []], 0)
    for each in (row, child):
        feed(manager, each, list(range(20)))
    manager.check()


def test_what_cannot_fork_is_refused_and_nothing_changes() -> None:
    """Uncommitted tokens, too few rows and too few blocks are each refused before anything changes."""
    manager = parent_of(num_slabs=400)
    manager.reserve([0], [5])
    step = manager.launch([0], [5])
    before = snapshot(manager)
    with pytest.raises(InvalidRequest, match="1008 tokens computed and 1003 committed"):
        manager.fork(0, 1)
    with pytest.raises(InvalidRequest, match="1008 tokens computed and 1003 committed"):
        manager.reorder([0], [0])
    assert snapshot(manager) == before
    manager.settle(step)
    manager.commit([0], [5], [1] * 5)
    hog = manager.pool.take([0, 0, _most(manager, 2)])
    before = snapshot(manager, ignore=TIMES)
    with pytest.raises(OutOfBlocks):
        manager.fork(0, 11)
    assert snapshot(manager, ignore=TIMES) == before
    manager.pool.release(hog)
    manager.check_fits(1)


def _most(manager: CacheManager, group: int) -> int:
    """The most blocks of a group that can be taken as things are."""
    count, need = 0, np.zeros(manager.pool.num_groups, dtype=np.int64)
    while manager.pool.fits_now(need):
        count, need[group] = count + 1, need[group] + 1
    return count - 1


# Beams


def beams(num_rows: int, lengths: list[int], caching: bool = True) -> World:
    """Rows of different tokens and lengths, all computed."""
    plan = plan_slabs(
        model(kv_cache(SlidingWindow(window=7)), state_cache(), kv_cache(FULL)), 400, limits(6, 60, 16), 4
    )
    world = World(plan, ManagerOptions(prefix_caching=caching), 1)
    for number in range(num_rows):
        tokens = [(7 * number + 3 * i) % 50 for i in range(lengths[number])]
        row = world.manager.admit(tokens).admitted_row
        world.running[row] = Story(None, (), tokens, len(tokens))
        while (done := world.running[row].computed) < len(tokens):
            count = min(16, int(world.manager.chunk_limits([row])[0]), len(tokens) - done)
            assert world.manager.reserve([row], [count]).num_ok
            world.copy()
            world.content.write(world.manager, row, world.running[row], done + count)
            world.manager.commit([row], [count], tokens[done : done + count])
    world.copy()
    world.look()
    return world


def reorder(world: World, rows: list[int], sources: list[int]) -> None:
    """Reorder rows and what they are known to contain."""
    stories = [world.running[source].copy() for source in sources]
    world.manager.reorder(rows, sources)
    world.running.update(zip(rows, stories, strict=True))
    world.look()


@pytest.mark.parametrize("sources", list(product(range(3), repeat=3)), ids=str)
def test_any_mapping_of_three_beams_is_what_it_says(sources: tuple[int, ...]) -> None:
    """Cycles, repeats and drops: every row contains what its source did, and copies are those of the extra heirs."""
    world = beams(3, [9, 14, 21])
    lengths = [story.computed for story in world.running.values()]
    reorder(world, [0, 1, 2], list(sources))
    extra = Counter(sources)
    wanted = sum((extra[s] - 1) * (1 + 2 * (lengths[s] % 4 > 0)) for s in extra)
    copies = world.manager.take_copies()
    assert len(copies) == len(copies.within) == wanted
    world.content.run(copies)
    world.look()
    assert world.manager.num_computed_tokens[:3].tolist() == [lengths[source] for source in sources]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), caching=st.booleans())
def test_mappings_one_after_the_other_without_a_step_between(data: st.DataObject, caching: bool) -> None:
    """Up to 6 beams reorder several times before the engine copies anything, then go on: each has its own tokens."""
    num_rows = data.draw(st.integers(1, 6))
    world = beams(num_rows, data.draw(st.lists(st.integers(1, 20), min_size=num_rows, max_size=num_rows)), caching)
    for _ in range(3):
        rows = data.draw(st.permutations(range(num_rows)))[: data.draw(st.integers(1, num_rows))]
        reorder(world, rows, data.draw(st.lists(st.sampled_from(rows), min_size=len(rows), max_size=len(rows))))
    for _ in range(4):
        world.step()
        world.look()


def test_beams_that_swap_places_copy_nothing() -> None:
    """A permutation moves rows alone: no block is copied or lent, and the tables have changed places."""
    world = beams(3, [9, 14, 21])
    before, held = [row_ids(world.manager, row) for row in range(3)], world.manager.pool.num_held.tolist()
    reorder(world, [0, 1, 2], [2, 0, 1])
    assert [row_ids(world.manager, row) for row in range(3)] == [before[2], before[0], before[1]]
    assert (len(world.manager.take_copies()), world.manager.pool.num_held.tolist()) == (0, held)
