"""The laws of the manager's host side, one test a law.

Elsewhere: law 7 and 12, and what laws 3 and 8 say of the device, in the tests of the step and of the kernels; law 9
with points of several groups in those of the prefix index; law 10 in those of the planner and of every kernel.
"""

from __future__ import annotations

import numpy as np
import pytest

from hybridkv.admission import Verdict
from hybridkv.errors import InvariantError
from hybridkv.limits import BatchLimits
from hybridkv.manager import CacheManager, ManagerOptions
from hybridkv.specs import SlidingWindow
from tests.manager_content import shared_writable
from tests.manager_steps import feed, row_ids, serve
from tests.models import FULL, kv_cache, model, plan_slabs, state_cache

SPEC = model(kv_cache(SlidingWindow(window=9)), state_cache(), kv_cache(FULL))
TOKENS = list(range(40))


def manager_of(num_slabs: int = 300, num_rows: int = 6) -> CacheManager:
    """Blocks of 4 tokens, a window of 9, states, full attention; memory on the host."""
    plan = plan_slabs(SPEC, num_slabs, BatchLimits(num_rows, 60, 20, 20), {0: 4, 2: 4})
    return CacheManager(plan, options=ManagerOptions(host_bytes=plan.memory_bytes))


def prefilled(num_rows: int) -> CacheManager:
    """Rows that have computed 22 tokens, the first 9 of them the same."""
    manager = manager_of()
    for row in range(num_rows):
        tokens = [*TOKENS[:9], *[50 + row] * 13]
        assert manager.admit(tokens).row == row
        feed(manager, row, tokens)
    manager.take_copies()
    return manager


def test_law_1_every_block_is_free_cached_held_or_draining_and_a_double_free_raises() -> None:
    """In every group the four counts add up to its slabs' blocks, through the life of a row; no block goes twice."""
    manager = manager_of()
    pool = manager.pool

    def add_up() -> None:
        manager.check()
        counts = pool.num_free + pool.num_cached + pool.num_held + pool.num_draining
        assert counts.tolist() == (pool.num_slabs_of * pool.blocks_per_slab).tolist()

    row = manager.admit(TOKENS).admitted_row
    feed(manager, row, TOKENS[:20])
    add_up()
    assert manager.reserve([row], [4]).num_ok == 1
    step = manager.launch([row], [4])
    add_up()
    flat = np.concatenate([np.array(ids) + pool.offsets[g] for g, ids in enumerate(row_ids(manager, row))])
    manager.finish(row)
    assert pool.num_draining.sum() == len(flat)
    add_up()
    manager.settle(step)
    assert (pool.num_held.sum(), pool.num_draining.sum()) == (0, 0)
    add_up()
    with pytest.raises(InvariantError, match="given up more often than it is held"):
        pool.release(flat[:1])
    with pytest.raises(ValueError, match="holds no sequence"):
        manager.finish(row)
    add_up()


def test_law_2_no_two_rows_hold_a_block_that_one_may_write_to() -> None:
    """Hits, forks and beams share only full, committed blocks; what is frozen is copied before it is used."""
    manager = prefilled(2)
    manager.fork(0, 2)
    manager.reorder([0, 1, 2], [1, 1, 0])
    serve(manager, [*TOKENS[:9], 70, 71])
    manager.admit([*TOKENS[:9], 70, 71, 72])
    rows = np.flatnonzero(manager.row_states == 1).tolist()
    assert len(rows) == 5
    for _ in range(5):
        assert shared_writable(manager, rows) == []
        assert manager.reserve(rows, [1] * len(rows)).num_ok == len(rows)
        manager.take_copies()
        manager.commit(rows, [1] * len(rows), rows)
        manager.check()


@pytest.mark.parametrize("verb", ["finish", "preempt", "swap", "move_row", "resume", "reorder", "window"])
def test_law_3_what_is_not_live_reads_null_and_a_freed_id_is_in_no_row(verb: str) -> None:
    """After every row operation columns that are not live are null, and freed ids stand nowhere."""
    manager = prefilled(3)
    mine = [{*ids} - {*row_ids(manager, 1)[g]} - {*row_ids(manager, 2)[g]} for g, ids in enumerate(row_ids(manager, 0))]
    gone = [0, 1, 2]
    match verb:
        case "finish":
            manager.finish(0)
        case "preempt":
            manager.preempt(0)
        case "swap":
            manager.preempt(0, to_host=True)
        case "resume":
            manager.preempt(0)
            manager.resume(0, [99])
        case "reorder":
            manager.reorder([0, 1, 2], [1, 2, 1])
        case "move_row":
            manager.move_row(0, 5)
            gone = []
        case "window":
            before = set(row_ids(manager, 0)[0])
            feed(manager, 0, [*TOKENS[:9], *[50] * 30])
            mine, gone = [before], [0]
    for group, table in enumerate(manager.tables):
        assert not table.entries[~table.live_mask()].any()
        if group in gone:
            assert mine[group].isdisjoint(table.entries.reshape(-1).tolist())
    manager.check()


