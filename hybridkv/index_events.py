"""What the prefix index gains and loses, as events."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hybridkv.cache_events import DEFAULT_MAX_EVENTS, BlocksRemoved, BlocksStored, CacheEvent, EventBatch, EventLog
from hybridkv.cache_events import LifecycleKind as Kind
from hybridkv.index_layout import IndexLayout, TokenGroup
from hybridkv.node_arrays import NO_POINT, NodeArrays
from hybridkv.prefix_index import PrefixIndex, ResumePoint
from hybridkv.specs import ChunkedAttention, FullAttention, SlidingWindow

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class CachedGroup:
    """A group that the index keeps blocks of; `place` is None for states."""

    group_id: int
    kind: Kind
    window_tokens: int | None = None
    place: TokenGroup | None = None

    @classmethod
    def all_of(cls, layout: IndexLayout) -> "tuple[CachedGroup, ...]":
        """Return a layout's groups, by id."""
        groups = [cls(group, "state") for group in layout.states]
        for place in layout.places:
            match place.lifecycle:
                case SlidingWindow(kind=kind, window=tokens) | ChunkedAttention(kind=kind, chunk=tokens):
                    groups.append(cls(place.group_id, kind, tokens, place))
                case FullAttention(kind=kind):
                    groups.append(cls(place.group_id, kind, None, place))
        return tuple(sorted(groups, key=lambda group: group.group_id))

    def is_kept_at(self, point: ResumePoint) -> bool:
        """Return whether a point keeps something of the group, if only that it needs nothing there."""
        if self.kind == "state":
            return point.states.size > 0
        return self.kind != "full_attention" or len(point.contents.tail_tokens) > 0


