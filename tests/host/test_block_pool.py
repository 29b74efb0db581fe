"""Claims about lending blocks out of slabs: who holds what, what is full first, what a failure leaves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hybridkv.block_pool import BlockPool
from hybridkv.errors import OutOfBlocks
from tests.models import gemma_like, plan_slabs
from tests.pool_model import Verb, flat, known, one_and_three, pool_of, states, take, three_and_two


def test_slabs_go_round_between_groups() -> None:
    """A slab serves one group while a block of it is used, and any group once it is empty."""
    pool = one_and_three(3)
    assert take(pool, 2, 1) == [[1, 2], [9]]
    assert pool.slab_owner.tolist() == [-1, 0, 0, 1]
    assert take(pool, 0, 2) == [[], [10, 11]]
    assert pool.num_free_slabs == 0
    pool.release(flat(pool, 0, 1))
    assert (pool.slab_owner.tolist(), pool.num_empty_slabs.tolist()) == ([-1, 0, 0, 1], [1, 0])
    assert take(pool, 0, 1) == [[], [3]]
    assert pool.slab_owner.tolist() == [-1, 1, 0, 1]
    pool.release(flat(pool, 1, 9, 10))
    with pytest.raises(OutOfBlocks):
        take(pool, 1, 0)
    pool.release(flat(pool, 1, 11))
    assert take(pool, 1, 0) == [[3], []]
    pool.check()


def test_own_slabs_lend_before_a_free_one() -> None:
    """No slab changes hands while the group's own slabs have room."""
    pool = three_and_two(3)
    assert take(pool, 4, 1) == [[3, 4, 5, 6], [6]]
    assert pool.num_free.tolist() == [2, 1]
    assert take(pool, 2, 1) == [[7, 8], [7]]
    assert (pool.num_free_slabs, pool.num_held.tolist()) == (0, [6, 2])


def test_slabs_without_owner_lend_before_empty_ones_of_others() -> None:
    """An empty slab stays with its group as long as there is one that nobody has."""
    pool = one_and_three(3)
    pool.release(pool.take([0, 3]))
    assert take(pool, 2, 0) == [[2, 3], []]
    assert pool.slab_owner.tolist() == [-1, 1, 0, 0]
    assert take(pool, 1, 0) == [[1], []]


def test_all_empty_slabs_change_hands_at_once() -> None:
    """A group that needs one of many empty slabs leaves the others without owner, so that nobody searches again."""
    pool = one_and_three(9)
    pool.release(pool.take([0, 27])[4:])
    assert take(pool, 1, 0) == [[3], []]
    assert (pool.num_free_slabs, pool.num_slabs_of.tolist()) == (6, [1, 2])
    assert take(pool, 1, 3) == [[4], [7, 8, 15]]
    pool.check()


def test_a_group_lends_and_gives_up_slabs_in_one_call() -> None:
    """Group 1 takes 2 blocks of its partly used slab and keeps no empty one, though its freed blocks lie all over."""
    pool = one_and_three(4)
    lent = pool.take([0, 12])
    pool.release(lent[[0, 3, 6, 9]])
    pool.release(lent[[1, 4, 7]])
    pool.release(lent[[2, 5]])
    assert states(pool)[3] == [0, 9]
    assert pool.fits_now(np.array([[2, 2, 3], [3, 4, 0]])).tolist() == [True, False, False]
    assert take(pool, 2, 3) == [[1, 2], [12, 9, 10]]
    pool.check()


def test_slab_0_is_never_lent() -> None:
    """A pool lent to its last block has lent every slab but the reserved one, so no block of it and no null block."""
    pool = three_and_two(2)
    assert take(pool, 3, 2) == [[3, 4, 5], [4, 5]]
    assert pool.slab_owner.tolist() == [-1, 0, 1]
    assert np.flatnonzero(pool.holders).tolist() == [3, 4, 5, 9 + 4, 9 + 5]


def test_out_of_blocks_says_how_many_in_which_group() -> None:
    """With 2 slabs left, 3 + 4 blocks miss the one slab that group 1's second half needs: 2 blocks."""
    pool = three_and_two(2)
    before = known(pool)
    with pytest.raises(OutOfBlocks) as raised:
        pool.take([3, 4])
    assert raised.value.requested == {0: 3, 1: 4}
    assert raised.value.shortfall == {1: 2}
    with pytest.raises(OutOfBlocks) as raised:
        pool.take([8, 1])
    assert raised.value.shortfall == {0: 2, 1: 1}
    assert known(pool) == before


