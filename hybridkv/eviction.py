"""Which resume points are worth keeping."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Int64 = NDArray[np.int64]
_HALF_LIFE = 4096  # uses of any points after which a use counts half
_SCORE_DECAY = 1 - 1 / 2048
_LEAD = 1.05  # what the cost-aware policy has to be better by before it is followed
_MIN_GHOSTS = 256
_GHOST_BATCH = 32


@dataclass(frozen=True)
class PointStats:
    """What is known of resume points, or of what a policy remembers of them.

    Shapes:
        last_used   [n] int64, time of the last use
        uses        [n] float64, uses, those of long ago counted less
        num_tokens  [n] int64, tokens to compute again without it: from the point before it on the path
        num_bytes   [n] int64, memory of its blocks
        position    [n] int64, tokens before it
    """

    last_used: Int64
    uses: Float
    num_tokens: Int64
    num_bytes: Int64
    position: Int64

    @classmethod
    def empty(cls, count: int) -> "PointStats":
        """Return room for `count` points."""
        zeros = np.zeros(count, dtype=np.int64)
        return cls(zeros, np.zeros(count), zeros.copy(), zeros.copy(), zeros.copy())

    def doubled(self) -> "PointStats":
        """Return the same with room for twice as many."""
        more = self.empty(len(self.last_used))
        return PointStats(
            np.concatenate([self.last_used, more.last_used]),
            np.concatenate([self.uses, more.uses]),
            np.concatenate([self.num_tokens, more.num_tokens]),
            np.concatenate([self.num_bytes, more.num_bytes]),
            np.concatenate([self.position, more.position]),
        )

    def take(self, slots: Int64) -> "PointStats":
        """Return the points with these slots alone."""
        return PointStats(
            self.last_used[slots], self.uses[slots], self.num_tokens[slots], self.num_bytes[slots], self.position[slots]
        )


class EvictionPolicy(Protocol):
    """Says which resume point goes first."""

    def value(self, points: PointStats) -> Float:
        """Return what each point is worth: the least goes first.

        Shapes: returns [n]
        """

    def record(self, identity: int, num_tokens: int, num_bytes: int) -> None:
        """Note that a point was used, or made because it was not there."""


class LruPolicy:
    """The point that was not used for longest goes first."""

    def value(self, points: PointStats) -> Float:
        """Return the time of each point's last use."""
        return points.last_used.astype(np.float64)

    def record(self, identity: int, num_tokens: int, num_bytes: int) -> None:
        """Learn nothing."""


class CostPolicy:
    """The point that saves the least work for its memory goes first: uses so far * tokens to compute again / bytes."""

    def value(self, points: PointStats) -> Float:
        """Return the tokens that a byte of each point has lately saved."""
        age = points.last_used.max(initial=0) - points.last_used
        saved: Float = points.uses * 0.5 ** (age / _HALF_LIFE) * points.num_tokens / np.maximum(points.num_bytes, 1)
        return saved

    def record(self, identity: int, num_tokens: int, num_bytes: int) -> None:
        """Learn nothing."""


class GhostCache:
    """What a policy would have kept in so many bytes: no content, only who would be there.

    Attributes:
        saved_tokens: tokens that hits would have saved, those of long ago counted less.
        num_used_bytes: bytes of the points that would be there.
    """

    def __init__(self, policy: EvictionPolicy, num_bytes: int) -> None:
        self._policy, self._num_bytes = policy, num_bytes
        self._slots: dict[int, int] = {}
        self._identities = np.zeros(_MIN_GHOSTS, dtype=np.int64)
        self._stats = PointStats.empty(_MIN_GHOSTS)
        self._free = list(range(_MIN_GHOSTS - 1, -1, -1))
        self.num_used_bytes = 0
        self._clock = 0
        self.saved_tokens = 0.0

    def __len__(self) -> int:
        return len(self._slots)

    def record(self, identity: int, num_tokens: int, num_bytes: int) -> None:
        """Use a point: a hit if it is here, else it comes in and others go."""
        self._clock += 1
        self.saved_tokens *= _SCORE_DECAY
        slot, stats = self._slots.get(identity), self._stats
        if slot is not None:
            self.saved_tokens += num_tokens
        else:
            if num_bytes > self._num_bytes:
                return
            if self.num_used_bytes + num_bytes > self._num_bytes:
                self._make_room(num_bytes)
            slot = self._new_slot(identity)
            stats = self._stats
            stats.uses[slot], stats.last_used[slot], stats.num_bytes[slot] = 0, self._clock, 0
        self.num_used_bytes += num_bytes - int(stats.num_bytes[slot])
        stats.num_tokens[slot], stats.num_bytes[slot] = num_tokens, num_bytes
        note_use(stats, slot, self._clock)

    def _make_room(self, num_bytes: int) -> None:
        slots = np.fromiter(self._slots.values(), dtype=np.int64, count=len(self._slots))
        stats = self._stats.take(slots)
        order = slots[np.lexsort((stats.last_used, self._policy.value(stats)))]
        # A few more than needed, so that one sort serves several newcomers.
        goal = self._num_bytes - num_bytes - self._num_bytes // _GHOST_BATCH
        for slot in order.tolist():
            if self.num_used_bytes <= max(goal, 0):
                return
            self.num_used_bytes -= int(self._stats.num_bytes[slot])
            del self._slots[int(self._identities[slot])]
            self._free.append(slot)

    def _new_slot(self, identity: int) -> int:
        if not self._free:
            have = len(self._identities)
            self._free = list(range(2 * have - 1, have - 1, -1))
            self._identities = np.concatenate([self._identities, np.zeros_like(self._identities)])
            self._stats = self._stats.doubled()
        slot = self._free.pop()
        self._slots[identity], self._identities[slot] = slot, identity
        return slot


class SelfTuningPolicy:
    """Cost-aware where that has lately saved more, else least recently used.

    Two ghost caches replay every use, one under each policy. The cost-aware one leads only while its ghost is ahead by
    more than noise, so that this policy never stays below least-recently-used.

    Attributes:
        leader: the policy in force.
        num_switches: how often it has changed.
    """

    def __init__(self, num_bytes: int) -> None:
        self._lru, self._cost = LruPolicy(), CostPolicy()
        self._lru_ghost, self._cost_ghost = GhostCache(self._lru, num_bytes), GhostCache(self._cost, num_bytes)
        self.leader: EvictionPolicy = self._lru
        self.num_switches = 0

    def value(self, points: PointStats) -> Float:
        """Return the leader's values."""
        return self.leader.value(points)

    def record(self, identity: int, num_tokens: int, num_bytes: int) -> None:
        """Replay a use under both policies, and follow the better one."""
        for ghost in (self._lru_ghost, self._cost_ghost):
            ghost.record(identity, num_tokens, num_bytes)
        leads = self.leader is self._cost
        margin = 1.0 if leads else _LEAD
        better = self._cost if self._cost_ghost.saved_tokens > margin * self._lru_ghost.saved_tokens else self._lru
        if better is not self.leader:
            self.leader, self.num_switches = better, self.num_switches + 1


def note_use(stats: PointStats, slot: int, now: int) -> None:
    """Count a use of a point at a time."""
    age = now - int(stats.last_used[slot])
    stats.uses[slot] = stats.uses[slot] * 0.5 ** (age / _HALF_LIFE) + 1
    stats.last_used[slot] = now
