"""Claims about lending blocks out of slabs: who holds what, what is full first, what a failure leaves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hybridkv.block_pool import BlockPool
from hybridkv.errors import InvariantError, OutOfBlocks
from hybridkv.specs import SlidingWindow
from tests.models import FULL, gemma_like, kv_cache, model, plan_slabs, snapshot, state_cache


def one_and_three(num_slabs: int) -> BlockPool:
    """Group 0 cuts a slab into 1 block, group 1 into 3: slab 2 is block 2 of group 0, or 6, 7, 8 of group 1."""
    pool = BlockPool(plan_slabs(gemma_like(3, 1), num_slabs))
    assert pool.blocks_per_slab.tolist() == [1, 3]
    return pool


def three_and_two(num_slabs: int) -> BlockPool:
    """Group 0 cuts a slab into 3 blocks, group 1 into 2."""
    pool = BlockPool(plan_slabs(gemma_like(2, 3), num_slabs))
    assert pool.blocks_per_slab.tolist() == [3, 2]
    return pool


def ids(*block_ids: int) -> np.ndarray:
    """An int32 array."""
    return np.array(block_ids, dtype=np.int32)


def lend(pool: BlockPool, *num_blocks: int) -> list[list[int]]:
    """Allocate, as lists."""
    return [block_ids.tolist() for block_ids in pool.allocate(num_blocks)]


def test_slabs_go_round_between_groups() -> None:
    """A slab belongs to one group while it holds a block, and serves the other group once it is empty."""
    pool = one_and_three(3)
    assert lend(pool, 2, 1) == [[1, 2], [9]]
    assert pool.slab_owner.tolist() == [-1, 0, 0, 1]
    assert lend(pool, 0, 2) == [[], [10, 11]]
    assert pool.num_free_slabs == 0
    assert pool.free(0, ids(1)) == 1
    assert pool.slab_owner.tolist() == [-1, -1, 0, 1]
    assert lend(pool, 0, 1) == [[], [3]]
    assert pool.slab_owner.tolist() == [-1, 1, 0, 1]
    assert pool.free(1, ids(9, 10)) == 2
    assert pool.slab_owner.tolist() == [-1, 1, 0, 1]
    assert pool.free(1, ids(11)) == 1
    assert lend(pool, 1, 0) == [[3], []]
    pool.check()


def test_the_fullest_slab_lends_first() -> None:
    """Of two slabs with room the fuller one is filled up, so that the other can empty; ties go to the lower slab."""
    pool = one_and_three(3)
    assert lend(pool, 0, 9) == [[], [3, 4, 5, 6, 7, 8, 9, 10, 11]]
    pool.free(1, ids(3, 4, 7, 10, 11))
    assert lend(pool, 0, 2) == [[], [7, 3]]
    pool.free(1, ids(3))
    pool.free(1, ids(5))
    assert pool.slab_owner.tolist() == [-1, -1, 1, 1]
    assert lend(pool, 0, 2) == [[], [10, 11]]


def test_own_slabs_lend_before_a_free_one() -> None:
    """No free slab is taken while the group's own slabs have room."""
    pool = three_and_two(3)
    assert lend(pool, 4, 1) == [[3, 4, 5, 6], [6]]
    assert pool.num_free_in_own_slabs().tolist() == [2, 1]
    assert lend(pool, 2, 1) == [[7, 8], [7]]
    assert (pool.num_free_slabs, pool.num_held.tolist()) == (0, [6, 2])


def test_slab_0_is_never_lent() -> None:
    """A pool lent to its last block has lent every slab but the reserved one, so no block of it and no null block."""
    pool = three_and_two(2)
    assert lend(pool, 3, 2) == [[3, 4, 5], [4, 5]]
    assert pool.slab_owner.tolist() == [-1, 0, 1]
    assert not pool.ref_counts[0][:3].any()
    assert not pool.ref_counts[1][:2].any()


def test_out_of_blocks_says_how_many_in_which_group() -> None:
    """With 2 slabs left, 3 + 4 blocks miss the one slab that group 1's second half needs: 2 blocks."""
    pool = three_and_two(2)
    before = snapshot(pool)
    with pytest.raises(OutOfBlocks) as raised:
        pool.allocate([3, 4])
    assert raised.value.requested == {0: 3, 1: 4}
    assert raised.value.shortfall == {1: 2}
    with pytest.raises(OutOfBlocks) as raised:
        pool.allocate([8, 1])
    assert raised.value.shortfall == {0: 2, 1: 1}
    assert snapshot(pool) == before


def test_the_shortfall_counts_free_blocks_of_own_slabs() -> None:
    """Half used slabs lower the shortfall of their own group and no other's."""
    pool = three_and_two(2)
    pool.allocate([1, 1])
    wanted = np.array([[2, 3, 3, 0, 2], [1, 1, 2, 9, 1]])
    assert pool.slabs_needed(wanted).tolist() == [0, 1, 2, 4, 0]
    assert pool.shortfall(wanted).tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 8, 0]]


