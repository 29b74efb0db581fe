"""Claims about block pools that are misused, run out of memory, or miscount."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from hybridkv import block_pool, drain_queue, free_stacks, pool_state, slab_exchange, slabs
from hybridkv.block_pool import BlockPool
from hybridkv.errors import InvariantError
from tests.pool_model import Verb, flat, known, pool_of, three_and_two
from tests.snapshots import snapshot

# Group 0 holds block 3 and caches 4; block 5 is free. Group 1's blocks 4, 5 and 6 are held, 7 drains.
MISUSES: list[tuple[str, Verb]] = [
    ("group 0 block 4 is given up more often", lambda pool: pool.release(flat(pool, 0, 3, 4))),
    ("group 0 block 3 is given up more often", lambda pool: pool.release(flat(pool, 0, 3, 3))),
    ("group 1 block 6 is given up more often", lambda pool: pool.release(flat(pool, 1, 6, 5, 6))),
    ("group 1 block 0 is given up more often", lambda pool: pool.release(flat(pool, 1, 0))),
    ("group 1 block 7 is given up more often", lambda pool: pool.release(flat(pool, 1, 7, 4))),
    ("flat ids -1..3 are not within 0..19", lambda pool: pool.release(flat(pool, 0, 3, -1))),
    ("flat ids 3..20 are not within 0..19", lambda pool: pool.release(flat(pool, 0, 20, 3))),
    ("group 0 block 5 is neither", lambda pool: pool.hold(flat(pool, 0, 3, 5))),
    ("group 1 block 7 is neither", lambda pool: pool.hold(flat(pool, 1, 7))),
    ("flat ids 99..99 are not within", lambda pool: pool.hold(flat(pool, 0, 99))),
    ("group 0 block 5 is neither", lambda pool: pool.cache(flat(pool, 0, 3, 5))),
    ("group 1 block 7 is neither", lambda pool: pool.cache(flat(pool, 1, 7))),
    ("group 0 block 0 is neither", lambda pool: pool.cache(flat(pool, 0, 0))),
    ("group 0 block 3 is uncached more often", lambda pool: pool.uncache(flat(pool, 0, 4, 3))),
    ("group 0 block 4 is uncached more often", lambda pool: pool.uncache(flat(pool, 0, 4, 4))),
    ("group 0 block 5 is moved but", lambda pool: pool.move(flat(pool, 0, 5), flat(pool, 0, 3))),
    ("group 1 block 7 is moved but", lambda pool: pool.move(flat(pool, 1, 7), flat(pool, 0, 5))),
    ("group 0 block 3 is moved to but", lambda pool: pool.move(flat(pool, 0, 4), flat(pool, 0, 3))),
    ("group 0 block 9 is moved to but", lambda pool: pool.move(flat(pool, 0, 4), flat(pool, 0, 9))),
    ("group 0 block 0 is moved to but", lambda pool: pool.move(flat(pool, 0, 4), flat(pool, 0, 0))),
    ("another group", lambda pool: pool.move(flat(pool, 1, 4), flat(pool, 0, 5))),
    ("group 0 block 5 is moved twice", lambda pool: pool.move(flat(pool, 0, 3, 4), flat(pool, 0, 5, 5))),
    ("group 0 block 3 is moved twice", lambda pool: pool.move(flat(pool, 0, 3, 3), flat(pool, 0, 5, 5))),
]


@pytest.mark.parametrize(("message", "verb"), MISUSES, ids=[message for message, _ in MISUSES])
def test_misuse_raises_and_changes_nothing(message: str, verb: Verb) -> None:
    """Giving up, sharing, caching or moving what is not there is an `InvariantError` that names the block."""
    pool = three_and_two(3)
    lent = pool.take([2, 4])
    pool.cache(lent[1:2])
    pool.release(lent[1:2])
    pool.release(lent[5:], after_next=True)
    before = known(pool)
    with pytest.raises(InvariantError, match=message):
        verb(pool)
    assert known(pool) == before


class FailingArray(np.ndarray):
    """Arrays whose k-th result that needs memory is not to be had; writing into them needs none."""

    countdown = -1

    @classmethod
    def count(cls) -> None:
        """Count one allocation, and fail if it is the one."""
        cls.countdown -= 1
        if cls.countdown == -1:
            raise MemoryError

    def __getitem__(self, key):
        if not isinstance(key, slice | int | np.integer):
            self.count()
        return super().__getitem__(key)

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        if out is None:
            self.count()
        plain = [np.asarray(value) for value in inputs]
        results = tuple(np.asarray(array) for array in out) if out else None
        value = getattr(ufunc, method)(*plain, out=results, **options)
        return value.view(FailingArray) if isinstance(value, np.ndarray) else value


class FailingNumpy:
    """The module `numpy`, or a part of it, whose calls count as allocations."""

    def __init__(self, part: object) -> None:
        self.part = part

    def __getattr__(self, name: str) -> object:
        value = getattr(self.part, name)
        return FailingNumpy(value) if callable(value) and not isinstance(value, type) else value

    def __call__(self, *args: object, **options: object) -> object:
        FailingArray.count()
        return self.part(*args, **options)


MODULES: list[ModuleType] = [block_pool, drain_queue, free_stacks, pool_state, slab_exchange, slabs]
FAILING_VERBS: dict[str, Verb] = {
    "take_own": lambda pool: pool.take([1, 2, 0]),
    "take_slabs": lambda pool: pool.take([2, 9, 4]),
    "take_empty_ones": lambda pool: pool.take([2, 1, 20]),
    "hold": lambda pool: pool.hold(flat(pool, 1, 16, 16, 17, 19)),
    "release": lambda pool: pool.release(flat(pool, 1, 16, 19, 20)),
    "release_after_next": lambda pool: pool.release(flat(pool, 1, 16, 19, 20), after_next=True),
    "cache": lambda pool: pool.cache(flat(pool, 1, 16, 19, 19)),
    "uncache": lambda pool: pool.uncache(flat(pool, 1, 16, 17, 18)),
    "move": lambda pool: pool.move(flat(pool, 1, 19, 17), flat(pool, 1, 21, 22)),
    "settle": lambda pool: pool.settle(pool.num_launched),
    "check": lambda pool: pool.check(),
}


def busy_pool(in_flight: bool) -> BlockPool:
    """A pool of 9 slabs with blocks in every state: slabs 1 and 2 of group 0, 3 to 6 of group 1, 7 of group 2."""
    pool = pool_of(9, 1, 5, 4)
    lent = pool.take([2, 20, 1])
    pool.release(lent[:2])
    pool.release(lent[8:])
    held, cached = flat(pool, 1, 15, 16, 19, 20), flat(pool, 1, 15, 16, 17, 18)
    assert lent[2:8].tolist() == flat(pool, 1, *range(15, 21)).tolist()
    pool.cache(cached)
    pool.launch()
    pool.release(flat(pool, 1, 17), after_next=True)
    pool.settle(pool.launch())
    pool.launch()
    pool.release(flat(pool, 1, 18))
    if not in_flight:
        pool.settle(3)
    assert not pool.holders[cached[2:]].any()
    assert pool.holders[held].all()
    return pool


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("name", FAILING_VERBS)
def test_the_kth_allocations_failure_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch, name: str, in_flight: bool
) -> None:
    """Whichever array of a verb cannot be had, every block, slab, order, count and peak is that of before."""
    pool, verb = busy_pool(in_flight), FAILING_VERBS[name]
    if name == "settle" and not in_flight:
        pool.release(flat(pool, 1, 19), after_next=True)
        pool.launch()
    before = known(pool)
    for part in (pool, pool.slabs, pool.free_stacks, pool.drain_queue):
        for attribute, value in vars(part).items():
            if isinstance(value, np.ndarray):
                setattr(part, attribute, value.view(FailingArray))
    num_failed, done = 0, False
    while not done:
        with monkeypatch.context() as patched:
            for module in MODULES:
                patched.setattr(module, "np", FailingNumpy(np))
            patched.setattr(FailingArray, "countdown", num_failed)
            try:
                verb(pool)
                done = True
            except MemoryError:
                num_failed += 1
        assert done or snapshot(pool) == before
    assert num_failed > 2
    pool.check()


CORRUPTIONS: list[Verb] = [
    lambda pool: pool.holders.__setitem__(0, 1),
    lambda pool: pool.holders.__setitem__(17, 1),
    lambda pool: pool.holders.__setitem__(3, 0),
    lambda pool: pool.holders.__setitem__(4, 1),
    lambda pool: pool.holders.__setitem__(3, -1),
    lambda pool: pool.cached.__setitem__(5, 1),
    lambda pool: pool.cached.__setitem__(4, 0),
    lambda pool: pool.cached.__setitem__(5, -1),
    lambda pool: pool.draining.__setitem__(3, True),
    lambda pool: pool.draining.__setitem__(16, False),
    lambda pool: pool.num_held.__setitem__(0, 2),
    lambda pool: pool.num_draining.__setitem__(1, 0),
    lambda pool: pool.peak_held.__setitem__(0, 0),
    lambda pool: pool.slab_used.__setitem__(1, 3),
    lambda pool: pool.slab_pinned.__setitem__(2, 0),
    lambda pool: pool.num_empty_slabs.__setitem__(0, 1),
    lambda pool: pool.slabs.num_pinned.__setitem__(1, 0),
    lambda pool: pool.num_slabs_of.__setitem__(1, 2),
    lambda pool: pool.slab_owner.__setitem__(1, -1),
    lambda pool: pool.slab_owner.__setitem__(3, 1),
    lambda pool: pool.slab_owner.__setitem__(0, 0),
    lambda pool: pool.slabs.free_stack().__setitem__(0, 1),
    lambda pool: pool.free_stacks.content(0).__setitem__(0, 4),
    lambda pool: pool.free_stacks.num.__setitem__(0, 0),
    lambda pool: pool.drain_queue._until.__setitem__(16, 0),
    lambda pool: pool.drain_queue._queue.clear(),
    lambda pool: setattr(pool.slabs, "num_free", 0),
    lambda pool: setattr(pool.drain_queue, "settled", 1),
]


@pytest.mark.parametrize("corruption", range(len(CORRUPTIONS)))
def test_check_finds_every_miscount(corruption: int) -> None:
    """Each count that `check` compares is missed by none: one wrong value raises an `InvariantError`."""
    pool = three_and_two(3)
    lent = pool.take([2, 1])
    pool.cache(lent[1:2])
    pool.release(lent[1:2])
    pool.launch()
    pool.release(lent[2:])
    pool.check()
    assert lent.tolist() == [3, 4, 16]
    CORRUPTIONS[corruption](pool)
    with pytest.raises(InvariantError):
        pool.check()
