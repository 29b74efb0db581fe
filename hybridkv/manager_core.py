"""What a manager is made of, and what it tells of itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybridkv.admitting import Identity
from hybridkv.block_pool import BlockPool
from hybridkv.block_table import BlockTable
from hybridkv.cache_events import EventBatch
from hybridkv.cache_metrics import CacheMetrics, VerbCounts, collect_metrics
from hybridkv.drafts import Drafts
from hybridkv.growing import Growth
from hybridkv.index_events import IndexEvents
from hybridkv.manager_view import DEFAULT_MAX_LINES, view_of
from hybridkv.plan import CachePlan
from hybridkv.prefix_index import PrefixIndex
from hybridkv.resume_policy import ResumePolicy
from hybridkv.sequence_store import SequenceStore
from hybridkv.swapping import Swaps, host_plan

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class ManagerOptions:
    """What a manager does beyond lending blocks.

    Attributes:
        prefix_caching: keep the blocks of ended sequences for prompts that begin alike.
        resume_points: where windows and states are kept, so that a sequence can go on from there.
        watermark: part of the memory that admissions leave free for running sequences, 0 to 1.
        host_bytes: memory on the host for the blocks of preempted rows.
        events: record what is cached and forgotten, for `drain_events`.
    """

    prefix_caching: bool = True
    resume_points: ResumePolicy = field(default_factory=ResumePolicy)
    watermark: float = 0.0
    host_bytes: int = 0
    events: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark: got {self.watermark}, expected a part from 0 to below 1")
        if self.host_bytes < 0:
            raise ValueError(f"host_bytes: got {self.host_bytes}, expected at least 0")
        if self.events and not self.prefix_caching:
            raise ValueError("events: got true without prefix_caching, which they tell of; turn it on")


class ManagerCore:
    """The parts of `CacheManager`, without its verbs."""

    def __init__(
        self,
        plan: CachePlan,
        tables: Sequence[BlockTable] | None = None,
        options: ManagerOptions | None = None,
    ) -> None:
        self.plan, self.options = plan, options if options is not None else ManagerOptions()
        self.pool = BlockPool(plan)
        host_pool = BlockPool(host_plan(plan, self.options.host_bytes)) if self.options.host_bytes else None
        self.index = (
            PrefixIndex(plan, self.pool, max_per_path=self.options.resume_points.max_per_path)
            if self.options.prefix_caching
            else None
        )
        self._store = SequenceStore(plan, tables, self.index, self.options.resume_points, host_pool, self.pool)
        num_spare = int(self.options.watermark * plan.num_usable_slabs)
        self._store.watermark_blocks[0] = num_spare * plan.groups[0].blocks_per_slab
        self.tables = self._store.tables
        self._drafts, self._swaps = Drafts(self._store), Swaps(self._store)
        self._identities: dict[int, Identity] = {}
        self._growth = Growth(self._store)
        rows = self._store.rows
        self.row_states = rows.states
        self.num_computed_tokens, self.num_settled_tokens = rows.computed, rows.settled
        self.num_committed_tokens, self.capacity_tokens = rows.committed, rows.capacity
        self.num_freed_out_of_window = self._store.num_freed_out_of_window
        self.num_preemptions = 0
        self._counts = VerbCounts()
        self._events = IndexEvents(self.index) if self.options.events and self.index is not None else None

    @property
    def peak_blocks_per_row(self) -> Int64:
        """[num_groups] int64, the most blocks one row ever held."""
        return self._store.peak_blocks_per_row

    @property
    def num_free_rows(self) -> int:
        """Rows that no sequence has."""
        return len(self._store.rows.free_rows())

    def metrics(self) -> CacheMetrics:
        """Return what the manager holds and has done, in numbers."""
        return collect_metrics(self._store, self._counts)

    def drain_events(self, *, from_scratch: bool = False) -> EventBatch:
        """Return what was cached and forgotten since the last call; see `hybridkv.cache_events`.

        Args:
            from_scratch: for a new listener: `AllCleared`, then all that is cached now, in place of that.

        Raises: ValueError without `ManagerOptions.events`.
        """
        if self._events is None:
            raise ValueError("drain_events: no events are recorded; give ManagerOptions(events=True)")
        return self._events.drain(from_scratch=from_scratch)

    def snapshot(self) -> dict[str, object]:
        """Return numbers, rows and prefix tree as what JSON can hold, for tests and bug reports."""
        return view_of(self._store, self._counts).to_dict()

    def describe(self, max_lines: int = DEFAULT_MAX_LINES) -> str:
        """Return pool, rows and prefix tree as text of at most `max_lines` lines."""
        return view_of(self._store, self._counts).to_text(max_lines)

    def check(self) -> None:
        """Check that pool, tables, rows and prefix index agree.

        Raises: InvariantError if they do not.
        """
        self._store.check()