def test_the_shortfall_serves_groups_in_order() -> None:
    """Evictable blocks count as there; the last slab goes to the first group that needs it."""
    pool = three_and_two(3)
    lent = pool.take([3, 2])
    assert pool.shortfall(np.array([[3, 4, 0, 1], [2, 0, 2, 1]])).tolist() == [[0, 1, 0, 0], [2, 0, 0, 1]]
    pool.cache(lent[:3])
    pool.release(lent[:3])
    assert pool.shortfall(np.array([3, 2])).tolist() == [0, 0]
    assert pool.shortfall(np.array([4, 2])).tolist() == [0, 2]


def test_verdicts_take_any_shape() -> None:
    """A need of one row, of many rows and of a table of rows get a verdict for each."""
    pool = three_and_two(3)
    for need in (np.array([9, 1]), np.array([[9, 9], [1, 0]]), np.full((2, 2, 5), 4)):
        assert pool.fits(need).shape == pool.fits_now(need).shape == need.shape[1:]
        assert pool.shortfall(need).shape == need.shape
    assert pool.fits(np.array([[9, 9], [1, 0]])).tolist() == [False, True]


def test_taking_nothing_changes_nothing() -> None:
    """A request for no block in any group lends none and takes no slab; no verb minds an empty list."""
    pool = three_and_two(2)
    pool.take([1, 0])
    before = known(pool)
    assert take(pool, 0, 0) == [[], []]
    nothing = np.empty(0, dtype=np.int64)
    for verb in (pool.hold, pool.release, pool.cache, pool.uncache):
        verb(nothing)
    pool.move(nothing, nothing)
    assert known(pool) == before


def test_a_block_goes_from_held_to_cached_to_free() -> None:
    """A block is held while it has a holder, cached while only the index refers to it, then free."""
    pool = one_and_three(2)
    lent = pool.take([0, 2])
    pool.hold(lent[[0, 0]])
    pool.cache(lent[[0, 0]])
    assert states(pool) == [[0, 2], [0, 0], [0, 0], [0, 1]]
    pool.release(lent[[0, 0, 1]])
    assert states(pool) == [[0, 1], [0, 0], [0, 0], [0, 2]]
    pool.release(lent[:1])
    assert states(pool) == [[0, 0], [0, 0], [0, 1], [0, 2]]
    pool.hold(lent[:1])
    assert states(pool) == [[0, 1], [0, 0], [0, 0], [0, 2]]
    pool.release(lent[:1])
    pool.uncache(lent[:1])
    assert states(pool)[2] == [0, 1]
    pool.uncache(lent[:1])
    assert states(pool) == [[0, 0], [0, 0], [0, 0], [0, 3]]
    pool.check()


def test_cached_blocks_fit_but_not_now() -> None:
    """Blocks that only the index refers to are in the way of `take`, not of what would fit after evicting them."""
    pool = one_and_three(2)
    lent = pool.take([0, 6])
    pool.cache(lent)
    pool.release(lent)
    need = np.array([2, 0])
    assert (pool.fits_now(need), pool.fits(need)) == (False, True)
    with pytest.raises(OutOfBlocks):
        pool.take(need)
    pool.uncache(lent[:3])
    assert pool.fits_now(np.array([1, 0]))
    pool.hold(lent[3:4])
    assert not pool.fits(need)
    assert pool.fits(np.array([1, 2]))


def test_draining_blocks_are_not_lent_before_their_step_settles() -> None:
    """What is released while a step is in flight is lent again only when the last step launched then has settled."""
    pool = one_and_three(1)
    lent = pool.take([0, 3])
    assert (pool.launch(), pool.launch()) == (1, 2)
    pool.release(lent)
    assert states(pool) == [[0, 0], [0, 3], [0, 0], [0, 0]]
    pool.settle(1)
    for settled in (False, True):
        assert pool.fits(np.array([1, 0])) == pool.fits(np.array([0, 1])) == settled
        assert pool.num_draining[1] == (0 if settled else 3)
        pool.check()
        if not settled:
            with pytest.raises(OutOfBlocks):
                pool.take([0, 1])
            pool.settle(2)
    assert take(pool, 0, 3) == [[], [3, 4, 5]]


