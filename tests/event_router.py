"""A router that knows a cache by its events alone, and the documented hash in plain Python."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from hashlib import blake2b

import numpy as np

from hybridkv.cache_events import AllCleared, BlocksRemoved, BlocksStored, EventBatch, from_json, to_json
from hybridkv.prefix_index import PrefixIndex

MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15
SALTS: tuple[Hashable, ...] = (None, "x", ("x", 1), "other")  # of the worlds that routers follow
Checkpoint = tuple[int, int, int]  # group, position, hash


def mix(value: int) -> int:
    """The finalizer of splitmix64."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def content_of(salt: Hashable) -> int:
    """What stands for a salt."""
    if salt is None:
        return 0xA0761D6478BD642F
    if isinstance(salt, tuple):
        combined = len(salt)
        for item in salt:
            combined = (combined * STEP + content_of(item)) & MASK
        return combined
    if isinstance(salt, str | bytes):
        data = b"s" + salt.encode() if isinstance(salt, str) else b"b" + salt
        return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
    return int(salt) * STEP & MASK


class ReferenceHasher:
    """The hash of the documentation, one token at a time."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.weights = [mix(STEP * (i + 1) & MASK) | 1 for i in range(unit)]

    def digest(self, tokens: Sequence[int], key: int = 0) -> int:
        """What a unit of tokens adds, with the index's own number of the features on it."""
        words = tokens
        if self.unit % 2 == 0:
            pairs = [low + (high << 32) for low, high in zip(tokens[::2], tokens[1::2], strict=True)]
            words = [pair ^ pair >> 32 for pair in pairs]
        return mix((sum(map(int.__mul__, words, self.weights)) + key * 0xD6E8FEB86659FD93) & MASK)

    def hashes(self, tokens: Sequence[int], salt: Hashable = None) -> list[int]:
        """The hash of each prefix of whole units, the empty one first."""
        state, hashes = content_of(salt), [mix(content_of(salt))]
        for begin in range(0, len(tokens) - self.unit + 1, self.unit):
            state = (STEP * state + self.digest(tokens[begin : begin + self.unit])) & MASK
            hashes.append(mix(state))
        return hashes

    def prefix(self, tokens: Sequence[int], salt: Hashable = None) -> int:
        """The hash of a prefix of any length."""
        return self.behind(self.hashes(tokens, salt)[-1], tokens[len(tokens) // self.unit * self.unit :])

    def behind(self, whole: int, tail: Sequence[int], key: int = 0) -> int:
        """The hash of a prefix that ends less than a unit behind one of whole units."""
        padded = [*tail, *[0] * (self.unit - len(tail))]
        return mix((STEP * whole + self.digest(padded, key) + len(tail)) & MASK) if tail else whole


class Router:
    """What a cache has, by its events: nothing may come twice, and nothing may go that never came."""

    def __init__(self) -> None:
        self.units: set[tuple[int, int]] = set()
        self.checkpoints: set[Checkpoint] = set()
        self.tokens: dict[int | None, list[int]] = {None: []}
        self.next_sequence = 0
        self.num_stored, self.num_removed = 0, 0

    def follow(self, batch: EventBatch) -> None:
        """Take a batch, as it comes over the wire."""
        sent = from_json(to_json(batch))
        assert sent == batch
        has_gap = sent.first_sequence != self.next_sequence
        assert not has_gap or sent.events[0] == AllCleared()
        self.next_sequence = sent.first_sequence + len(sent.events)
        for event in sent.events:
            match event:
                case AllCleared():
                    self.units, self.checkpoints, self.tokens = set(), set(), {None: []}
                case BlocksStored():
                    self._store(event)
                case BlocksRemoved():
                    self._remove(event)

    def _store(self, event: BlocksStored) -> None:
        self.num_stored += 1
        before = self.tokens.get(event.parent_hash)
        if event.checkpoint_hash is not None:
            new = {(event.group_id, event.checkpoint_position, event.checkpoint_hash)}
            assert self.checkpoints.isdisjoint(new)
            self.checkpoints |= new
            covered = event.start_position + len(event.hashes) * event.unit_tokens + len(event.token_ids)
            assert covered == event.checkpoint_position
            return
        new = {(event.group_id, value) for value in event.hashes}
        assert self.units.isdisjoint(new)
        self.units |= new
        assert before is not None
        assert len(before) == event.start_position
        reference, tokens = ReferenceHasher(event.unit_tokens), before + list(event.token_ids)
        for i, value in enumerate(event.hashes):
            self.tokens[value] = tokens[: event.start_position + (i + 1) * event.unit_tokens]
        if event.is_portable:
            found = [reference.hashes(tokens, salt)[-len(event.hashes) :] for salt in SALTS]
            assert list(event.hashes) in found

    def _remove(self, event: BlocksRemoved) -> None:
        self.num_removed += 1
        if event.checkpoint_hash is not None:
            self.checkpoints.remove((event.group_id, event.checkpoint_position, event.checkpoint_hash))
        for value in event.hashes:
            self.units.remove((event.group_id, value))


def cached_in(index: PrefixIndex) -> tuple[set[tuple[int, int]], set[Checkpoint]]:
    """What an index holds, by group: units and checkpoints, read from its nodes and points one by one."""
    of, layout, trunk, reference = index.trunk.nodes, index.layout, index.trunk, ReferenceHasher(index.unit)
    salts = {root: salt for salt, root in trunk.roots.items()}
    units = {(group, int(of.hash[node])) for node in np.flatnonzero(of.live & (of.depth > 0)) for group in layout.full}
    checkpoints = set()
    for point in index.points.all():
        tail, key = point.contents.tail_tokens.tolist(), int(point.contents.tail_key)
        groups = set(layout.states if point.states.size else ()) | set(layout.token_groups if tail else layout.windowed)
        line = [point.node]
        while of.parent[line[-1]]:
            line.append(int(of.parent[line[-1]]))
        salt, path = salts[line.pop()], line[::-1]
        tokens = of.tokens[path].reshape(-1).tolist()
        whole = int(of.hash[path[-1]]) if of.keys[path].any() else reference.hashes(tokens, salt)[-1]
        value = reference.behind(whole, tail, key)
        checkpoints |= {(group, len(tokens) + len(tail), value) for group in groups}
    return units, checkpoints