def test_the_shortfall_serves_groups_in_order() -> None:
    """The last free slab goes to the first group that needs it; the message's numbers are those of that order."""
    pool = three_and_two(3)
    pool.allocate([3, 2])
    assert pool.shortfall(np.array([3, 2])).tolist() == [0, 2]
    assert pool.shortfall(np.array([4, 0])).tolist() == [1, 0]
    assert pool.shortfall(np.array([0, 2])).tolist() == [0, 0]
    assert pool.shortfall(np.array([1, 1])).tolist() == [0, 1]


def test_allocating_nothing_changes_nothing() -> None:
    """A request for no block in any group lends none and takes no slab."""
    pool = three_and_two(2)
    before = snapshot(pool)
    assert lend(pool, 0, 0) == [[], []]
    assert pool.free(0, ids()) == 0
    assert snapshot(pool) == before


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    """Each holder gives up its own reference; only the last one frees the block and its slab."""
    pool = one_and_three(2)
    assert lend(pool, 0, 2) == [[], [3, 4]]
    pool.add_reference(1, ids(3, 3))
    assert pool.ref_counts[1].tolist() == [0, 0, 0, 3, 1, 0, 0, 0, 0]
    assert pool.free(1, ids(3, 4)) == 1
    assert pool.free(1, ids(3)) == 0
    assert (pool.num_held.tolist(), pool.num_free_slabs) == ([0, 1], 1)
    assert pool.free(1, ids(3)) == 1
    assert pool.num_free_slabs == 2
    pool.check()


def test_one_call_may_give_up_several_references_of_a_block() -> None:
    """A block given up twice in one call loses two references and counts as freed once."""
    pool = one_and_three(2)
    pool.allocate([0, 1])
    pool.add_reference(1, ids(3))
    assert pool.free(1, ids(3, 3)) == 1
    pool.check()


def test_peaks_remember_the_most_blocks_held() -> None:
    """`peak_held` keeps each group's largest count after blocks are freed."""
    pool = three_and_two(3)
    pool.allocate([4, 1])
    pool.free(0, ids(3, 4, 5))
    pool.allocate([1, 1])
    assert (pool.num_held.tolist(), pool.peak_held.tolist()) == ([2, 2], [4, 2])


MISUSES: list[tuple[str, Callable[[BlockPool], object]]] = [
    ("group 0 block 4 is not held", lambda pool: pool.free(0, ids(3, 4))),
    ("double free: group 0 block 3", lambda pool: pool.free(0, ids(3, 3))),
    ("double free: group 1 block 6", lambda pool: pool.free(1, ids(6, 7, 6))),
    ("group 1 block 0 is not held", lambda pool: pool.free(1, ids(0))),
    ("group 0 block -1 is not held", lambda pool: pool.free(0, ids(3, -1))),
    ("group 0 block 12 is not held", lambda pool: pool.free(0, ids(12))),
    ("group 0 block 5 is not held", lambda pool: pool.add_reference(0, ids(3, 5))),
    ("group 0 block 99 is not held", lambda pool: pool.add_reference(0, ids(99))),
]


@pytest.mark.parametrize(("message", "call"), MISUSES, ids=[message for message, _ in MISUSES])
def test_misuse_raises_and_changes_nothing(message: str, call: Callable[[BlockPool], object]) -> None:
    """Freeing or sharing what nobody holds is an `InvariantError` that names the block; every count stays."""
    pool = three_and_two(3)
    assert lend(pool, 1, 2) == [[3], [4, 5]]
    pool.allocate([0, 2])
    before = snapshot(pool)
    with pytest.raises(InvariantError, match=message):
        call(pool)
    assert snapshot(pool) == before


@pytest.mark.parametrize("num_blocks", [[1], [1, 1, 1], [-1, 0], [[1, 1]]])
def test_bad_counts_are_refused(num_blocks: list[int]) -> None:
    """A request is one count of at least 0 for each group."""
    pool = three_and_two(3)
    before = snapshot(pool)
    with pytest.raises(ValueError, match="expected 2 counts of at least 0"):
        pool.allocate(num_blocks)
    assert snapshot(pool) == before


@pytest.mark.parametrize("kth", [0, 1, 2])
@pytest.mark.parametrize("wanted", [(3, 4, 5), (1, 0, 3), (9, 1, 1), (0, 2, 0)])
def test_the_kth_groups_failure_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch, kth: int, wanted: tuple[int, int, int]
) -> None:
    """Whichever group's allocation fails, blocks, slabs, their order, counts and peaks are those of before."""
    spec = model(kv_cache(SlidingWindow(window=8), 2), kv_cache(FULL, 3), state_cache())
    pool = BlockPool(plan_slabs(spec, 24))
    lent = pool.allocate([2, 2, 1])
    pool.free(0, lent[0][:1])
    pool.allocate([0, 5, 2])
    pool.free(1, lent[1])
    before = snapshot(pool)
    allocate_in, num_calls = pool._allocate_in, 0

    def failing(group: int, count: int) -> np.ndarray:
        nonlocal num_calls
        num_calls += 1
        if num_calls == kth + 1:
            raise MemoryError
        return allocate_in(group, count)

    with monkeypatch.context() as patched:
        patched.setattr(pool, "_allocate_in", failing)
        with pytest.raises(MemoryError):
            pool.allocate(wanted)
    assert num_calls == kth + 1
    assert snapshot(pool) == before
    pool.check()
    assert [len(block_ids) for block_ids in pool.allocate(wanted)] == list(wanted)
    pool.check()