def test_blocks_released_for_the_next_step_wait_for_it() -> None:
    """With `after_next` a block drains though no step is in flight, until the step launched next has settled."""
    pool = one_and_three(1)
    lent = pool.take([0, 3])
    pool.release(lent[:1], after_next=True)
    assert states(pool) == [[0, 2], [0, 1], [0, 0], [0, 0]]
    pool.settle(pool.launch())
    assert states(pool) == [[0, 2], [0, 0], [0, 0], [0, 1]]


def test_a_block_held_again_still_waits_for_its_copy() -> None:
    """A cached block whose copy is pending is held and released again; it drains until the copy's step has settled."""
    pool = one_and_three(1)
    lent = pool.take([0, 3])
    pool.cache(lent[:2])
    pool.release(lent[:2], after_next=True)
    pool.hold(lent[:2])
    assert states(pool) == [[0, 3], [0, 0], [0, 0], [0, 0]]
    pool.release(lent)
    pool.check()
    assert states(pool) == [[0, 0], [0, 2], [0, 0], [0, 1]]
    pool.uncache(lent[:1])
    assert states(pool) == [[0, 0], [0, 2], [0, 0], [0, 1]]
    pool.settle(pool.launch())
    assert states(pool) == [[0, 0], [0, 0], [0, 1], [0, 2]]


def test_only_steps_in_flight_settle() -> None:
    """Settling a step that was never launched, or has settled, is a `ValueError`; a later one settles those before."""
    pool = one_and_three(1)
    with pytest.raises(ValueError, match="step: got 1, but no step is in flight"):
        pool.settle(1)
    assert [pool.launch() for _ in range(3)] == [1, 2, 3]
    pool.settle(2)
    assert (pool.num_launched, pool.num_settled) == (3, 2)
    before = known(pool)
    for step in (-1, 0, 1, 2, 4):
        with pytest.raises(ValueError, match=f"step: got {step}, expected one of those in flight: 3..3"):
            pool.settle(step)
    assert known(pool) == before


def test_peaks_remember_the_most_blocks_held() -> None:
    """`peak_held` keeps each group's largest count, of blocks taken or held again, after blocks are released."""
    pool = three_and_two(3)
    lent = pool.take([4, 1])
    pool.cache(lent[:4])
    pool.release(lent[:4])
    pool.take([1, 1])
    assert (pool.num_held.tolist(), pool.peak_held.tolist()) == ([1, 2], [4, 2])
    pool.hold(lent[:4])
    assert (pool.num_held.tolist(), pool.peak_held.tolist()) == ([5, 2], [5, 2])


def test_a_move_takes_holders_and_references_along() -> None:
    """The targets are held or cached as the sources were; the sources drain until the copies' step has settled."""
    pool = one_and_three(3)
    lent = pool.take([0, 7])
    pool.hold(lent[:1])
    pool.cache(lent[:2])
    pool.release(lent[1:3])
    targets = flat(pool, 1, 11, 10)
    pool.move(lent[:2], targets)
    pool.check()
    assert (pool.holders[targets].tolist(), pool.cached[targets].tolist()) == ([2, 0], [1, 1])
    assert not pool.holders[lent[:2]].any()
    assert not pool.cached[lent[:2]].any()
    assert states(pool) == [[0, 5], [0, 2], [0, 1], [0, 1]]
    pool.settle(pool.launch())
    pool.check()
    assert (states(pool)[3], pool.num_empty_slabs.tolist()) == ([0, 3], [0, 1])


def test_idle_bytes_of_others_lie_in_slabs_they_cannot_give_up() -> None:
    """Free and cached blocks of other groups' pinned slabs count; those of slabs that could change hands do not."""
    plan = plan_slabs(gemma_like(2, 3), 4)
    pool = BlockPool(plan)
    strides = [group.block_stride_bytes for group in plan.groups]
    assert [pool.idle_foreign_bytes(group) for group in (0, 1)] == [0, 0]
    lent = pool.take([4, 1])
    pool.cache(lent[:4])
    pool.release(lent[:2])
    assert [pool.idle_foreign_bytes(group) for group in (0, 1)] == [strides[1], 4 * strides[0]]
    pool.release(lent[2:3])
    assert pool.idle_foreign_bytes(1) == 2 * strides[0]


