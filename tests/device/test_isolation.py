"""Group isolation: no request ever reads another request's, group's or layer's bytes."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridkv import HybridKVError
from hybridkv.multi_group import MultiGroupBlockTable
from hybridkv.plan import SlotMappingMode
from hybridkv.table_arrays import TableArrays
from tests.host_paths import using
from tests.world import MAX_GROWTH, World, random_walk

GROWTH = st.integers(1, MAX_GROWTH)


class IsolationMachine(RuleBasedStateMachine):
    """Any order of admit, grow, preempt, resume, finish and move over 2-4 groups."""

    @initialize(num_groups=st.integers(2, 4), num_slabs=st.integers(12, 40))
    def start(self, num_groups, num_slabs):
        self.world = World(num_groups, num_slabs)

    @rule()
    def admit(self):
        self.world.admit()

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def grow(self, data):
        chosen = data.draw(st.lists(st.sampled_from(self.world.running), unique=True, min_size=1))
        self.world.grow(chosen, data.draw(st.lists(GROWTH, min_size=len(chosen), max_size=len(chosen))))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def preempt(self, data):
        self.world.preempt(data.draw(st.sampled_from(self.world.running)))

    @precondition(lambda self: self.world.preempted)
    @rule(data=st.data(), num_tokens=GROWTH)
    def resume(self, data, num_tokens):
        self.world.resume(data.draw(st.sampled_from(sorted(self.world.preempted))), num_tokens)

    @precondition(lambda self: self.world.rows)
    @rule(data=st.data())
    def finish(self, data):
        self.world.finish(data.draw(st.sampled_from(sorted(self.world.rows))))

    @precondition(lambda self: self.world.rows)
    @rule(data=st.data())
    def move(self, data):
        self.world.move(data.draw(st.sampled_from(sorted(self.world.rows))))

    @invariant()
    def nothing_is_corrupted(self):
        if hasattr(self, "world"):
            self.world.check()


IsolationMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestIsolation = IsolationMachine.TestCase


@pytest.mark.parametrize("layout", ["slab", "contiguous"])
def test_a_long_walk_finds_no_foreign_stamp(layout):
    """5,000 random actions in each layout leave every stamp where it belongs."""
    world = World(4, 24, layout)
    random_walk(world, 5_000, seed=1)
    assert world.manager.num_preemptions > 50
    assert world.manager.num_freed_out_of_window[1] > 100


@pytest.mark.full
@pytest.mark.parametrize("num_groups", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_longer_walks_find_no_foreign_stamp(num_groups, seed):
    """20,000 random actions, for each number of groups and several seeds, leave every stamp where it belongs."""
    world = World(num_groups, 16 + 4 * seed)
    random_walk(world, 20_000, seed)
    assert world.num_requests > 100


def _move_without_clearing(self, sources, targets):
    """`move` that forgets to clear the source rows."""
    first = self.first.reshape(-1)[sources].astype(np.int64)
    counts, ids = self.count.reshape(-1)[sources] - first, self.live_ids(sources)
    self.clear(targets)
    self.set_rows(targets, first, counts, ids)


def _one_slot_space(self, *args, right=MultiGroupBlockTable.step, **padded):
    """`step` that gives every token group the slots of group 0."""
    step = right(self, *args, **padded)
    for group, table in enumerate(self.tables):
        if table.mode is not SlotMappingMode.NONE:
            step.slot_mapping[group] = step.slot_mapping[0]
    return step


def _drop_without_null(self, pairs, first):
    """`drop_head` that frees the blocks and leaves them in the row."""
    counts = (first - self.first.reshape(-1)[pairs]).clip(min=0)
    return np.concatenate([self.live_ids(pairs[i : i + 1])[:count] for i, count in enumerate(counts)])


def _drop_and_leave_the_entries(self, pairs, first, right=TableArrays.drop_head):
    """`drop_head` that moves the row on and leaves the dead entries in their columns."""
    before = self.words[: self.first_offset].copy()
    ids = right(self, pairs, first)
    self.words[: self.first_offset] = before
    return ids


def _commit_the_first_row_only(self, mirror, *_views):
    """`copy_dirty` that copies the row of a batch it guesses, not every dirty one."""
    self.take_dirty()
    for begin, stride in zip(self.offsets, self.strides, strict=True):
        mirror[begin : begin + stride] = self.words[begin : begin + stride]
    mirror[self.first_offset :] = self.words[self.first_offset :]
    return 0


def _forget_the_live_ranges(self, mirror, *views, right=TableArrays.copy_dirty):
    """`copy_dirty` that copies the entries and no live range."""
    before = mirror[self.first_offset :].copy()
    num_words = right(self, mirror, *views)
    mirror[self.first_offset :] = before
    return num_words


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (TableArrays, "move", _move_without_clearing),
        (MultiGroupBlockTable, "step", _one_slot_space),
        (TableArrays, "drop_head", _drop_without_null),
        (TableArrays, "drop_head", _drop_and_leave_the_entries),
        (TableArrays, "copy_dirty", _commit_the_first_row_only),
        (TableArrays, "copy_dirty", _forget_the_live_ranges),
    ],
)
def test_a_seeded_bug_is_found(monkeypatch, owner, name, broken):
    """Each classic bug, put into the numpy path on purpose, is noticed within 1,000 actions."""
    monkeypatch.setattr(owner, name, broken)
    with using("numpy"), pytest.raises((AssertionError, HybridKVError)):
        random_walk(World(4, 24), 1_000, seed=2)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (TableArrays, "move", _move_without_clearing),
        (MultiGroupBlockTable, "step", _one_slot_space),
    ],
)
def test_the_stamps_alone_find_the_classic_bugs(monkeypatch, owner, name, broken):
    """With the library's own consistency check switched off, stamped memory still finds a foreign or missing token."""
    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr("hybridkv.manager.CacheManager.check", lambda self: None)
    with pytest.raises((AssertionError, HybridKVError, ValueError)):
        random_walk(World(4, 24), 2_000, seed=3)
