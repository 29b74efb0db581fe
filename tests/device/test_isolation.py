"""Cache isolation: no request ever reads bytes of other content, another group or another layer."""

from contextlib import nullcontext

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridkv import HybridKVError
from hybridkv.resume_policy import ResumePolicy
from hybridkv_kernels.block_copy import copy_blocks, copy_blocks_reference
from tests.host_paths import using
from tests.world import World
from tests.world_bugs import BUGS
from tests.world_memory import EQUAL_SIZES
from tests.world_requests import WorldConfig
from tests.world_walk import WEIGHTS, random_walk, random_walks

EVERY = ResumePolicy(every=8)
CONFIGS = {
    "all groups": WorldConfig(),
    "all groups, equal blocks, points every 8": WorldConfig(block_sizes=EQUAL_SIZES, policy=EVERY, num_slabs=34),
    "all groups, contiguous, room for many": WorldConfig(layout="contiguous", block_sizes=EQUAL_SIZES, num_slabs=60),
    "all groups, asynchronous": WorldConfig(is_async=True, num_slabs=34),
    "all groups, asynchronous, equal blocks": WorldConfig(is_async=True, block_sizes=EQUAL_SIZES, num_slabs=45),
    "full and window": WorldConfig(lifecycles=(0, 1), num_slabs=40),
    "full and state, watermark": WorldConfig(lifecycles=(0, 3), num_slabs=20, watermark=0.1),
    "chunk and full, asynchronous": WorldConfig(lifecycles=(2, 0), is_async=True, num_slabs=36),
    "state and window, asynchronous": WorldConfig(lifecycles=(3, 1), is_async=True, num_slabs=24, policy=EVERY),
    "full, window and chunk, contiguous": WorldConfig(lifecycles=(0, 1, 2), layout="contiguous", num_slabs=40),
}


class IsolationMachine(RuleBasedStateMachine):
    """Any order of the verbs of a manager over 2-4 groups."""

    @initialize(config=st.sampled_from(list(CONFIGS)), seed=st.integers(0, 2**16))
    def start(self, config, seed):
        self.world = World(CONFIGS[config], seed)

    @rule(verb=st.sampled_from([*WEIGHTS, "admit", "grow", "grow"]))
    def act(self, verb):
        self.world.act(verb)

    @precondition(lambda self: len(self.world.running) > 1)
    @rule(verb=st.sampled_from(["fork", "reorder", "swap_out", "compact", "finish"]))
    def share(self, verb):
        self.world.act(verb)

    @invariant()
    def nothing_is_corrupted(self):
        if hasattr(self, "world"):
            self.world.check()


IsolationMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
TestIsolation = IsolationMachine.TestCase


@pytest.mark.parametrize("name", CONFIGS)
def test_a_long_walk_finds_no_foreign_stamp(name):
    """1,000 random actions in each kind of world leave every stamp where it belongs, and sequences do share."""
    with using("numpy") if CONFIGS[name].is_async else nullcontext():
        world = World(CONFIGS[name], seed=3)
        random_walk(world, 1_000)
    assert world.counts["hits"] >= 5
    assert world.counts["hits with a tail"] >= 2
    assert world.counts["swapped in"] >= 2
    assert world.counts["rolled back"] > 20
    assert not CONFIGS[name].is_async or world.counts["late tokens"] > 100
    assert sum(world.manager.num_freed_out_of_window) > 50 or CONFIGS[name].lifecycles == (0, 3)
    assert world.manager.num_preemptions > 20


def test_a_walk_without_prefix_caching_shares_by_forks_alone():
    """300 random actions without an index leave every stamp where it belongs, and nothing is hit."""
    world = World(WorldConfig(prefix_caching=False, is_async=True, num_slabs=40), seed=1)
    random_walk(world, 300)
    assert world.counts["hits"] == 0
    assert world.counts["within"] > 10


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(2, 7))
def test_longer_walks_find_no_foreign_stamp(name, seed):
    """2,000 random actions in each kind of world and for several seeds leave every stamp where it belongs."""
    world = World(CONFIGS[name], seed)
    random_walk(world, 2_000)
    assert world.num_requests > 100


@pytest.mark.parametrize("copy", [copy_blocks_reference, copy_blocks])
def test_every_way_to_copy_blocks_keeps_the_stamps(copy):
    """The reference and the kernel run the manager's copies as the plain memory copies of the other walks do."""
    world = World(WorldConfig(num_slabs=45, defer=0.7, copy=copy), seed=3)
    random_walk(world, 120)
    assert world.counts["within"] > 20
    assert world.counts["moves"] > 0


@pytest.mark.parametrize("name", BUGS)
def test_a_seeded_bug_is_found(monkeypatch, name):
    """Each bug, put in on purpose, is noticed within 3,000 actions without the manager's own consistency check."""
    for (owner, attribute), broken in BUGS[name].changes.items():
        monkeypatch.setattr(owner, attribute, broken)
    monkeypatch.setattr("hybridkv.manager.CacheManager.check", lambda self: None)
    with using("numpy"), pytest.raises((AssertionError, HybridKVError, ValueError)):
        random_walks(BUGS[name].config, 3, 1_000)