class IndexEvents:
    """Watches an index and records its events, beginning with what is cached already.

    Hashes are the index's own: a unit's is that of the prefix up to its end. A checkpoint `n` tokens behind a prefix of
    hash `h` has `mix(STEP * h + digest + n)`, where the digest is that of a unit that holds its tokens, then zeros; a
    prefix of no tokens has the hash of its salt's state.
    """

    def __init__(self, index: PrefixIndex, max_events: int = DEFAULT_MAX_EVENTS) -> None:
        self._index, self._layout, self._nodes = index, index.layout, index.trunk.nodes
        self._groups = CachedGroup.all_of(index.layout)
        self._log = EventLog(max_events)
        # By node, so that an event costs the same however deep its prefix is.
        self._root_of, self._has_features = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.bool_)
        for chain in chains(self._nodes):
            self._learn(chain)
        self._record(self._all())
        index.trunk.watch = self._on_nodes
        index.points.watch = self._on_point

    def drain(self, *, from_scratch: bool = False) -> EventBatch:
        """Return the events since the last call.

        Where some were lost, or `from_scratch` for a new listener, `AllCleared` comes first, then all that is cached.
        """
        return self._log.restart(list(self._all())) if from_scratch or self._log.has_lost else self._log.drain()

    def _all(self) -> Iterator[CacheEvent]:
        for chain in chains(self._nodes):
            yield from self._chain_stored(chain)
        for point in self._index.points.all():
            yield from self._point_stored(point, None)

    def _record(self, events: Iterator[CacheEvent]) -> None:
        for event in events:
            self._log.add(event)

    # What the index tells

    def _on_nodes(self, nodes: Int32, is_new: bool) -> None:
        of = self._nodes
        if is_new:
            # One sequence's units come below each other, those of many sequences each below another node.
            begins = np.flatnonzero(of.parent[nodes[1:]] != nodes[:-1]) + 1
            for chain in np.split(nodes, begins):
                self._learn(chain)
                self._record(self._chain_stored(chain))
            return
        hashes = tuple(of.hash[nodes].tolist())
        for group in self._groups:
            if group.kind == "full_attention":
                self._log.add(BlocksRemoved(group.group_id, group.kind, hashes, None, None))

    def _learn(self, chain: Int32) -> None:
        """Note of units below each other which root they are below and whether there are features before their ends."""
        of = self._nodes
        missing = of.capacity - len(self._root_of)
        if missing:
            self._root_of = np.concatenate([self._root_of, np.zeros(missing, dtype=np.int32)])
            self._has_features = np.concatenate([self._has_features, np.zeros(missing, dtype=np.bool_)])
        root, has_features = self._place_of(int(of.parent[chain[0]]))
        self._root_of[chain] = root
        self._has_features[chain] = has_features | np.logical_or.accumulate(of.keys[chain] != 0)

    def _place_of(self, node: int) -> tuple[int, bool]:
        """Return the root above a node, itself for a root, and whether there are features before the node's end."""
        if not self._nodes.depth[node]:
            return node, False
        return int(self._root_of[node]), bool(self._has_features[node])

    def _on_point(self, point: ResumePoint, is_new: bool) -> None:
        equal = self._equal_point(point)
        if is_new:
            self._record(self._point_stored(point, equal))
        elif equal is point:
            checkpoint_hash = self._checkpoint_hash(point)
            for group in self._groups:
                if group.is_kept_at(point):
                    self._log.add(BlocksRemoved(group.group_id, group.kind, (), point.position, checkpoint_hash))

    # Events

    def _chain_stored(self, chain: Int32) -> Iterator[CacheEvent]:
        """Yield the events of units below each other, those before the first with features apart."""
        of = self._nodes
        featured = np.flatnonzero(of.keys[chain])
        for part in np.split(chain, featured[:1]):
            for group in self._groups if len(part) else ():
                if group.kind == "full_attention":
                    event = self._stored(group, part, int(of.parent[part[0]]))
                    yield replace(event, token_ids=tuple(of.tokens[part].reshape(-1).tolist()))

    def _point_stored(self, point: ResumePoint, replaced: ResumePoint | None) -> Iterator[CacheEvent]:
        """Yield the events of a new point, for the groups that the one it replaces had nothing of."""
        line, contents = self._nodes.lineage(point.node), point.contents
        for group in self._groups:
            if not group.is_kept_at(point) or (replaced is not None and group.is_kept_at(replaced)):
                continue
            first = len(line) - 1
            if group.place is not None and group.window_tokens is not None:
                first = min(group.place.first_ordinal(point.position) // group.place.per_unit, first)
            event = self._stored(group, line[first + 1 :], int(line[first]))
            yield replace(
                event,
                token_ids=tuple(contents.tail_tokens.tolist()),
                checkpoint_position=point.position,
                checkpoint_hash=self._checkpoint_hash(point),
                is_portable=event.is_portable and not contents.tail_key,
            )

    def _stored(self, group: CachedGroup, units: Int32, parent: int) -> BlocksStored:
        """Return the event of whole units below a parent, without what only trunk or checkpoints have."""
        of, unit = self._nodes, self._layout.unit
        root, has_features = self._place_of(int(units[-1]) if len(units) else parent)
        depth, salt = int(of.depth[parent]), self._index.trunk.salt_of(root)
        return BlocksStored(
            group_id=group.group_id,
            lifecycle=group.kind,
            window_tokens=group.window_tokens,
            block_size=None if group.place is None else group.place.block_size,
            unit_tokens=unit,
            start_position=depth * unit,
            hashes=tuple(of.hash[units].tolist()),
            parent_hash=int(of.hash[parent]) if depth else None,
            token_ids=(),
            checkpoint_position=None,
            checkpoint_hash=None,
            salt=_plain(salt),
            is_portable=_is_portable(salt) and not has_features,
        )

    def _equal_point(self, point: ResumePoint) -> ResumePoint | None:
        """Return the point that is found where this one is: itself, one that takes its place, or none."""
        points, contents = self._index.points, point.contents
        if len(contents.tail_tokens):
            return points.tail(point.node, contents.tail_tokens, contents.tail_key)
        slot = int(self._nodes.point[point.node])
        return None if slot == NO_POINT else points.at(slot)

    def _checkpoint_hash(self, point: ResumePoint) -> int:
        of, hasher, contents = self._nodes, self._index.hasher, point.contents
        num_tail, before = len(contents.tail_tokens), of.hash[point.node : point.node + 1]
        if not num_tail:
            return int(before[0])
        if not of.depth[point.node]:
            before = hasher.finish(np.array([hasher.start(self._index.trunk.salt_of(point.node))]))
        padded = np.zeros((1, self._layout.unit), dtype=np.int32)
        padded[0, :num_tail] = contents.tail_tokens
        _, after = hasher.many(before, padded, np.array([contents.tail_key], dtype=np.int32))
        return int(hasher.finish(after + np.uint64(num_tail))[0])


def chains(of: NodeArrays) -> list[Int32]:
    """Return all units as runs from top to bottom without a branch, those above before those below."""
    nodes = np.flatnonzero(of.live & (of.depth > 0))
    nodes = nodes[np.argsort(of.depth[nodes], kind="stable")]
    parents = of.parent[nodes]
    goes_on = (of.depth[parents] > 0) & (of.num_children[parents] == 1)
    runs: list[list[int]] = []
    run_of: dict[int, int] = {}
    for node, parent, is_same in zip(nodes.tolist(), parents.tolist(), goes_on.tolist(), strict=True):
        if not is_same:
            runs.append([])
        run_of[node] = run_of[parent] if is_same else len(runs) - 1
        runs[run_of[node]].append(node)
    return [np.array(run, dtype=np.int32) for run in runs]


def _plain(salt: Hashable) -> int | str | None:
    if isinstance(salt, str):
        return salt.encode("utf-8", "replace").decode()
    return int(salt) if isinstance(salt, int) else None


def _is_portable(salt: Hashable) -> bool:
    """Return whether a salt has the same hash in every process."""
    if isinstance(salt, tuple):
        return all(_is_portable(item) for item in salt)
    return salt is None or isinstance(salt, int | str | bytes)
