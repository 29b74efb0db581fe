"""Which prefixes are cached, and from where each can be continued.

    trunk    root - unit - unit - unit - unit - unit        the full groups' blocks, a node a unit of tokens
                             |             |
    points                 resume        resume . tail      window tails, states: what it takes to go on there

A prefix is found by hashes and taken only after comparing tokens, features and salt. What is looked up changes nothing.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.block_owners import BlockOwners, CachingPool
from hybridkv.eviction import EvictionPolicy, LruPolicy
from hybridkv.index_check import check_index
from hybridkv.index_eviction import IndexEviction
from hybridkv.index_layout import IndexLayout
from hybridkv.node_arrays import NO_POINT
from hybridkv.plan import CachePlan
from hybridkv.prefix_match import Match, SharedPrefix
from hybridkv.prefix_trunk import PrefixTrunk
from hybridkv.resume_builder import ResumeBuilder, Tail
from hybridkv.resume_points import ResumePoint, ResumePoints
from hybridkv.token_hash import FeatureKeys, Features, UnitHasher

__all__ = ["Match", "PrefixIndex", "ResumePoint", "Tail"]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]


class PrefixIndex:
    """The cached prefixes of a plan's groups, over the blocks of a pool.

    Callers pin the node of a running row's last whole unit, or the root, before anything else that may evict, and move
    the pin along as units are added. Nodes and points are numbers and objects of this index alone.

    Attributes:
        layout: what each group keeps; `unit` tokens a node.
        hasher: gives the hashes that `add_chain` and `add_leaves` take.
    """

    def __init__(
        self,
        plan: CachePlan,
        pool: CachingPool,
        *,
        policy: EvictionPolicy | None = None,
        max_per_path: int = 8,
        hasher: UnitHasher | None = None,
    ) -> None:
        self.layout = IndexLayout.of(plan)
        self.unit = self.layout.unit
        self.hasher = hasher or UnitHasher(self.unit)
        self.max_per_path = max_per_path
        self._owners = BlockOwners(pool)
        self.trunk = PrefixTrunk(self.layout, self._owners)
        self.points = ResumePoints(self.layout, self.trunk.nodes, self._owners)
        self._builder = ResumeBuilder(self.layout, self.trunk.nodes, self._owners)
        policy = policy or LruPolicy()
        self._eviction = IndexEviction(self.layout, self.trunk, self.points, self._owners, policy)
        self._keys = FeatureKeys()

    # Looking up

    def root_of(self, salt: Hashable = None) -> int:
        """Return the root node of a salt's sequences (tenant, adapter, ...), made if it is new."""
        return self.trunk.root_of(salt)

    def find(self, tokens: Int32, salt: Hashable = None, features: Features = ()) -> Match:
        """Return what of a prompt is cached under a salt.

        Args:
            features: `(position, content)` for what stands at placeholder tokens (images, audio): any hashable.

        Shapes: tokens [n] int32
        """
        unit, num_tokens = self.unit, len(tokens)
        num_units = num_tokens // unit
        tokens = np.ascontiguousarray(tokens, dtype=np.int32)
        units = tokens[: num_units * unit].reshape(num_units, unit)
        keys = self._keys_of(features, -(-num_tokens // unit))
        start = self.hasher.start(salt)
        states = self.hasher.states(start, units, keys[:num_units])
        hashes = self.hasher.finish(states)
        root = self.trunk.roots.get(salt, 0)
        path = self.trunk.walk(root, hashes, units, keys[:num_units]) if root else np.empty(0, dtype=np.int32)
        shared = self._shared(root, path, tokens, features)
        hit = shared.hit()
        slot = shared.serving(hit)
        return Match(
            shared=shared,
            path=path,
            hashes=hashes,
            keys=keys,
            states=states,
            start=start,
            num_tokens=num_tokens,
            num_hit_tokens=hit,
            serving=None if slot is None else self.points.at(slot),
            root=lambda: self.trunk.root_of(salt),
        )

    def hit_blocks(self, match: Match) -> list[tuple[int, Int64]]:
        """Return per group the ordinal of the first block that the hit needs, and the flat blocks from there on.

        Whoever goes on shares the blocks of whole units, and copies those behind the last one, a resume point's tail:
        the point keeps them, and the index knows a unit's block by one prefix. For states: ordinal 0 and the blocks to
        copy. Cross-attention: none.
        """
        hit, resume = match.num_hit_tokens, match.resume
        nodes = match.path[: hit // self.unit]
        blocks: list[tuple[int, Int64]] = [(0, np.empty(0, dtype=np.int64))] * len(self.layout.block_bytes)
        if not hit:
            return blocks
        for i, place in enumerate(self.layout.places):
            first = place.first_ordinal(hit)
            flat = self.trunk.nodes.blocks[nodes, place.columns].reshape(-1)
            if hit % self.unit:
                assert resume is not None
                flat = np.concatenate([flat, resume.contents.tail_blocks[i]])
            blocks[place.group_id] = first, flat[first:]
        for group in self.layout.states:
            assert resume is not None
            blocks[group] = 0, self.points.blocks_in(resume, group)
        return blocks

    def touch(self, match: Match) -> None:
        """Note that a hit was used."""
        if match.num_hit_tokens:
            self.trunk.touch(match.path[: match.num_hit_tokens // self.unit])
            if match.serving is not None and self.points.is_live(match.serving):
                self._eviction.use(match.serving)

    # Growing

    @property
    def parent(self) -> Int32:
        """`[capacity]` int32: each node's parent, 0 for a root and for a node that lost its place."""
        return self.trunk.nodes.parent

    def add_chain(self, parent: int, hashes: UInt64, tokens: Int32, keys: Int32, blocks: Int64) -> Int32:
        """Cache consecutive units of one sequence below a node; see `PrefixTrunk.add_chain`."""
        return self.trunk.add_chain(parent, hashes, tokens, keys, blocks)

    def add_leaves(self, parents: Int32, hashes: UInt64, tokens: Int32, keys: Int32, blocks: Int64) -> Int32:
        """Cache one unit of each of many sequences; see `PrefixTrunk.add_leaves`."""
        return self.trunk.add_leaves(parents, hashes, tokens, keys, blocks)

    def pin(self, nodes: Int32) -> None:
        """Count a row more on each node, the last whole unit of its tokens: the path to it stays."""
        for node in nodes.tolist():
            if node:
                self.trunk.pin(node)

    def unpin(self, nodes: Int32) -> None:
        """Count a row less on each node, and note that the path was used now.

        Raises: InvariantError for a node that no row is pinned to.
        """
        for node in nodes.tolist():
            if node:
                self.trunk.pin(node, -1)
                self._eviction.prune(node)

    def move_pins(self, parents: Int32, nodes: Int32) -> None:
        """Move a row's pin from each node to one below it, at a cost that grows with the units between, not the depth.

        Pins stay where `nodes` is 0: that row's unit was not cached.

        Shapes: parents, nodes [R]
        """
        moved = nodes > 0
        self.trunk.move_pins(parents[moved], nodes[moved])

    def add_resume(
        self,
        node: int,
        position: int,
        *,
        window_blocks: Sequence[Int64] = (),
        states: Int64 | None = None,
        tail: Tail | None = None,
    ) -> ResumePoint | None:
        """Keep what a sequence needs to go on from `position`, whose last whole unit is `node`.

        Args:
            window_blocks: per group of `layout.windowed` the flat blocks of whole units, from the one with the first
                block still needed to `node`'s; 0 or the null block for one out of the window. Blocks of units that are
                kept already stay as they are.
            states: flat blocks of all states, group after group; without them the point serves windows alone.
            tail: what lies behind the last whole unit, where `position` is not its end.

        Returns: None if an equal point is there, if a needed block is neither given nor kept, or if the node is none.
        Raises: ValueError if position, blocks and tail do not fit together; nothing changes then.
        """
        contents = self._builder.contents(node, position, window_blocks, states, tail)
        if contents is None:
            return None
        present = self.points.tail(node, contents.tail_tokens, contents.tail_key) if tail else self._point_at(node)
        if present is not None and (present.states.size or not contents.states.size):
            return None
        point = self.points.add(contents)
        if present is not None:
            self.points.drop(present)
        self._eviction.note_new(point, self.max_per_path)
        return point

    # Shrinking

    def drop_resume(self, point: ResumePoint) -> None:
        """Forget a point; one that is gone already is left alone."""
        if self.points.is_live(point):
            self._eviction.drop_point(point)

    def evict(self, group: int, num_blocks: int) -> int:
        """Give up cached blocks of a group, least valuable first; return how many became free, enough if possible.

        A full group loses trunk from the leaves, with the points on it; others lose whole points.
        """
        return self._eviction.evict(group, num_blocks)

    def drop_blocks(self, flat: Int64) -> None:
        """Forget every node that refers to one of the blocks, with all below it, and every such resume point."""
        self._eviction.drop_blocks(flat)

    def replace_blocks(self, sources: Int64, targets: Int64) -> None:
        """Note that the pool moved blocks, their references included.

        Shapes: sources, targets [n]
        """
        self._eviction.replace_blocks(sources, targets)

    # Seeing

    @property
    def owner_of(self) -> Int32:
        """`[num_flat]` int32: the node that refers to a block, 0 for none."""
        return self._owners.node_of

    @property
    def num_nodes(self) -> int:
        """Units cached."""
        return len(self.trunk)

    @property
    def num_resume_points(self) -> int:
        """Resume points cached."""
        return len(self.points)

    @property
    def num_freed(self) -> Int64:
        """`[num_groups]` int64: blocks that became free because the index gave them up."""
        return self._owners.num_freed

    def last_used_of_blocks(self) -> Int64:
        """Return `[num_flat]` int64: when each block's owner was last used, 0 without one."""
        return self._eviction.last_used_of_blocks()

    def check(self) -> None:
        """Check every invariant of the index, and its references against the pool's counts.

        Raises: InvariantError if one is broken.
        """
        check_index(self.layout, self.trunk, self.points, self._owners)

    def _shared(self, root: int, path: Int32, tokens: Int32, features: Features) -> SharedPrefix:
        of, unit, layout = self.trunk.nodes, self.unit, self.layout
        line = np.concatenate([np.array([root], dtype=np.int32), path])
        tails = []
        for depth in np.flatnonzero(of.num_tails.take(line)).tolist() if root else ():
            for length in self.points.tail_lengths(int(line[depth])):
                begin, end = depth * unit, depth * unit + length
                if end < len(tokens):
                    key = self._keys.of_part(features, begin, end)
                    point = self.points.tail(int(line[depth]), tokens[begin:end], key)
                    if point is not None:
                        tails.append(point)
        points = of.point.take(path)
        return SharedPrefix(
            layout,
            max(len(tokens) - 1, 0),
            len(path),
            self._missing(path),
            points,
            (points != NO_POINT) & self.points.has_states.take(points) if layout.states else None,
            tuple(tails),
        )

    def _missing(self, path: Int32) -> tuple[Int64, ...]:
        if not self.layout.windowed:
            return ()
        keeps = self.trunk.nodes.keeps.take(path, axis=0)
        return tuple(np.flatnonzero(keeps[:, place.columns] == 0) for place in self.layout.windows)

    def _keys_of(self, features: Features, num_units: int) -> Int32:
        if not features:
            return np.zeros(num_units, dtype=np.int32)
        if self._keys.is_full:
            of, tails = self.trunk.nodes, (point.contents.tail_key for point in self.points.all())
            self._keys.forget_unused({*of.keys[of.live].tolist(), *tails})
        return self._keys.of_units(features, num_units, self.unit)

    def _point_at(self, node: int) -> ResumePoint | None:
        slot = int(self.trunk.nodes.point[node])
        return None if slot == NO_POINT else self.points.at(slot)