def test_law_4_resume_replaces_a_row_reserve_grows_it_and_the_count_is_that_of_the_row() -> None:
    """A resumed row has nothing of before; one that reserves keeps what it had in front; ends follow the capacity."""
    manager = prefilled(1)
    before = row_ids(manager, 0)
    assert manager.reserve([0], [9]).num_ok == 1
    after = row_ids(manager, 0)
    assert [ids[: len(old)] for ids, old in zip(after, before, strict=True)] == before
    for group, table in enumerate(manager.tables):
        assert table.num_blocks_per_row[0] == manager._store.groups.ends(np.array([31]))[group, 0]
    manager.preempt(0)
    assert manager.resume(0, [7, 8]).num_hit_tokens == 0
    assert row_ids(manager, 0) == [[], [], []]
    assert manager.reserve([0], [2]).num_ok == 1
    assert [(int(t.first_block_per_row[0]), int(t.num_blocks_per_row[0])) for t in manager.tables] == [(0, 1)] * 3
    manager.check()


def test_law_5_equal_ids_of_different_groups_are_different_blocks() -> None:
    """Every group's ids count from its first slab on: freeing one group's block leaves its namesakes held."""
    manager = prefilled(4)
    tables, pool = manager.tables, manager.pool
    held = [{int(b) for row in range(4) for b in table.row_block_ids(row)} for table in tables]
    flat = [{b + int(pool.offsets[g]) for b in ids} for g, ids in enumerate(held)]
    assert len(set.union(*flat)) == sum(map(len, held))
    before = [pool.holders[sorted(of_group)].tolist() for of_group in flat]
    manager.reserve([0], [4])
    manager.commit([0], [4])
    dropped = held[0] - {int(b) for row in range(4) for b in tables[0].row_block_ids(row)}
    assert dropped
    for group in (1, 2):
        assert pool.holders[sorted(flat[group])].tolist() == before[group]
    copies = manager.fork(1, 1) and manager.take_copies().within
    assert set(copies[:, 0].tolist()) == {0, 1, 2}
    for group, source, target in copies.tolist():
        assert pool.holders[pool.offsets[group] + np.array([source, target])].all()


def test_law_8_no_null_block_and_no_negative_number_is_ever_handed_out() -> None:
    """Tables and copies name lent blocks only: never a block of slab 0, never -1."""
    manager = prefilled(3)
    manager.fork(0, 2)
    manager.preempt(1, to_host=True)
    copies = manager.take_copies()
    assert len(copies.within)
    assert len(copies.to_host)
    least = np.array([group.blocks_per_slab for group in manager.plan.groups])
    for part in (copies.within, copies.to_host, copies.moves, copies.from_host):
        assert (part[:, 1:] >= least[part[:, 0], None]).all()
    for group, table in enumerate(manager.tables):
        assert (table.entries[table.live_mask()] >= least[group]).all()
        assert (table.entries >= 0).all()


def test_law_9_the_hit_is_the_longest_that_every_group_accepts_and_looking_changes_nothing() -> None:
    """Without the states at 20 a prompt falls back to those at 12; asked again, the answer is the same."""
    manager = manager_of()
    serve(manager, [*TOKENS[:13], 90])
    serve(manager, TOKENS[:21])
    found = [manager.index.find(np.arange(40, dtype=np.int32)).num_hit_tokens for _ in range(2)]
    assert found == [21, 21]
    for point in manager.index.points.all():
        if point.position in (20, 21):
            manager.index.drop_resume(point)
    nodes = manager.index.num_nodes
    found = [manager.index.find(np.arange(40, dtype=np.int32)).num_hit_tokens for _ in range(2)]
    assert found == [12, 12]
    assert manager.index.num_nodes == nodes
    answer = manager.admit(TOKENS)
    assert answer.num_hit_tokens == 12
    assert answer.reason.startswith("hit 12 of 20 shared tokens")


def test_law_10_lengths_and_flat_blocks_are_64_bits_wide() -> None:
    """Positions, lengths, flat ids and copies are int64; only table entries, checked by the planner, are int32."""
    manager = prefilled(1)
    lengths = manager.num_computed_tokens, manager.num_settled_tokens, manager.num_committed_tokens
    flat = manager.pool.take([1, 1, 1])
    manager.fork(0, 1)
    arrays = (*lengths, manager.capacity_tokens, manager.pool.offsets, flat, manager.take_copies().within)
    assert {array.dtype for array in arrays} == {np.dtype(np.int64)}
    assert {table.entries.dtype for table in manager.tables} == {np.dtype(np.int32)}
    manager.pool.release(flat)


def test_law_11_what_does_not_fit_is_told_how_much_is_missing_where() -> None:
    """An admission and a reservation name the blocks missing in each group, now or for ever; what fits says so."""
    manager = manager_of(num_slabs=40)
    longest = manager.plan.longest_sequence()
    assert manager.admit(longest).verdict == Verdict.OK
    assert manager.plan.slabs_for(60) > 40 or longest == 60
    rows = [0, *(manager.admit(20).admitted_row for _ in range(5))]
    outcome = manager.reserve(rows, [20] * 6)
    first = outcome.num_ok
    assert 0 < first < 6
    assert (outcome.shortfall[:, :first] == 0).all()
    assert (np.diff(outcome.shortfall[:, first:].sum(axis=0)) > 0).all()
    assert set(outcome.verdicts[first:].tolist()) == {Verdict.LATER}
