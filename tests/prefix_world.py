"""Sequences that share a prefix index, with an obvious model of what it may hand out.

`PrefixWorld` writes into every block who wrote it: the salt, the tokens and the features before the block's end.
Whoever takes a block from the index compares that stamp with its own prompt: any other stamp is somebody else's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from hybridkv.block_pool import BlockPool
from hybridkv.errors import OutOfBlocks
from hybridkv.eviction import EvictionPolicy
from hybridkv.plan import CachePlan
from hybridkv.prefix_index import Match, PrefixIndex, ResumePoint, Tail
from hybridkv.token_hash import UnitHasher

Feature = tuple[int, Hashable]
Prefix = tuple[Hashable, tuple[int, ...], tuple[Feature, ...]]


def prefix_of(salt: Hashable, tokens: list[int], features: tuple[Feature, ...], end: int) -> Prefix:
    """Everything that the cache of the first `end` tokens depends on."""
    return salt, tuple(tokens[:end]), tuple(sorted(feature for feature in features if feature[0] < end))


@dataclass(eq=False)
class Row:
    """A running sequence: its tokens so far, its place in the index, its blocks by group and ordinal."""

    salt: Hashable
    features: tuple[Feature, ...]
    tokens: list[int]
    keys: np.ndarray
    node: int
    state: np.uint64
    blocks: list[dict[int, int]] = field(default_factory=list)
    states: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


@dataclass(frozen=True)
class KnownPoint:
    """A resume point as the model knows it."""

    prefix: Prefix
    has_states: bool


class Model:
    """Which prefixes and points are cached: sets, and a search that tries every position."""

    def __init__(self, index: PrefixIndex) -> None:
        self.layout = index.layout
        self.units: set[Prefix] = set()
        self.points: set[KnownPoint] = set()

    def num_shared(self, salt: Hashable, tokens: list[int], features: tuple[Feature, ...]) -> int:
        """Tokens of whole units that are cached."""
        unit, shared = self.layout.unit, 0
        while shared + unit <= len(tokens) and prefix_of(salt, tokens, features, shared + unit) in self.units:
            shared += unit
        return shared

    def num_hit(self, salt: Hashable, tokens: list[int], features: tuple[Feature, ...]) -> int:
        """The largest position that every group accepts."""
        shared = self.num_shared(salt, tokens, features)
        for position in range(len(tokens) - 1, 0, -1):
            whole = position // self.layout.unit * self.layout.unit
            if whole <= shared and self._accepts(salt, tokens, features, position):
                return position
        return 0

    def _accepts(self, salt: Hashable, tokens: list[int], features: tuple[Feature, ...], position: int) -> bool:
        here = prefix_of(salt, tokens, features, position)
        with_states = KnownPoint(here, True) in self.points
        if position % self.layout.unit:
            return with_states or (not self.layout.states and KnownPoint(here, False) in self.points)
        if self.layout.states and not with_states:
            return False
        return all(
            self._keeps(
                place,
                prefix_of(
                    salt, tokens, features, (ordinal * place.block_size // self.layout.unit + 1) * self.layout.unit
                ),
                ordinal,
            )
            for place in self.layout.windows
            for ordinal in range(place.first_ordinal(position), position // place.block_size)
        )

    def _keeps(self, place, unit_prefix: Prefix, ordinal: int) -> bool:
        """Whether a point behind a unit needs one of its blocks."""
        length = len(unit_prefix[1])
        return any(
            len(known.prefix[1]) >= length
            and prefix_of(known.prefix[0], list(known.prefix[1]), known.prefix[2], length) == unit_prefix
            and ordinal >= place.first_ordinal(len(known.prefix[1]))
            for known in self.points
        )


class Lender:
    """Takes blocks, evicting where it must: what the pool promises to fit has to fit then."""

    def __init__(self, pool: BlockPool, index: PrefixIndex) -> None:
        self.pool, self.index, self.num_evictions = pool, index, 0

    def take(self, need: np.ndarray) -> np.ndarray:
        """Take blocks by group."""
        pool, index = self.pool, self.index
        if not pool.fits_now(need) and pool.fits(need):
            self.num_evictions += 1
            groups = np.flatnonzero(need).tolist()
            # Again and again: a slab that one group emptied may go to another.
            while not pool.fits_now(need):
                cached = int(pool.num_cached.sum())
                assert cached, "blocks were to fit after evicting"
                for group in groups:
                    index.evict(group, int(need[group]))
                    slabs = pool.slabs_of_least_value(group, index.last_used_of_blocks(), 1).tolist()
                    if not pool.fits_now(need) and slabs:
                        index.drop_blocks(pool.blocks_of_slab(slabs[0]))
                assert int(pool.num_cached.sum()) < cached, "nothing was evicted"
        return self.pool.take(need)


class PrefixWorld:
    """Rows, a pool, an index, a model."""

    def __init__(
        self,
        plan: CachePlan,
        *,
        make_hasher: Callable[[int], UnitHasher] | None = None,
        policy: EvictionPolicy | None = None,
        max_per_path: int = 8,
    ) -> None:
        self.plan, self.pool = plan, BlockPool(plan)
        index = PrefixIndex(plan, self.pool)
        hasher = make_hasher(index.unit) if make_hasher else None
        self.index = PrefixIndex(plan, self.pool, hasher=hasher, policy=policy, max_per_path=max_per_path)
        self.lender = Lender(self.pool, self.index)
        self.layout, self.unit = self.index.layout, self.index.unit
        self.model = Model(self.index)
        self.rows: list[Row] = []
        self.stamps: dict[int, Prefix] = {}

    # Sequences

    def find(self, tokens: list[int], salt: Hashable = None, features: tuple[Feature, ...] = ()) -> Match:
        """Look a prompt up, twice, and compare with the model."""
        found = self.index.find(np.array(tokens, dtype=np.int32), salt, features)
        again = self.index.find(np.array(tokens, dtype=np.int32), salt, features)
        assert (found.num_hit_tokens, found.path.tolist()) == (again.num_hit_tokens, again.path.tolist())
        assert found.num_shared_tokens == self.model.num_shared(salt, tokens, features)
        assert found.num_hit_tokens == self.model.num_hit(salt, tokens, features)
        assert found.num_hit_tokens < max(len(tokens), 1)
        self._check_blocks(found, salt, tokens, features)
        assert found.explain()
        return found

    def admit(self, tokens: list[int], salt: Hashable = None, features: tuple[Feature, ...] = ()) -> Row | None:
        """Start a row with a prompt's hit, and compute the rest of the prompt; None if there is no room."""
        match = self.find(tokens, salt, features)
        hit, num_units = match.num_hit_tokens, match.num_hit_tokens // self.unit
        row = Row(salt, features, tokens[:hit], match.keys, match.node_at(num_units), match.hash_state_at(num_units))
        self.index.pin(np.array([row.node], dtype=np.int32))
        self.index.touch(match)
        row.blocks = [{} for _ in self.plan.groups]
        taken = self.index.hit_blocks(match)
        shared = []
        for place in self.layout.places:
            first, flat = taken[place.group_id]
            row.blocks[place.group_id] = dict(enumerate(flat.tolist(), start=first))
            shared.append(flat)
        self.pool.hold(np.concatenate([*shared, np.empty(0, dtype=np.int64)]))
        # States are copied, and what is behind the last whole unit: the index knows a block by one prefix.
        whole = hit // self.unit * self.unit
        behind = [
            (place, ordinal)
            for place in self.layout.places
            for ordinal in row.blocks[place.group_id]
            if ordinal >= whole // place.block_size
        ]
        need = np.zeros(len(self.plan.groups), dtype=np.int64)
        for place, _ in behind:
            need[place.group_id] += 1
        for group, parts in zip(self.layout.states, self.layout.num_parts, strict=True):
            need[group] = parts
        try:
            own = self.lender.take(need)
        except OutOfBlocks:
            self._leave(row)
            return None
        groups = np.repeat(np.arange(len(need)), need)
        copies = own[np.isin(groups, self.layout.token_groups)].tolist()
        for (place, ordinal), copy in zip(behind, copies, strict=True):
            self.pool.release(np.array([row.blocks[place.group_id][ordinal]]))
            row.blocks[place.group_id][ordinal] = copy
            self.stamps[copy] = prefix_of(salt, tokens, features, min((ordinal + 1) * place.block_size, hit))
        row.states = own[np.isin(groups, self.layout.states)]
        self._write_states(row)
        self.rows.append(row)
        self.grow(row, tokens[hit:])
        return row if row in self.rows else None

    def grow(self, row: Row, tokens: list[int]) -> None:
        """Compute more tokens of one row and cache the units they fill; a row without room is preempted."""
        before, unit = len(row.tokens), self.unit
        if not self._compute(row, tokens):
            return
        first, last = before // unit, len(row.tokens) // unit
        if last == first or not row.node:
            return
        whole = np.array(row.tokens[first * unit : last * unit], dtype=np.int32)
        keys = self._keys(row, first, last)
        hashes, row.state = self.index.hasher.chain(row.state, whole, keys)
        blocks = np.array([self._unit_blocks(row, i) for i in range(first, last)], dtype=np.int64).reshape(
            last - first, -1
        )
        nodes = self.index.add_chain(row.node, hashes, whole.reshape(-1, unit), keys, blocks)
        added = int((nodes > 0).sum())
        assert (nodes[:added] > 0).all(), "a chain goes on behind a collision"
        self._learn(row, first, first + added)
        self._step_on(row, int(nodes[added - 1]) if added else row.node, added == len(nodes))

    def decode(self, rows: list[Row], tokens: list[int]) -> None:
        """Compute one token of each row and cache the units they fill in one call."""
        rows = [row for row, token in zip(rows, tokens, strict=True) if self._compute(row, [token])]
        rows = [row for row in rows if row in self.rows and len(row.tokens) % self.unit == 0 and row.node]
        if not rows:
            return
        ends = [len(row.tokens) for row in rows]
        units = np.array([row.tokens[-self.unit :] for row in rows], dtype=np.int32)
        keys = np.array(
            [self._keys(row, e // self.unit - 1, e // self.unit)[0] for row, e in zip(rows, ends, strict=True)]
        )
        states = np.array([row.state for row in rows])
        hashes, after = self.index.hasher.many(states, units, keys.astype(np.int32))
        blocks = np.array([self._unit_blocks(row, e // self.unit - 1) for row, e in zip(rows, ends, strict=True)])
        parents = np.array([row.node for row in rows], dtype=np.int32)
        nodes = self.index.add_leaves(
            parents, hashes, units, keys.astype(np.int32), blocks.astype(np.int64).reshape(len(rows), -1)
        )
        for row, node, state, end in zip(rows, nodes.tolist(), after, ends, strict=True):
            row.state = state
            if node:
                self._learn(row, end // self.unit - 1, end // self.unit)
        self.index.move_pins(parents, nodes)
        for row, node in zip(rows, nodes.tolist(), strict=True):
            if node:
                row.node = node
            else:
                self._untrack(row)

    def keep(self, row: Row) -> ResumePoint | None:
        """Keep a running row's last whole unit, its states by copy."""
        position = len(row.tokens)
        if position % self.unit or not position or not row.node:
            return None
        need = np.zeros(len(self.plan.groups), dtype=np.int64)
        for group, parts in zip(self.layout.states, self.layout.num_parts, strict=True):
            need[group] = parts
        try:
            copies = self.lender.take(need)
        except OutOfBlocks:
            return None
        for flat in copies.tolist():
            self.stamps[flat] = prefix_of(row.salt, row.tokens, row.features, position)
        point = self._add_point(row, copies, None)
        self.pool.release(copies)
        return point

    def finish(self, row: Row, keep: bool = True) -> ResumePoint | None:
        """End a row, with its end kept."""
        point = None
        end = len(row.tokens)
        if keep and row.node and end:
            tail = None
            if end % self.unit:
                begin = end - end % self.unit
                blocks = [
                    np.array(
                        [
                            row.blocks[p.group_id].get(i, 0)
                            for i in range(begin // p.block_size, -(-end // p.block_size))
                        ]
                    )
                    for p in self.layout.places
                ]
                tail = Tail(
                    np.array(row.tokens[begin:]), blocks, self._keys(row, end // self.unit, end // self.unit + 1)[0]
                )
            point = self._add_point(row, row.states, tail)
        self.rows.remove(row)
        self._leave(row)
        return point

    # Losses

    def evict(self, group: int, count: int) -> int:
        """Evict blocks of a group, then see what is left."""
        before = int(self.pool.num_cached[group])
        freed = self.index.evict(group, count)
        assert freed >= min(count, before), "cached blocks were not given up"
        assert freed == before - int(self.pool.num_cached[group])
        self.forget()
        return freed

    def forget(self) -> None:
        """Let the model forget what the index does not have any more."""
        units, points = self.dump()
        assert units <= self.model.units
        assert points <= self.model.points
        self.model.units, self.model.points = units, points

    # Checks

    def dump(self) -> tuple[set[Prefix], set[KnownPoint]]:
        """Read the index's nodes and points one by one, without its search."""
        of = self.index.trunk.nodes
        features = {key: placed for placed, key in self.index._keys._keys.items()}
        salts = {root: salt for salt, root in self.index.trunk.roots.items()}

        def read(node: int) -> tuple[Hashable, list[int], list[Feature]]:
            if not of.depth[node]:
                return salts[node], [], []
            salt, tokens, found = read(int(of.parent[node]))
            found = found + [(len(tokens) + at, what) for at, what in features.get(int(of.keys[node]), ())]
            return salt, tokens + of.tokens[node].tolist(), found

        units = set()
        for node in np.flatnonzero(of.live & (of.depth > 0)).tolist():
            salt, tokens, found = read(node)
            units.add(prefix_of(salt, tokens, tuple(found), len(tokens)))
        points = set()
        for point in self.index.points.all():
            salt, tokens, found = read(point.node)
            found = found + [(len(tokens) + at, what) for at, what in features.get(point.contents.tail_key, ())]
            tokens = tokens + point.contents.tail_tokens.tolist()
            points.add(KnownPoint(prefix_of(salt, tokens, tuple(found), len(tokens)), point.states.size > 0))
        return units, points

    def check(self) -> None:
        """Check index, pool and model against each other."""
        self.index.check()
        self.pool.check()
        if self.lender.num_evictions:
            self.lender.num_evictions = 0
            self.forget()
        units, points = self.dump()
        assert units == self.model.units
        assert points == self.model.points

    def _check_blocks(self, match: Match, salt: Hashable, tokens: list[int], features: tuple[Feature, ...]) -> None:
        hit = match.num_hit_tokens
        taken = self.index.hit_blocks(match)
        if not hit:
            assert not any(flat.size for _, flat in taken)
            return
        for place in self.layout.places:
            first, flat = taken[place.group_id]
            assert first == place.first_ordinal(hit)
            assert len(flat) == -(-hit // place.block_size) - first
            for ordinal, block in enumerate(flat.tolist(), start=first):
                end = min((ordinal + 1) * place.block_size, hit)
                assert self.stamps[block] == prefix_of(salt, tokens, features, end), "somebody else's block"
        for group, parts in zip(self.layout.states, self.layout.num_parts, strict=True):
            assert len(taken[group][1]) == parts
            for block in taken[group][1].tolist():
                assert self.stamps[block] == prefix_of(salt, tokens, features, hit), "somebody else's state"

    # Rows' own affairs

    def _compute(self, row: Row, tokens: list[int]) -> bool:
        """Write tokens into blocks of the row's own; without room the row leaves."""
        before, end = len(row.tokens), len(row.tokens) + len(tokens)
        need = np.zeros(len(self.plan.groups), dtype=np.int64)
        for place in self.layout.places:
            need[place.group_id] = -(-end // place.block_size) - -(-before // place.block_size)
        try:
            new = iter(self.lender.take(need).tolist())
        except OutOfBlocks:
            self.rows.remove(row)
            self._leave(row)
            return False
        row.tokens = row.tokens + tokens
        for group, count in enumerate(need.tolist()):
            place = self.layout.place_of(group)
            if place is None:
                continue
            start = -(-before // place.block_size)
            row.blocks[group] |= {ordinal: next(new) for ordinal in range(start, start + count)}
            for ordinal in range(before // place.block_size, -(-end // place.block_size)):
                written = min((ordinal + 1) * place.block_size, end)
                self.stamps[row.blocks[group][ordinal]] = prefix_of(row.salt, row.tokens, row.features, written)
            gone = [ordinal for ordinal in row.blocks[group] if ordinal < place.first_ordinal(end)]
            self.pool.release(np.array([row.blocks[group].pop(ordinal) for ordinal in gone], dtype=np.int64))
        self._write_states(row)
        return True

    def _write_states(self, row: Row) -> None:
        for flat in row.states.tolist():
            self.stamps[flat] = prefix_of(row.salt, row.tokens, row.features, len(row.tokens))

    def _keys(self, row: Row, first: int, last: int) -> np.ndarray:
        keys = np.zeros(last - first, dtype=np.int32)
        known = row.keys[first:last]
        keys[: len(known)] = known
        return keys

    def _unit_blocks(self, row: Row, unit: int) -> list[int]:
        return [
            row.blocks[place.group_id][ordinal]
            for place in self.layout.full_places
            for ordinal in range(unit * place.per_unit, (unit + 1) * place.per_unit)
        ]

    def _step_on(self, row: Row, node: int, is_whole: bool) -> None:
        if node != row.node:
            self.index.move_pins(np.array([row.node], dtype=np.int32), np.array([node], dtype=np.int32))
            row.node = node
        if not is_whole:
            self._untrack(row)

    def _untrack(self, row: Row) -> None:
        """A row whose unit could not be cached adds nothing any more."""
        self.index.unpin(np.array([row.node], dtype=np.int32))
        row.node = 0
        # Without full groups nodes that lead nowhere go with the last row.
        self.forget()

    def _learn(self, row: Row, first: int, last: int) -> None:
        for unit in range(first, last):
            self.model.units.add(prefix_of(row.salt, row.tokens, row.features, (unit + 1) * self.unit))

    def _add_point(self, row: Row, states: np.ndarray, tail: Tail | None) -> ResumePoint | None:
        end = len(row.tokens)
        whole = end // self.unit * self.unit
        windows = []
        for place in self.layout.windows:
            first = place.first_ordinal(end) // place.per_unit * place.per_unit
            windows.append(
                np.array([row.blocks[place.group_id].get(i, 0) for i in range(first, whole // place.block_size)])
            )
        point = self.index.add_resume(row.node, end, window_blocks=windows, states=states, tail=tail)
        if point is not None:
            here = prefix_of(row.salt, row.tokens, row.features, end)
            self.model.points.add(KnownPoint(here, states.size > 0))
            self.forget()  # those beyond the cap
        return point

    def _leave(self, row: Row) -> None:
        held = [np.array(list(blocks.values()), dtype=np.int64) for blocks in row.blocks]
        self.pool.release(np.concatenate([row.states, *held]))
        if row.node:
            self.index.unpin(np.array([row.node], dtype=np.int32))
        self.forget()


@dataclass(frozen=True)
class CachedPrompt:
    """A long prompt that is cached and that no row holds, without stamps."""

    index: PrefixIndex
    pool: BlockPool
    tokens: np.ndarray
    nodes: np.ndarray

    def hit(self) -> int:
        """What a prompt that begins with it can take from the cache."""
        return self.index.find(np.append(self.tokens, 1)).num_hit_tokens


def cache_prompt(plan: CachePlan, num_tokens: int, positions: list[int], **options: object) -> CachedPrompt:
    """Cache a random prompt of whole units, with resume points at whole units where a group needs them."""
    pool = BlockPool(plan)
    index = PrefixIndex(plan, pool, max_per_path=len(positions) + 8, **options)
    layout, unit = index.layout, index.unit
    tokens = np.random.default_rng(0).integers(0, 50_000, num_tokens).astype(np.int32)
    num_units = num_tokens // unit
    keys = np.zeros(num_units, dtype=np.int32)
    hashes, _ = index.hasher.chain(index.hasher.start(None), tokens, keys)
    counts = [0] * len(plan.groups)
    for place in layout.places:
        counts[place.group_id] = num_tokens // place.block_size
    for group, parts in zip(layout.states, layout.num_parts, strict=True):
        counts[group] = parts * len(positions)
    held = pool.take(counts)
    mine = np.split(held, np.cumsum(counts)[:-1])
    root = index.root_of()
    blocks = [mine[place.group_id].reshape(num_units, place.per_unit) for place in layout.full_places]
    columns = np.concatenate([np.empty((num_units, 0), dtype=np.int64), *blocks], axis=1)
    nodes = index.add_chain(root, hashes, tokens.reshape(num_units, unit), keys, columns)
    for i, position in enumerate(positions if layout.windowed or layout.states else []):
        windows = [
            mine[p.group_id][p.first_ordinal(position) // p.per_unit * p.per_unit : position // p.block_size]
            for p in layout.windows
        ]
        states = [mine[g][i * n : (i + 1) * n] for g, n in zip(layout.states, layout.num_parts, strict=True)]
        node = int(nodes[position // unit - 1])
        assert index.add_resume(node, position, window_blocks=windows, states=np.concatenate([[], *states]))
    pool.release(held)
    index.check()
    return CachedPrompt(index, pool, tokens, nodes)