def keep_an_empty_slab(pool: BlockPool) -> None:
    """Give the last free slab to group 1 without a block of it held."""
    pool.slab_owner[3] = 1
    pool._num_slabs_of[1] += 1
    pool.num_free_slabs -= 1


CORRUPTIONS: list[Callable[[BlockPool], object]] = [
    lambda pool: pool.ref_counts[0].__setitem__(0, 1),
    lambda pool: pool.ref_counts[0].__setitem__(9, 1),
    lambda pool: pool.ref_counts[0].__setitem__(3, 0),
    lambda pool: pool.ref_counts[1].__setitem__(7, -1),
    lambda pool: pool.num_held.__setitem__(0, 2),
    lambda pool: pool._held_in_slab.__setitem__(1, 2),
    lambda pool: pool._num_slabs_of.__setitem__(1, 2),
    lambda pool: pool.slab_owner.__setitem__(1, -1),
    lambda pool: pool.slab_owner.__setitem__(3, 1),
    lambda pool: pool._free_slabs.__setitem__(0, 1),
    lambda pool: setattr(pool, "num_free_slabs", 0),
    keep_an_empty_slab,
]


@pytest.mark.parametrize("corruption", range(len(CORRUPTIONS)))
def test_check_finds_every_miscount(corruption: int) -> None:
    """Each count that `check` compares is missed by none: one wrong value raises an `InvariantError`."""
    pool = three_and_two(3)
    assert lend(pool, 1, 1) == [[3], [4]]
    pool.check()
    CORRUPTIONS[corruption](pool)
    with pytest.raises(InvariantError):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """A pool beside a dict of reference counts."""

    def __init__(self) -> None:
        super().__init__()
        spec = model(kv_cache(SlidingWindow(window=8), 2), kv_cache(FULL, 3), state_cache())
        self.plan = plan_slabs(spec, 6)
        self.pool = BlockPool(self.plan)
        self.model: dict[tuple[int, int], int] = {}

    def slabs(self) -> dict[int, int]:
        """Slabs in use, with the group each belongs to."""
        per_slab = self.pool.blocks_per_slab
        return {int(block_id // per_slab[group]): group for group, block_id in self.model}

    def held(self, group: int) -> list[int]:
        """Blocks of one group with a holder."""
        return sorted(block_id for owner, block_id in self.model if owner == group)

    @rule(wanted=st.tuples(st.integers(0, 8), st.integers(0, 5), st.integers(0, 20)))
    def allocate(self, wanted: tuple[int, int, int]) -> None:
        slabs, needed = self.slabs(), 0
        for group, count in enumerate(wanted):
            per_slab = int(self.pool.blocks_per_slab[group])
            free = list(slabs.values()).count(group) * per_slab - len(self.held(group))
            needed += -(-max(0, count - free) // per_slab)
        before = snapshot(self.pool)
        if needed > 6 - len(slabs):
            with pytest.raises(OutOfBlocks) as raised:
                self.pool.allocate(wanted)
            assert sum(raised.value.shortfall.values()) > 0
            assert snapshot(self.pool) == before
            return
        for group, block_ids in enumerate(lend(self.pool, *wanted)):
            assert len(block_ids) == wanted[group]
            for block_id in block_ids:
                assert (group, block_id) not in self.model
                assert block_id >= self.pool.blocks_per_slab[group]
                self.model[group, block_id] = 1
        assert len(self.slabs()) == len(slabs) + needed

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        group, block_id = data.draw(st.sampled_from(sorted(self.model)))
        self.pool.add_reference(group, ids(block_id))
        self.model[group, block_id] += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        group, _ = data.draw(st.sampled_from(sorted(self.model)))
        given_up = data.draw(st.lists(st.sampled_from(self.held(group)), min_size=1, max_size=6))
        before = snapshot(self.pool)
        if any(given_up.count(block_id) > self.model[group, block_id] for block_id in given_up):
            with pytest.raises(InvariantError, match="double free"):
                self.pool.free(group, ids(*given_up))
            assert snapshot(self.pool) == before
            return
        num_freed = 0
        for block_id in given_up:
            self.model[group, block_id] -= 1
            if self.model[group, block_id] == 0:
                del self.model[group, block_id]
                num_freed += 1
        assert self.pool.free(group, ids(*given_up)) == num_freed

    @invariant()
    def counts_add_up(self) -> None:
        self.pool.check()
        for group, counts in enumerate(self.pool.ref_counts):
            assert {int(b): int(counts[b]) for b in np.flatnonzero(counts)} == {
                block_id: count for (owner, block_id), count in self.model.items() if owner == group
            }
            assert self.pool.num_held[group] == len(self.held(group))
        owners = {slab: group for slab, group in enumerate(self.pool.slab_owner.tolist()) if group >= 0}
        assert owners == self.slabs()
        assert self.pool.num_free_slabs == 6 - len(owners)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
