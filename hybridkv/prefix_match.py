"""How much of a prompt can be taken from the cache: the largest position that every group accepts.

full attention    any unit boundary of the shared path
window, chunked   a boundary before which all blocks that a later token can see are cached
state             exactly where a resume point keeps states
beside them       a resume point between two boundaries, whose tail is in the prompt: it has all it needs
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hybridkv.index_layout import IndexLayout
from hybridkv.node_arrays import NO_POINT
from hybridkv.resume_points import ResumePoint
from hybridkv.specs import ChunkedAttention, SlidingWindow

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
_FIRST_BATCH = 64


@dataclass(frozen=True)
class Limit:
    """What keeps a hit short of what is shared.

    Attributes:
        group: the group whose removal raises the hit most; None if no single one's does.
        num_tokens_without: the hit if that group were not there.
        kept_at: the last positions, at most four, that the group accepts by itself, rising.
    """

    group: int | None
    num_tokens_without: int
    kept_at: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """What of a prompt's prefix is cached, by group.

    Shapes:
        missing  per windowed group [...] int64, the ordinals whose blocks are not cached, rising
        points  [num_units] int32, the slot of the point behind each unit, or `NO_POINT`
        stated  [num_units] bool, whether that point has states; None without states
    Attributes:
        max_tokens: the longest hit allowed: all tokens but one.
        tails: points between boundaries whose tails are in the prompt, with at least a token behind them.
    """

    layout: IndexLayout
    max_tokens: int
    num_units: int
    missing: tuple[Int64, ...]
    points: Int32
    stated: Bool | None
    tails: tuple[ResumePoint, ...]

    def hit(self, without: int | None = None) -> int:
        """Return the largest position every group but `without` accepts."""
        last = min(self.num_units, self.max_tokens // self.layout.unit)
        at_tail = max((point.position for point in self.tails if self._tail_serves(point, without)), default=0)
        windows = [i for i, group in enumerate(self.layout.windowed) if group != without]
        if self.stated is not None and any(group != without for group in self.layout.states):
            ends = np.flatnonzero(self.stated[:last]) + 1
            for i in windows:
                ends = ends[self._accepts(i, ends)]
            return max(int(ends[-1]) * self.layout.unit if len(ends) else 0, at_tail)
        if not windows:
            return max(last * self.layout.unit, at_tail)
        # The last of many boundaries: mostly it is near the end.
        first, stop, count = at_tail // self.layout.unit + 1, last + 1, _FIRST_BATCH
        while stop > first:
            ends = np.arange(max(stop - count, first), stop)
            for i in windows:
                ends = ends[self._accepts(i, ends)]
            if len(ends):
                return int(ends[-1]) * self.layout.unit
            stop, count = stop - count, 4 * count
        return at_tail

    def accepted_by(self, group: int) -> Int64:
        """Return all positions that one group accepts, whatever the others do, rising."""
        last = min(self.num_units, self.max_tokens // self.layout.unit)
        ends = np.arange(1, last + 1)
        if group in self.layout.windowed:
            ends = ends[self._accepts(self.layout.windowed.index(group), ends)]
        elif group in self.layout.states:
            ends = np.flatnonzero(self.stated[:last]) + 1 if self.stated is not None else ends[:0]
        tails = [p.position for p in self.tails if group not in self.layout.states or p.states.size]
        return np.unique(np.concatenate([ends * self.layout.unit, np.array(tails, dtype=np.int64)]))

    def limit(self) -> Limit:
        """Return which group limits the hit, and to what."""
        hit = self.hit()
        limiting = (*self.layout.windowed, *self.layout.states)
        without = {group: self.hit(group) for group in limiting}
        group = max(limiting, key=lambda g: without[g], default=None)
        if group is None or without[group] <= hit:
            return Limit(None, hit, ())
        return Limit(group, without[group], tuple(self.accepted_by(group)[-4:].tolist()))

    def serving(self, position: int) -> int | None:
        """Return the slot of the point that a hit at `position` lives on: it ends there, or next behind."""
        if position % self.layout.unit:
            return next(point.slot for point in self.tails if point.position == position)
        later = self.points[position // self.layout.unit - 1 :] if position else self.points[:0]
        slots = later[later != NO_POINT]
        return int(slots[0]) if slots.size else None

    def _tail_serves(self, point: ResumePoint, without: int | None) -> bool:
        needs_states = any(group != without for group in self.layout.states)
        return point.states.size > 0 or not needs_states

    def _accepts(self, window: int, ends: Int64) -> Bool:
        """Return at which unit boundaries all blocks that a later token can see are there."""
        place, missing = self.layout.windows[window], self.missing[window]
        if not len(missing):
            return np.ones(len(ends), dtype=np.bool_)
        before = missing.searchsorted(ends * place.per_unit)
        last_missing = np.where(before > 0, missing[before - 1], -1)
        accepts: Bool = last_missing < place.first_ordinals(ends * self.layout.unit)
        return accepts


@dataclass(frozen=True, eq=False)
class Match:
    """A prompt's shared prefix and its hit. It holds as long as nothing is evicted: pin `node_at` before that.

    Shapes:
        path    [num_shared_tokens / unit] int32 nodes
        hashes  [whole units of the prompt] uint64
        keys    [units of the prompt, the last one may be part of one] int32
        states  [whole units of the prompt] uint64, hash states after each
    Attributes:
        num_tokens: tokens of the prompt.
        num_hit_tokens: tokens that can be taken from the cache, at most all but one.
        serving: the point whose blocks the hit needs, where it ends or behind it; None where the trunk alone is enough.
    """

    shared: SharedPrefix
    path: Int32
    hashes: NDArray[np.uint64]
    keys: Int32
    states: NDArray[np.uint64]
    start: np.uint64
    num_tokens: int
    num_hit_tokens: int
    serving: ResumePoint | None
    root: Callable[[], int]

    @property
    def num_shared_tokens(self) -> int:
        """Tokens of the path, whether a sequence can go on from there or not."""
        return len(self.path) * self.shared.layout.unit

    @property
    def resume(self) -> ResumePoint | None:
        """The point at exactly the hit, None without one."""
        at_hit = self.serving is not None and self.serving.position == self.num_hit_tokens
        return self.serving if at_hit else None

    def node_at(self, num_units: int) -> int:
        """Return the node after so many units of the path; the root for 0, made if the salt is new."""
        return int(self.path[num_units - 1]) if num_units else self.root()

    def hash_state_at(self, num_units: int) -> np.uint64:
        """Return the hash state after so many units of the prompt."""
        return np.uint64(self.states[num_units - 1]) if num_units else self.start

    @cached_property
    def _limit(self) -> Limit:
        return self.shared.limit()

    def limit(self) -> Limit:
        """Return which group limits the hit."""
        return self._limit

    def explain(self) -> str:
        """Return one sentence: how long the hit is and what keeps it from being longer."""
        hit, shared, layout = self.num_hit_tokens, max(self.num_shared_tokens, self.num_hit_tokens), self.shared.layout
        if not shared:
            return f"hit 0 of {self.num_tokens:,} tokens: no cached prefix has the same first {layout.unit:,} tokens"
        counts = f"hit {hit:,} of {shared:,} shared tokens"
        limit = self.limit()
        if limit.group is not None:
            them = "it" if limit.group in layout.windowed else "them"
            gain = f"without {them} {limit.num_tokens_without:,} would be hit"
            return f"{counts}: {_name(layout, limit.group)} {_kept(limit, layout)}; {gain}"
        if hit < shared and hit < self.shared.max_tokens // layout.unit * layout.unit:
            return f"{counts}: no single group's cache ends there, several do"
        if hit < shared:
            return f"{counts}: at least one token of the prompt is left to compute"
        return counts


def _name(layout: IndexLayout, group: int) -> str:
    place = layout.place_of(group)
    match place.lifecycle if place else None:
        case SlidingWindow(window=window):
            return f"the window of {window:,} tokens (group {group})"
        case ChunkedAttention(chunk=chunk):
            return f"the chunk of {chunk:,} tokens (group {group})"
        case _:
            return f"the states (group {group})"


def _kept(limit: Limit, layout: IndexLayout) -> str:
    is_window = limit.group in layout.windowed
    if not limit.kept_at:
        return f"{'is' if is_window else 'are'} not kept anywhere on it"
    return f"{'is' if is_window else 'are'} kept at {limit.kept_at[-1]:,}"
