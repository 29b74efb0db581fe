"""What every block must contain, and an engine in which bytes are stamps of the tokens they come from.

A token's stamp depends on the salt, on all tokens up to it and on all features up to it; a state's stamp is that of its
last token. Whoever reads a block of another sequence, of another position or of another time finds another stamp.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybridkv.copy_list import BlockCopies
from hybridkv.manager import CacheManager
from hybridkv.plan import CachePlan

Stamps = NDArray[np.uint64]
_MASK = 2**64 - 1
_STEP, _TOKEN, _FEATURE = 6364136223846793005, 1442695040888963407, 3935559000370003845
_PART = np.uint64(0x9E3779B97F4A7C15)


@dataclass(eq=False)
class Story:
    """One sequence: what its cache depends on.

    Attributes:
        tokens: all tokens known so far, drafts included.
        computed: tokens whose stamps are in the cache.
        has_source: whether the source of cross-attention was written.
    """

    salt: Hashable
    features: tuple[tuple[int, Hashable], ...]
    tokens: list[int]
    num_prompt: int
    computed: int = 0
    has_source: bool = False
    stamps: list[int] = field(default_factory=list)

    def stamps_to(self, end: int) -> Stamps:
        """Return the stamps of the first `end` tokens."""
        if len(self.stamps) < end:
            features = dict(self.features)
            for position in range(len(self.stamps), end):
                before = self.stamps[-1] if self.stamps else start_of(self.salt)
                feature = number_of(features[position]) if position in features else 0
                self.stamps.append((before * _STEP + self.tokens[position] * _TOKEN + feature * _FEATURE + 1) & _MASK)
        return np.array(self.stamps[:end], dtype=np.uint64)

    def cut(self, end: int) -> None:
        """Forget the tokens from `end` on."""
        del self.tokens[end:], self.stamps[end:]

    def copy(self) -> Story:
        """Return a sequence with the same past."""
        return Story(
            self.salt,
            self.features,
            list(self.tokens),
            self.num_prompt,
            self.computed,
            self.has_source,
            list(self.stamps),
        )


def number_of(value: Hashable) -> int:
    """Return a number of at least 1 for a feature or a salt."""
    return 1 + int.from_bytes(repr(value).encode(), "little") % (2**61 - 1)


def start_of(salt: Hashable) -> int:
    """Return the stamp before the first token."""
    return number_of(("salt", salt)) * _STEP & _MASK


class Content:
    """The stamps in every block, by group and block id, on the device and on the host.

    Shapes: device, host: by group [num_blocks, block_size]; one column for states and for cross-attention
    """

    def __init__(self, plan: CachePlan, host: CachePlan | None) -> None:
        self.plan = plan
        self.device, self.host = _blank(plan), _blank(host) if host else []
        self.states = [g for g, group in enumerate(plan.groups) if group.group.is_state]
        self.cross = [g for g, group in enumerate(plan.groups) if group.group.lifecycle.kind == "cross_attention"]
        self.token_groups = [g for g in range(len(plan.groups)) if g not in (*self.states, *self.cross)]

    def copy(self) -> Content:
        """Return an independent copy."""
        other = Content.__new__(Content)
        other.__dict__ = dict(self.__dict__)
        other.device, other.host = [a.copy() for a in self.device], [a.copy() for a in self.host]
        return other

    def run(self, copies: BlockCopies) -> None:
        """Do copies in the order the manager asks for, in each list all reads before all writes."""
        lists = (
            (copies.moves, self.device, self.device),
            (copies.from_host, self.host, self.device),
            (copies.within, self.device, self.device),
            (copies.to_host, self.device, self.host),
        )
        for table, source, target in lists:
            written = {(g, b) for g, _, b in table.tolist()}
            assert len(written) == len(table), "a block is written twice"
            if source is target:
                assert written.isdisjoint((g, b) for g, b, _ in table.tolist()), "a block is both read and written"
            read = [source[g][b].copy() for g, b, _ in table.tolist()]
            for (g, _, b), stamps in zip(table.tolist(), read, strict=True):
                assert b >= self.plan.groups[g].blocks_per_slab, "a null block is written"
                target[g][b] = stamps

    # Rows

    def write(self, manager: CacheManager, row: int, story: Story, end: int) -> None:
        """Compute a row's tokens from `story.computed` to `end`, as kernels do that its tables lead."""
        begin, stamps = story.computed, story.stamps_to(end)
        for group in self.token_groups:
            table, size = manager.tables[group], self.plan.groups[group].block_size
            first, count = int(table.first_block_per_row[row]), int(table.num_blocks_per_row[row])
            for position in range(max(begin, first * size), end):
                assert position // size < count, "a token has no block"
                block = int(table.entries[row, position // size % table.width])
                self._check_own(manager, group, block)
                self.device[group][block, position % size] = stamps[position]
        for group in self.states:
            ids = manager.tables[group].row_block_ids(row)
            if begin:
                assert np.array_equal(self.device[group][ids, 0], state_of(stamps[begin - 1], len(ids))), (
                    "a wrong state"
                )
            for block in ids.tolist():
                self._check_own(manager, group, block)
            self.device[group][ids, 0] = state_of(stamps[end - 1], len(ids))
        for group in self.cross:
            ids = manager.tables[group].row_block_ids(row)
            if not story.has_source:
                self.device[group][ids, 0] = source_of(story, len(ids))
        story.has_source = True
        story.computed = end

    def _check_own(self, manager: CacheManager, group: int, block: int) -> None:
        """A block that is written to is one row's alone and not cached."""
        flat = int(manager.pool.offsets[group]) + block
        assert (manager.pool.holders[flat], manager.pool.cached[flat]) == (1, 0), "a shared block is written"

    def check_row(self, manager: CacheManager, row: int, story: Story) -> None:
        """A running row's blocks contain exactly its tokens."""
        end = story.computed
        assert manager.num_computed_tokens[row] == end
        stamps = story.stamps_to(end)
        for group in self.token_groups:
            table, size = manager.tables[group], self.plan.groups[group].block_size
            first = int(table.first_block_per_row[row])
            ids = table.row_block_ids(row)
            assert first + len(ids) >= -(-end // size), "a computed token has no block"
            found = self.device[group][ids].reshape(-1)[: max(end - first * size, 0)]
            assert np.array_equal(found, stamps[first * size :]), f"row {row}: group {group} has other tokens"
        for group in self.states:
            ids = manager.tables[group].row_block_ids(row)
            if end:
                found = self.device[group][ids, 0]
                assert np.array_equal(found, state_of(stamps[-1], len(ids))), f"row {row} has another state"
        for group in self.cross:
            ids = manager.tables[group].row_block_ids(row)
            if story.has_source:
                assert np.array_equal(self.device[group][ids, 0], source_of(story, len(ids))), "another source"

    # The prefix index

    def check_index(self, manager: CacheManager) -> None:
        """Every cached unit and resume point contains exactly the tokens that it is found by."""
        if manager.index is None:
            return
        index, of, unit = manager.index, manager.index.trunk.nodes, manager.index.unit
        ends = np.zeros(of.capacity, dtype=np.uint64)
        for salt, root in index.trunk.roots.items():
            ends[root] = start_of(salt)
        features = {key: dict(placed) for placed, key in index._keys._keys.items()}
        units = np.zeros((of.capacity, unit), dtype=np.uint64)
        for depth in range(1, int(of.depth[of.live].max(initial=0)) + 1):
            nodes = np.flatnonzero(of.live & (of.depth == depth))
            placed = np.zeros((len(nodes), unit), dtype=np.uint64)
            for i in np.flatnonzero(of.keys[nodes]).tolist():
                for at, what in features[int(of.keys[nodes[i]])].items():
                    placed[i, at] = number_of(what)
            ends[nodes], units[nodes] = _advance(ends[of.parent[nodes]], of.tokens[nodes], placed)
        nodes = np.flatnonzero(of.live & (of.depth > 0))
        for place in index.layout.places:
            flat = of.blocks[nodes, place.columns]
            blocks = flat - manager.pool.offsets[place.group_id]
            found = self.device[place.group_id][np.maximum(blocks, 0)]
            same = (found == units[nodes].reshape(found.shape)).all(axis=2) | (flat == 0)
            assert same.all(), f"group {place.group_id}: a cached unit has other tokens"
        for point in index.points.all():
            self._check_point(manager, point, ends, features)

    def _check_point(
        self, manager: CacheManager, point: object, ends: Stamps, features: dict[int, dict[int, Hashable]]
    ) -> None:
        index, contents = manager.index, point.contents
        tokens = contents.tail_tokens[None]
        placed = np.zeros_like(tokens, dtype=np.uint64)
        for at, what in features.get(contents.tail_key, {}).items():
            if at < tokens.size:  # what stands behind the tail is of no matter
                placed[0, at] = number_of(what)
        end, stamps = _advance(ends[[point.node]], tokens, placed)
        for group in index.layout.states if contents.states.size else ():
            blocks = index.points.blocks_in(point, group) - manager.pool.offsets[group]
            assert np.array_equal(self.device[group][blocks, 0], state_of(end[0], len(blocks))), "a point's state"
        for place, flat in zip(index.layout.places, contents.tail_blocks, strict=False):
            blocks = flat - manager.pool.offsets[place.group_id]
            found = self.device[place.group_id][np.maximum(blocks, 0)].reshape(-1)[: tokens.size]
            there = (flat > 0).repeat(place.block_size)[: tokens.size]
            assert np.array_equal(found[there], stamps[0][there]), f"group {place.group_id}: a point's tail"


def state_of(stamp: np.uint64 | int, num_parts: int) -> Stamps:
    """Return what the parts of a state contain after a token."""
    with np.errstate(over="ignore"):
        return np.uint64(stamp) + _PART * np.arange(1, num_parts + 1, dtype=np.uint64)


def source_of(story: Story, num_blocks: int) -> Stamps:
    """Return what the blocks of a sequence's source contain; the source is part of the salt."""
    return state_of(start_of(story.salt), num_blocks)


def pending(manager: CacheManager) -> BlockCopies:
    """Return the copies that wait, without taking them."""
    store, tables = manager._store, {}
    pools = {"moves": (0, 0), "from_host": (1, 0), "within": (0, 0), "to_host": (0, 1)}
    for name, places in pools.items():
        parts = store.copies._parts[name]
        if parts:
            offsets = [(store.pool, store.host_pool)[place].offsets for place in places]
            flat = [np.concatenate(column) for column in zip(*parts, strict=True)]
            groups = np.searchsorted(offsets[0], flat[0], side="right") - 1
            tables[name] = np.stack([groups, flat[0] - offsets[0][groups], flat[1] - offsets[1][groups]], axis=1)
    return BlockCopies(**tables)


def _advance(before: Stamps, tokens: NDArray[np.int32], placed: Stamps) -> tuple[Stamps, Stamps]:
    """Return the stamps `[n]` after the last and `[n, tokens]` after each token."""
    stamps, at = np.zeros(tokens.shape, dtype=np.uint64), before.copy()
    with np.errstate(over="ignore"):
        for column in range(tokens.shape[1]):
            at = at * np.uint64(_STEP) + tokens[:, column].astype(np.uint64) * np.uint64(_TOKEN)
            at += placed[:, column] * np.uint64(_FEATURE) + np.uint64(1)
            stamps[:, column] = at
    return at, stamps


def _blank(plan: CachePlan) -> list[Stamps]:
    shapes = [
        (
            group.num_blocks,
            1 if group.group.is_state or group.group.lifecycle.kind == "cross_attention" else group.block_size,
        )
        for group in plan.groups
    ]
    return [np.zeros(shape, dtype=np.uint64) for shape in shapes]


def shared_writable(manager: CacheManager, rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return (group, block id) of the blocks that a row may write to and that another row or the index has, too."""
    found = []
    store = manager._store
    for group, plan in enumerate(manager.plan.groups):
        if plan.group.lifecycle.kind == "cross_attention":
            continue
        table = manager.tables[group]
        ids = [table.row_block_ids(row).tolist() for row in rows]
        counts: dict[int, int] = {}
        for block in (block for of_row in ids for block in of_row):
            counts[block] = counts.get(block, 0) + 1
        for row, of_row in zip(rows, ids, strict=True):
            whole = 0
            if not plan.group.is_state:
                whole = int(manager.num_computed_tokens[row]) // plan.block_size - int(table.first_block_per_row[row])
            for block in of_row[max(whole, 0) :]:
                if counts[block] > 1 or manager.pool.cached[store.pool.offsets[group] + block]:
                    found.append((group, block))
    return found