def test_slabs_of_least_value_are_those_longest_unused() -> None:
    """Of other groups' slabs without a held block, that whose youngest cached block is oldest comes first."""
    pool = one_and_three(5)
    lent = pool.take([1, 12])
    pool.cache(lent)
    pool.release(np.delete(lent, 7))
    last_used = np.zeros(len(pool.holders), dtype=np.int64)
    last_used[lent] = [50, 9, 1, 1, 2, 8, 3, 99, 99, 0, 0, 7, 0]
    assert pool.slabs_of_least_value(0, last_used, 9).tolist() == [5, 3, 2]
    assert pool.slabs_of_least_value(0, last_used, 2).tolist() == [5, 3]
    assert pool.slabs_of_least_value(1, last_used, 9).tolist() == [1]
    assert pool.slabs_of_least_value(0, last_used, 0).tolist() == []
    pool.uncache(lent[[1, 2, 4, 5, 6]])
    assert pool.slabs_of_least_value(0, last_used, 9).tolist() == [2, 5]
    assert pool.blocks_of_slab(2).tolist() == lent[[3]].tolist()
    assert pool.blocks_of_slab(1).tolist() == lent[:1].tolist()
    assert pool.blocks_of_slab(4).tolist() == lent[7:10].tolist()
    assert pool.blocks_of_slab(0).tolist() == pool.blocks_of_slab(3).tolist() == []


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [-1, 0], [[1, 1]], 3])
def test_bad_counts_are_refused(counts: list[int]) -> None:
    """A request is one count of at least 0 for each group, a move one target for each source."""
    pool = three_and_two(3)
    before = known(pool)
    with pytest.raises(ValueError, match="expected 2 counts of at least 0"):
        pool.take(counts)
    with pytest.raises(ValueError, match="expected one for each of 1 sources"):
        pool.move(flat(pool, 0, 3), flat(pool, 0, 3, 4))
    assert known(pool) == before


def test_counts_put_off_add_up() -> None:
    """Slab counts read after hundreds of verbs are those of the blocks, and what is noted for them stays short."""
    pool, noted = pool_of(60, 2, 7), []
    lent = [pool.take([1, 3]) for _ in range(60)]
    for turn in range(600):
        pool.release(lent[turn % 60])
        lent[turn % 60] = pool.take([1, 3])
        noted.append(len(pool.slabs._touched))
    pool.check()
    assert pool.slab_used.sum() == pool.slab_pinned.sum() == pool.num_held.sum() == 240
    for block in np.concatenate(lent)[:200]:
        pool.release(np.array([block]))
        noted.append(len(pool.slabs._touched))
    assert max(noted) < 100
    pool.check()


def test_the_ids_lent_are_the_callers() -> None:
    """Whatever a caller does to the array of ids it was lent, or gave back, the pool counts the right blocks."""
    pool = one_and_three(3)
    lent = pool.take([1, 3])
    given_up = lent[1:].copy()
    lent[:] = 0
    pool.check()
    pool.launch()
    pool.release(given_up)
    given_up[:] = 0
    pool.settle(1)
    pool.check()
    assert states(pool) == [[1, 0], [0, 0], [0, 0], [0, 3]]


def empty_fraction(per_slab: int, num_slabs: int, lend: Callable[[int], np.ndarray], give_up: Verb) -> float:
    """Part of the slabs that is empty after sequences came and went, first in 85 %, then in 25 % of all blocks."""
    rng, live, num_used = np.random.default_rng(3), [], 0
    for fill in (0.85, 0.25):
        for _ in range(4_000):
            if num_used > fill * per_slab * num_slabs or (live and rng.random() < 0.05):
                gone = live.pop(rng.integers(len(live)))
                give_up(gone)
                num_used -= len(gone)
            else:
                count = int(rng.integers(1, 20))
                live.append(lend(count))
                num_used += count
    return 1 - len(np.unique(np.concatenate(live) // per_slab)) / num_slabs


@pytest.mark.parametrize(("per_slab", "num_slabs"), [(3, 400), (8, 200)])
def test_slabs_empty_together(per_slab: int, num_slabs: int) -> None:
    """When three quarters of the blocks are free again, most slabs are empty; a plain stack leaves few empty ones."""
    pool = pool_of(num_slabs, per_slab)
    stack = list(range(per_slab, per_slab * (num_slabs + 1)))
    naive = empty_fraction(per_slab, num_slabs, lambda n: np.array([stack.pop() for _ in range(n)]), stack.extend)
    ours = empty_fraction(per_slab, num_slabs, lambda n: pool.take([n]), pool.release)
    assert ours > 0.6
    assert ours > naive + 0.2
    pool.check()
