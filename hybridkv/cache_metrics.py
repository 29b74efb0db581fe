"""What a manager holds and has done, in numbers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from hybridkv.row_lengths import RowState
from hybridkv.sequence_store import SequenceStore

_BLOCK_STATES = ("held", "cached", "draining", "free")
_GROUP_GAUGES = ("peak_held", "slabs", "fragmentation", "occupancy")
_GROUP_COUNTERS = ("evicted_blocks", "freed_out_of_window")


@dataclass
class VerbCounts:
    """How often sequences came and paused, and with how many tokens: what no array of the manager keeps."""

    admitted: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    preempted: int = 0
    swapped_out: int = 0
    resumed: int = 0
    swapped_in: int = 0

    def note_admission(self, num_prompt: int, num_hit: int) -> None:
        """Count a sequence that was admitted."""
        self.admitted += 1
        self.prompt_tokens += num_prompt
        self.hit_tokens += num_hit

    def note_preemption(self, is_swapped: bool) -> None:
        """Count a row that was preempted, to be copied back or to be computed again."""
        if is_swapped:
            self.swapped_out += 1
        else:
            self.preempted += 1

    def note_return(self, was_swapped: bool) -> None:
        """Count a preempted row that runs again."""
        if was_swapped:
            self.swapped_in += 1
        else:
            self.resumed += 1


@dataclass(frozen=True)
class GroupMetrics:
    """One group's blocks.

    Attributes:
        held, cached, draining, free: blocks in these states now; they add up to those of the group's slabs.
        peak_held: the most blocks held at once.
        slabs: slabs the group owns.
        fragmentation: of the blocks in slabs that it cannot give up, the part that is free or cached; 0 to 1.
        occupancy: of the blocks in its slabs, the part that is not free; 0 to 1.
        evicted_blocks: blocks that became free because the index gave them up.
        freed_out_of_window: blocks freed because no query could see them again.
    """

    group_id: int
    lifecycle: str
    held: int
    cached: int
    draining: int
    free: int
    peak_held: int
    slabs: int
    fragmentation: float
    occupancy: float
    evicted_blocks: int
    freed_out_of_window: int


@dataclass(frozen=True)
class PoolMetrics:
    """How things are now.

    Attributes:
        usable_slabs, free_slabs: slabs that can be lent, those that no group owns.
        occupancy: part of the lendable memory whose blocks are held, cached or drain; 0 to 1.
        running_rows, preempted_rows, swapped_rows: rows in these states.
        units, resume_points: what the prefix index has.
    """

    usable_slabs: int
    free_slabs: int
    occupancy: float
    running_rows: int
    preempted_rows: int
    swapped_rows: int
    units: int
    resume_points: int


@dataclass(frozen=True)
class CacheCounters:
    """What happened since the manager was made.

    Attributes:
        admitted, prompt_tokens, hit_tokens: sequences that `admit` gave a row, their tokens, those that were cached.
        preempted, swapped_out: rows that were preempted to be computed again, to be copied back from the host.
        resumed, swapped_in: such rows that ran again.
        evicted_units, dropped_points: units and resume points that the index gave up.
        skipped_points: resume points that found no room for their states.
        compaction_moves: blocks that compaction moved.
    """

    admitted: int
    prompt_tokens: int
    hit_tokens: int
    preempted: int
    swapped_out: int
    resumed: int
    swapped_in: int
    evicted_units: int
    dropped_points: int
    skipped_points: int
    compaction_moves: int


@dataclass(frozen=True)
class CacheMetrics:
    """A manager's numbers at one time; `dataclasses.asdict` gives what JSON can hold."""

    groups: tuple[GroupMetrics, ...]
    pool: PoolMetrics
    counters: CacheCounters

    @property
    def hit_rate(self) -> float:
        """Hit tokens a prompt token of all admissions, 0 before the first."""
        return _part(self.counters.hit_tokens, self.counters.prompt_tokens)

    def to_prometheus(self, prefix: str = "hybridkv") -> str:
        """Return the numbers in Prometheus' text format: counters end in `_total`, groups and states are labels."""
        lines: list[str] = []

        def add(name: str, samples: Mapping[str, float], *, is_counter: bool = False) -> None:
            name = f"{prefix}_{name}_total" if is_counter else f"{prefix}_{name}"
            lines.append(f"# TYPE {name} {'counter' if is_counter else 'gauge'}")
            lines.extend(f"{name}{labels} {value}" for labels, value in samples.items())

        for name, value in asdict(self.pool).items():
            add(name, {"": value})
        for name, value in asdict(self.counters).items():
            add(name, {"": value}, is_counter=True)
        groups = {f'group="{g.group_id}",lifecycle="{g.lifecycle}"': asdict(g) for g in self.groups}
        states = {
            f'{{{labels},state="{state}"}}': of[state] for labels, of in groups.items() for state in _BLOCK_STATES
        }
        add("group_blocks", states)
        for name in (*_GROUP_GAUGES, *_GROUP_COUNTERS):
            samples = {f"{{{labels}}}": of[name] for labels, of in groups.items()}
            add(f"group_{name}", samples, is_counter=name in _GROUP_COUNTERS)
        return "\n".join(lines) + "\n"


def collect_metrics(store: SequenceStore, counts: VerbCounts) -> CacheMetrics:
    """Return the numbers of a manager's parts as they are."""
    pool, index, recorder = store.pool, store.index, store.recorder
    num_of_state = np.bincount(store.rows.states, minlength=len(RowState)).tolist()
    groups = _groups(store)
    occupied_slabs = sum(group.occupancy * group.slabs for group in groups)
    return CacheMetrics(
        groups=groups,
        pool=PoolMetrics(
            usable_slabs=store.plan.num_usable_slabs,
            free_slabs=pool.num_free_slabs,
            occupancy=_part(occupied_slabs, store.plan.num_usable_slabs),
            running_rows=num_of_state[RowState.RUNNING],
            preempted_rows=num_of_state[RowState.PREEMPTED],
            swapped_rows=num_of_state[RowState.SWAPPED],
            units=0 if index is None else index.num_nodes,
            resume_points=0 if index is None else index.num_resume_points,
        ),
        counters=CacheCounters(
            **asdict(counts),
            evicted_units=0 if index is None else index.trunk.num_evicted,
            dropped_points=0 if index is None else index.points.num_dropped,
            skipped_points=0 if recorder is None else recorder.num_skipped_points,
            compaction_moves=store.copies.num_moves,
        ),
    )


def _groups(store: SequenceStore) -> tuple[GroupMetrics, ...]:
    pool = store.pool
    idle, _ = pool.room_after_evicting()
    in_pinned = idle + pool.num_held + pool.num_draining
    owned = pool.num_slabs_of * pool.blocks_per_slab
    evicted = np.zeros_like(idle) if store.index is None else store.index.num_freed
    return tuple(
        GroupMetrics(
            group_id=g,
            lifecycle=group.group.lifecycle.kind,
            held=int(pool.num_held[g]),
            cached=int(pool.num_cached[g]),
            draining=int(pool.num_draining[g]),
            free=int(pool.num_free[g]),
            peak_held=int(pool.peak_held[g]),
            slabs=int(pool.num_slabs_of[g]),
            fragmentation=_part(int(idle[g]), int(in_pinned[g])),
            occupancy=_part(int(owned[g] - pool.num_free[g]), int(owned[g])),
            evicted_blocks=int(evicted[g]),
            freed_out_of_window=int(store.num_freed_out_of_window[g]),
        )
        for g, group in enumerate(store.plan.groups)
    )


def _part(count: float, total: int) -> float:
    return count / total if total else 0.0
