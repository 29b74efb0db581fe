"""Lending the blocks of every group out of one set of slabs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import InvariantError
from hybridkv.pool_check import check_pool
from hybridkv.pool_state import PoolState
from hybridkv.slab_exchange import plan_exchange
from hybridkv.slabs import FREE


class BlockPool(PoolState):
    """The blocks of every group, and the verbs that change who holds them.

    Free blocks are lent from the fullest slab first, so that slabs empty together. A verb that raises leaves everything
    as it was: whatever can fail comes before the first change. Ids may occur several times in a call and count each
    time. The verbs take and return flat ids, `[n]` int64.
    """

    def take(self, counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Lend blocks of every group, each with one holder.

        Shapes: counts [num_groups]; returns [sum of counts], group by group
        Raises: OutOfBlocks if any group's share cannot be met without evicting; nothing is lent then.
        """
        wanted = np.asarray(counts, dtype=np.int64)
        listed = wanted.tolist()
        if wanted.shape != self.offsets.shape or min(listed) < 0:
            raise ValueError(f"counts: got {listed}, expected {self.num_groups} counts of at least 0")
        exchange = plan_exchange(self, wanted)
        parts = exchange.tops(self, listed) if exchange else self.free_stacks.tops(listed)
        if not parts:
            return np.empty(0, dtype=np.int64)
        flat = np.concatenate(parts)
        touched = flat.copy()
        held = self.num_held + wanted
        peak = np.maximum(self.peak_held, held)
        self._make_room_to_touch()
        if exchange:
            exchange.carry_out(self)
        self.free_stacks.pop(wanted)
        self.holders[touched] = 1
        self.num_held[:] = held
        self.peak_held[:] = peak
        self.slabs.touch(touched)
        return flat

    def hold(self, flat: NDArray[np.int64]) -> None:
        """Count one more holder of blocks that are held or referred to by the prefix index.

        Raises: InvariantError if a block is neither.
        """
        ids, times = self._distinct(flat)
        before = self.holders[ids]
        after = before + times
        if np.count_nonzero(before) == len(ids):
            self.holders[ids] = after
            return
        new = ids[before == 0]
        unknown = new[self.cached[new] == 0]
        if len(unknown):
            raise InvariantError(f"{self._name(unknown)} is neither held nor cached")
        held = self.num_held + self._by_group(new)
        drained = self._by_group(new[self.draining[new]])
        peak = np.maximum(self.peak_held, held)
        self._make_room_to_touch()
        self.holders[ids] = after
        self.draining[new] = False
        self.num_held[:] = held
        self.num_draining -= drained
        self.peak_held[:] = peak
        self.slabs.touch(new)

    def release(self, flat: NDArray[np.int64], *, after_next: bool = False) -> None:
        """Count one holder less of each block; what nobody holds then drains, is cached or is free.

        It drains if a step is in flight, until the last one launched has settled; with `after_next` until the next one
        launched has settled, for copies that were handed out and run before it.

        Raises: InvariantError for a block given up more often than it is held.
        """
        ids, times = self._distinct(flat)
        if not len(ids):
            return
        after = self.holders[ids] - times
        gone = ids
        if np.count_nonzero(after):
            excess = ids[after < 0]
            if len(excess):
                raise InvariantError(f"{self._name(excess)} is given up more often than it is held")
            gone = ids[after == 0]
        bounds = gone.searchsorted(self.edges)
        counts = bounds[1:] - bounds[:-1]
        step = self.drain_queue.launched + after_next
        if step > self.drain_queue.settled:
            self.drain_queue.add(gone, step)
            self.num_draining += counts
        elif self.drain_queue.any_waits:
            waits = self.drain_queue.waits(gone)
            waiting, rest = gone[waits], gone[~waits]
            num_waiting = self._by_group(waiting)
            self._let_go(rest, rest.searchsorted(self.edges))
            self.draining[waiting] = True
            self.num_draining += num_waiting
        else:
            self._let_go(gone, bounds)
        self.holders[ids] = after
        self.num_held -= counts

    def cache(self, flat: NDArray[np.int64]) -> None:
        """Count one more reference of the prefix index to blocks that are held or that it refers to already.

        Raises: InvariantError if a block is neither.
        """
        ids, times = self._distinct(flat)
        before = self.cached[ids]
        unknown = ids[(self.holders[ids] | before) == 0]
        if len(unknown):
            raise InvariantError(f"{self._name(unknown)} is neither held nor cached")
        self.cached[ids] = before + times

    def uncache(self, flat: NDArray[np.int64]) -> None:
        """Count one reference of the prefix index less; what nobody holds and nothing refers to is free then.

        A draining block goes on draining.

        Raises: InvariantError for a block given up more often than the index refers to it.
        """
        ids, times = self._distinct(flat)
        after = self.cached[ids] - times
        excess = ids[after < 0]
        if len(excess):
            raise InvariantError(f"{self._name(excess)} is uncached more often than it is cached")
        freed = ids[(after | self.holders[ids] | self.draining[ids]) == 0]
        self._free(freed, freed.searchsorted(self.edges), freed)
        self.cached[ids] = after

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Move holders and references from held or cached blocks to free ones of the same groups, pair by pair.

        The sources drain until the next step launched has settled: copies of their bytes run before it.

        Shapes: sources, targets [n], distinct
        Raises: InvariantError if a source is neither held nor cached, a target is not free or a pair's groups differ.
        """
        sources, targets = np.asarray(sources, dtype=np.int64), np.asarray(targets, dtype=np.int64)
        if not len(sources) == len(targets):
            raise ValueError(f"targets: got {len(targets)}, expected one for each of {len(sources)} sources")
        if not len(sources):
            return
        counts = self._check_moves(sources, targets)
        filled = np.zeros(len(self.holders), dtype=np.bool_)
        filled[targets] = True
        stacks = {}
        for group in np.flatnonzero(counts).tolist():
            stack = self.free_stacks.content(group)
            stacks[group] = stack[~filled[stack]]
        holders, cached, touched = self.holders[sources], self.cached[sources], np.concatenate([sources, targets])
        self._make_room_to_touch()
        self.drain_queue.add(touched[: len(sources)], self.drain_queue.launched + 1)
        for group, stack in stacks.items():
            self.free_stacks.replace(group, stack, is_sorted=False)
        self.holders[targets], self.cached[targets] = holders, cached
        self.holders[sources], self.cached[sources] = 0, 0
        self.num_draining += counts
        self.slabs.touch(touched)

    def launch(self) -> int:
        """Count a launched step and return its number, from 1 on."""
        return self.drain_queue.launch()

    def settle(self, step: int) -> None:
        """Count all steps up to `step` as finished; blocks that drained for them become cached or free.

        Raises: ValueError if the step has settled already or was never launched.
        """
        ready, left = self.drain_queue.ready(step)
        bounds = ready.searchsorted(self.edges)
        counts = bounds[1:] - bounds[:-1]
        self._let_go(ready, bounds)
        self.drain_queue.settle(step, ready, left)
        self.num_draining -= counts

    def check(self) -> None:
        """Check the accounting identity of every group and slab.

        Raises: InvariantError if a count does not add up.
        """
        check_pool(self)

    def _distinct(self, flat: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32] | np.int32]:
        """Return the ids once each, rising, and how often each one occurs."""
        ids = np.asarray(flat, dtype=np.int64).copy()
        ids.sort()
        if len(ids) and (ids[0] < 0 or ids[-1] >= len(self.holders)):
            raise InvariantError(f"flat ids {ids[0]}..{ids[-1]} are not within 0..{len(self.holders) - 1}")
        if np.count_nonzero(ids[1:] == ids[:-1]):
            ids, times = np.unique(ids, return_counts=True)
            return ids, times.astype(np.int32)
        return ids, np.int32(1)

    def _by_group(self, rising: NDArray[np.int64]) -> NDArray[np.int64]:
        bounds = rising.searchsorted(self.edges)
        counts: NDArray[np.int64] = bounds[1:] - bounds[:-1]
        return counts

    def _let_go(self, flat: NDArray[np.int64], bounds: NDArray[np.int64]) -> None:
        """Make rising blocks cached or free; group g's are those from `bounds[g]` to `bounds[g + 1]`."""
        cached = self.cached[flat]
        if np.count_nonzero(cached):
            freed = flat[cached == 0]
            self._free(freed, freed.searchsorted(self.edges), flat)
        else:
            self._free(flat, bounds, flat)

    def _free(self, freed: NDArray[np.int64], bounds: NDArray[np.int64], touched: NDArray[np.int64]) -> None:
        """Put rising blocks on the stacks; note all that were touched."""
        counts = bounds[1:] - bounds[:-1]
        places = self.free_stacks.places(bounds, counts)
        self._make_room_to_touch()
        self.free_stacks.push(freed, places, counts)
        self.slabs.touch(touched)

    def _make_room_to_touch(self) -> None:
        """Count the slabs before a change if many changes wait to be counted."""
        if self.slabs.must_count:
            self.counted_slabs()

    def _check_moves(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many blocks move in each group.

        Raises: InvariantError if the moves are not as `move` wants them.
        """
        distinct, times = self._distinct(np.concatenate([sources, targets]))
        if len(distinct) < len(sources) + len(targets):
            raise InvariantError(f"{self._name(distinct[times > 1])} is moved twice")
        idle = (self.states(sources) == FREE) | self.draining[sources]
        if np.count_nonzero(idle):
            raise InvariantError(f"{self._name(sources[idle])} is moved but neither held nor cached")
        groups = self.edges.searchsorted(targets, side="right") - 1
        is_free = (self.states(targets) == FREE) & (self.slab_owner[self.slabs.slab_of[targets]] == groups)
        if not is_free.all():
            raise InvariantError(f"{self._name(targets[~is_free])} is moved to but not a free block of its group")
        if (self.edges.searchsorted(sources, side="right") - 1 != groups).any():
            raise InvariantError(f"{self._name(targets)} and other targets: got sources of another group")
        return np.bincount(groups, minlength=self.num_groups)

    def _name(self, flat: NDArray[np.int64]) -> str:
        group = int(self.edges.searchsorted(flat[0], side="right")) - 1
        return f"group {group} block {flat[0] - self.offsets[group]}"
