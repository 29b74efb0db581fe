"""Claims about metrics: every number is what somebody who watches from outside counts."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest

from hybridkv.cache_metrics import CacheCounters, CacheMetrics
from hybridkv.manager import CacheManager, ManagerOptions
from hybridkv.resume_policy import ResumePolicy
from hybridkv.row_lengths import RowState
from tests.host.test_manager_random import SHAPES, make_world
from tests.manager_steps import feed, gemma_manager, serve, step
from tests.manager_world import World
from tests.models import gemma_like, limits, plan_slabs, state_and_attention

COUNTED_ELSEWHERE = {"skipped_points"}


class CountedWorld(World):
    """A manager whose every verb and every change of the index and the pool is counted from outside."""

    def watch(self) -> None:
        """Begin to count."""
        self.counts: Counter[str] = Counter()
        self.freed = np.zeros((2, len(self.plan.groups)), dtype=np.int64)  # evicted, out of window
        manager, pool, index = self.manager, self.manager.pool, self.manager.index
        assert index is not None
        admit, preempt, resume, move, uncache = (
            manager.admit,
            manager.preempt,
            manager.resume,
            pool.move,
            pool.uncache,
        )

        def counted_admit(tokens, *args, **kwargs):
            answer = admit(tokens, *args, **kwargs)
            num_prompt = tokens if isinstance(tokens, int) else len(tokens)
            if answer.row is not None:
                self.counts += Counter(admitted=1, prompt_tokens=num_prompt, hit_tokens=answer.num_hit_tokens)
            return answer

        def counted_preempt(row, **kwargs):
            state = preempt(row, **kwargs)
            self.counts["swapped_out" if state == RowState.SWAPPED else "preempted"] += 1
            return state

        def counted_resume(row, tokens):
            was = RowState(manager.row_states[row])
            answer = resume(row, tokens)
            if answer.row is not None:
                self.counts["swapped_in" if was == RowState.SWAPPED else "resumed"] += 1
            return answer

        def counted_move(sources, targets):
            move(sources, targets)
            self.counts["compaction_moves"] += len(sources)

        def counted_uncache(flat):
            before = pool.states(np.arange(len(pool.holders)))
            uncache(flat)
            freed = np.flatnonzero((before > 0) & (pool.states(np.arange(len(pool.holders))) == 0))
            self.freed[0] += np.bincount(
                np.searchsorted(pool.offsets, freed, side="right") - 1, minlength=pool.num_groups
            )

        manager.admit, manager.preempt, manager.resume = counted_admit, counted_preempt, counted_resume
        pool.move, pool.uncache = counted_move, counted_uncache
        index.trunk.watch = self._on_nodes
        index.points.watch = self._on_point
        for group, table in enumerate(manager.tables):
            table.drop_rows_head = self._dropping(group, table.drop_rows_head)

    def _dropping(self, group, drop):
        def counted_drop(*args):
            ids = drop(*args)
            self.freed[1, group] += len(ids)
            return ids

        return counted_drop

    def _on_nodes(self, nodes, is_new):
        self.counts["evicted_units"] += 0 if is_new else len(nodes)

    def _on_point(self, point, is_new):
        of = self.manager.index.trunk.nodes
        tail = point.contents.tail_tokens
        equal = self.manager.index.points.tail(point.node, tail, point.contents.tail_key) if len(tail) else None
        stays = (of.point[point.node] == point.slot) if not len(tail) else equal is point
        self.counts["dropped_points"] += bool(not is_new and stays)


def by_hand(manager: CacheManager, group: int) -> dict[str, float]:
    """A group's blocks, counted one by one."""
    pool, per_slab = manager.pool, manager.plan.groups[group].blocks_per_slab
    counts: Counter[str] = Counter()
    slabs = np.flatnonzero(pool.slab_owner == group).tolist()
    in_pinned, idle = 0, 0
    for slab in slabs:
        states = []
        for block in range(slab * per_slab, (slab + 1) * per_slab):
            flat = int(pool.offsets[group]) + block
            if pool.holders[flat]:
                states.append("held")
            elif pool.draining[flat]:
                states.append("draining")
            else:
                states.append("cached" if pool.cached[flat] else "free")
        counts.update(states)
        if {"held", "draining"} & set(states):
            in_pinned += per_slab
            idle += states.count("free") + states.count("cached")
    blocks = len(slabs) * per_slab
    return {
        **{state: counts[state] for state in ("held", "cached", "draining", "free")},
        "slabs": len(slabs),
        "fragmentation": idle / in_pinned if in_pinned else 0,
        "occupancy": (blocks - counts["free"]) / blocks if blocks else 0,
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_are_what_an_observer_counts(shape: str) -> None:
    """After any verbs each gauge is what counting block by block gives, each counter what the answers add up to."""
    total: Counter[str] = Counter()
    for seed in range(3):
        plain = make_world(shape, seed)
        world = CountedWorld(plain.plan, replace(plain.manager.options, prefix_caching=True), seed)
        world.watch()
        peaks = np.zeros(len(world.plan.groups), dtype=np.int64)
        for _ in range(8):
            world.run(20)
            metrics = world.manager.metrics()
            counted = {name: value for name, value in asdict(metrics.counters).items() if name not in COUNTED_ELSEWHERE}
            assert counted == {name: world.counts[name] for name in counted}
            peaks = check_groups(world, metrics, peaks)
            check_pool(world, metrics)
        total += world.counts
    assert total["admitted"] > 0
    assert total["evicted_units"] > 0


def check_groups(world: CountedWorld, metrics: CacheMetrics, peaks: np.ndarray) -> np.ndarray:
    """Compare each group's numbers; return the least that its peak may be from now on."""
    for group, of in enumerate(metrics.groups):
        expected = by_hand(world.manager, group)
        assert {name: getattr(of, name) for name in expected} == pytest.approx(expected)
        assert (of.group_id, of.lifecycle) == (group, world.plan.groups[group].group.lifecycle.kind)
        assert [of.evicted_blocks, of.freed_out_of_window] == world.freed[:, group].tolist()
        assert of.peak_held >= max(of.held, peaks[group])
    return np.array([of.peak_held for of in metrics.groups])


def check_pool(world: CountedWorld, metrics: CacheMetrics) -> None:
    """Compare the whole pool's numbers."""
    manager, pool = world.manager, metrics.pool
    assert pool.usable_slabs == world.plan.num_slabs - 1
    assert pool.free_slabs == np.count_nonzero(manager.pool.slab_owner[1:] == -1)
    occupied = sum(of.slabs * of.occupancy for of in metrics.groups) / pool.usable_slabs
    assert pool.occupancy == pytest.approx(occupied)
    states = manager.row_states.tolist()
    expected = [states.count(state) for state in (RowState.RUNNING, RowState.PREEMPTED, RowState.SWAPPED)]
    assert [pool.running_rows, pool.preempted_rows, pool.swapped_rows] == expected
    assert manager.index is not None
    assert pool.units == np.count_nonzero(manager.index.trunk.nodes.live & (manager.index.trunk.nodes.depth > 0))
    assert pool.resume_points == len(manager.index.points.all())
    assert metrics.counters.preempted + metrics.counters.swapped_out == manager.num_preemptions


def test_the_hit_rate_counts_admitted_tokens() -> None:
    """The hit rate is hit tokens a prompt token; prompts that wait and rows that return count for nothing."""
    plan = plan_slabs(gemma_like(1, 1, window=6), 60, limits(max_num_seqs=1))
    manager = CacheManager(plan)
    assert manager.metrics().hit_rate == 0
    serve(manager, [*range(12)])
    row = manager.admit([*range(16)]).admitted_row
    assert manager.admit([1, 2, 3]).row is None
    manager.preempt(row)
    manager.resume(row, [*range(16)])
    counters = manager.metrics().counters
    assert (counters.admitted, counters.prompt_tokens, counters.hit_tokens) == (2, 28, 12)
    assert manager.metrics().hit_rate == 12 / 28
    assert (counters.preempted, counters.resumed, counters.swapped_out, counters.swapped_in) == (1, 1, 0, 0)


def test_skipped_points_are_counted() -> None:
    """A resume point whose states find no room is counted, and the row runs on."""
    plan = plan_slabs(state_and_attention(), 40, limits(max_num_seqs=4), {1: 4})
    manager = CacheManager(plan, options=ManagerOptions(resume_points=ResumePolicy(every=4)))
    manager._store.lender.take_spare = lambda need: None  # type: ignore[method-assign]
    feed(manager, manager.admit([*range(20)]).admitted_row, [*range(20)])
    metrics = manager.metrics()
    assert (metrics.counters.skipped_points, metrics.pool.resume_points) == (5, 0)


def test_without_a_prefix_index_its_numbers_are_zero() -> None:
    """A manager that caches nothing has metrics too."""
    plan = plan_slabs(gemma_like(1, 1, window=6), 60)
    manager = CacheManager(plan, options=ManagerOptions(prefix_caching=False))
    row = manager.admit(8).admitted_row
    step(manager, row, 8)
    metrics = manager.metrics()
    assert (metrics.pool.units, metrics.pool.resume_points, metrics.counters.evicted_units) == (0, 0, 0)
    assert metrics.pool.running_rows == 1
    assert metrics.counters.prompt_tokens == 8


def test_metrics_change_nothing_and_are_json() -> None:
    """Reading the numbers twice gives the same, and JSON holds them as they are."""
    manager = gemma_manager()
    step(manager, manager.admit(8).admitted_row, 6)
    metrics = manager.metrics()
    assert manager.metrics() == metrics
    assert json.loads(json.dumps(asdict(metrics)))["counters"] == asdict(metrics.counters)


def test_the_text_format_is_prometheus() -> None:
    """Every line is a comment or `name{labels} value`, each name has one type, counters end in `_total`."""
    manager = gemma_manager()
    step(manager, manager.admit(8).admitted_row, 6)
    metrics = manager.metrics()
    text = metrics.to_prometheus()
    kinds, samples = {}, {}
    for line in text.splitlines():
        if match := re.fullmatch(r"# TYPE ([a-z_]+) (gauge|counter)", line):
            assert match[1] not in kinds
            kinds[match[1]] = match[2]
        else:
            match = re.fullmatch(r'([a-z_]+)((?:\{[a-z]+="\w+"(?:,[a-z]+="\w+")*\})?) ([0-9.e+-]+)', line)
            assert match, line
            assert match[1] in kinds
            samples[match[1] + match[2]] = float(match[3])
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())
    assert samples['hybridkv_group_blocks{group="0",lifecycle="sliding_window",state="held"}'] == metrics.groups[0].held
    assert samples['hybridkv_group_slabs{group="1",lifecycle="full_attention"}'] == metrics.groups[1].slabs
    assert samples["hybridkv_admitted_total"] == 1
    assert (
        kinds["hybridkv_group_evicted_blocks_total"] == kinds["hybridkv_group_freed_out_of_window_total"] == "counter"
    )
    assert kinds["hybridkv_group_peak_held"] == kinds["hybridkv_units"] == "gauge"
    assert len(samples) == len(asdict(metrics.pool)) + len(asdict(metrics.counters)) + 2 * 10
    assert set(asdict(metrics.counters)) == set(CacheCounters.__dataclass_fields__)
