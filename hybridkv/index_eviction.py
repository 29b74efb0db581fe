"""Giving up what the prefix index caches, least valuable first."""

import numpy as np
from numpy.typing import NDArray

from hybridkv.block_owners import BlockOwners
from hybridkv.eviction import EvictionPolicy, note_use
from hybridkv.index_layout import IndexLayout
from hybridkv.node_arrays import NO_POINT
from hybridkv.prefix_trunk import PrefixTrunk
from hybridkv.resume_points import ResumePoint, ResumePoints
from hybridkv.trunk_order import TrunkOrder
from hybridkv.units import cdiv

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class IndexEviction:
    """Removes nodes and resume points so that no node, point or block is left half there."""

    def __init__(
        self,
        layout: IndexLayout,
        trunk: PrefixTrunk,
        points: ResumePoints,
        owners: BlockOwners,
        policy: EvictionPolicy,
    ) -> None:
        self._layout, self._trunk, self._points, self._owners, self._policy = layout, trunk, points, owners, policy
        self._order = TrunkOrder(trunk.nodes)

    # Points

    def note_new(self, point: ResumePoint, max_per_path: int) -> None:
        """Start a new point's statistics; where its path has too many, the least valuable other one goes."""
        on_path = self._points_before(point)
        before = max((other.position for other in on_path), default=0)
        stats, slot = self._points.stats, point.slot
        num_blocks = [len(self._points.blocks_in(point, g)) for g in (*self._layout.token_groups, *self._layout.states)]
        sizes = [self._layout.block_bytes[g] for g in (*self._layout.token_groups, *self._layout.states)]
        stats.num_bytes[slot] = sum(count * size for count, size in zip(num_blocks, sizes, strict=True))
        stats.num_tokens[slot], stats.position[slot], stats.uses[slot] = point.position - before, point.position, 0
        stats.last_used[slot] = self._trunk.clock
        self.use(point)
        if len(on_path) >= max_per_path:
            slots = np.array([other.slot for other in on_path], dtype=np.int64)
            for slot in self._by_value(slots)[: len(on_path) - max_per_path + 1].tolist():
                self.drop_point(self._points.at(slot))

    def use(self, point: ResumePoint) -> None:
        """Note that a point was used now."""
        stats, slot = self._points.stats, point.slot
        self._trunk.clock += 1
        note_use(stats, slot, self._trunk.clock)
        self._policy.record(point.identity, int(stats.num_tokens[slot]), int(stats.num_bytes[slot]))

    def drop_point(self, point: ResumePoint) -> None:
        """Forget a point, and the nodes that only led to it where nodes own no blocks."""
        self._points.drop(point)
        if self._trunk.nodes.depth[point.node]:
            self.prune(point.node)
        else:
            self._trunk.drop_unused_root(point.node)

    def prune(self, node: int) -> None:
        """Without full-attention groups nodes own nothing: forget those that lead nowhere, from `node` up."""
        of = self._trunk.nodes
        if self._layout.num_full_columns or not of.live[node]:
            return
        line = of.lineage(node)
        path = line[1:]
        needed = (of.locks[path] > 0) | (of.point[path] != NO_POINT) | (of.num_tails[path] > 0)
        needed |= of.num_children[path] > (np.arange(len(path)) < len(path) - 1)
        last = np.flatnonzero(needed)
        gone = path[last[-1] + 1 if last.size else 0 :]
        if gone.size:
            self._trunk.remove(gone)
        self._trunk.drop_unused_root(int(line[0]))

    # Blocks

    def evict(self, group: int, num_blocks: int) -> int:
        """Give up blocks of a group; return how many became free."""
        before = int(self._owners.num_freed[group])
        goal = before + num_blocks
        if group in self._layout.full:
            self._evict_trunk(group, goal)
        if group in (*self._layout.token_groups, *self._layout.states):
            self._evict_points(group, goal)
        if group in self._layout.full:
            self._evict_unheld(group, goal)
        return int(self._owners.num_freed[group]) - before

    def drop_blocks(self, flat: Int64) -> None:
        """Forget everything that refers to one of the blocks."""
        for slot in sorted(self._owners.points_of(flat.tolist())):
            self.drop_point(self._points.at(slot))
        self._drop_windows(flat)
        nodes = np.unique(self._owners.node_of[flat])
        nodes = nodes[nodes > 0]
        if nodes.size:
            self.drop_nodes(self._trunk.nodes.in_subtrees(nodes))

    def drop_nodes(self, nodes: Int32) -> None:
        """Forget nodes, closed under descent, with the points at them."""
        of = self._trunk.nodes
        for slot in of.point[nodes][of.point[nodes] != NO_POINT].tolist():
            self._points.drop(self._points.at(slot))
        for node in nodes[of.num_tails[nodes] > 0].tolist():
            for point in self._points.tails_of(node):
                self._points.drop(point)
        self._trunk.remove(nodes)

    def replace_blocks(self, sources: Int64, targets: Int64) -> None:
        """Note that blocks lie elsewhere now."""
        of = self._trunk.nodes
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            node = int(self._owners.node_of[source])
            if node:
                of.blocks[node][of.blocks[node] == source] = target
            for slot in self._owners.points_of([source]):
                point = self._points.at(slot)
                for blocks in (point.states, *point.contents.tail_blocks):
                    blocks[blocks == source] = target
            self._owners.move(source, target)

    def last_used_of_blocks(self) -> Int64:
        """Return `[num_flat]` int64: when each block's owner was last used, 0 without one."""
        used = self._trunk.nodes.last_used[self._owners.node_of]
        used[self._owners.node_of == 0] = 0
        for point in self._points.all():
            blocks = point.own_blocks
            used[blocks] = np.maximum(used[blocks], self._points.stats.last_used[point.slot])
        return used

    def _evict_trunk(self, group: int, goal: int) -> None:
        place = self._layout.place_of(group)
        assert place is not None
        while (missing := goal - int(self._owners.num_freed[group])) > 0:
            nodes = self._order.next(cdiv(missing, place.per_unit))
            if not nodes.size:
                return
            youngest = int(self._trunk.nodes.last_used[nodes].max())
            self.drop_nodes(nodes)
            # Tails hang on nodes that may be in use all the time: those older than what went just now go with it.
            for point in self._points.all_tails():
                if self._points.stats.last_used[point.slot] <= youngest:
                    self.drop_point(point)

    def _evict_points(self, group: int, goal: int) -> None:
        if self._owners.num_freed[group] >= goal:
            return
        for slot in self._by_value(self._points.slots()).tolist():
            point = self._points.at(slot)
            if self._owners.unheld(self._points.blocks_in(point, group)).any():
                self.drop_point(point)
                if self._owners.num_freed[group] >= goal:
                    return

    def _evict_unheld(self, group: int, goal: int) -> None:
        """Give up trunk on the paths of rows that hold other blocks with the same content: the last resort."""
        place = self._layout.place_of(group)
        assert place is not None
        of = self._trunk.nodes
        while (missing := goal - int(self._owners.num_freed[group])) > 0:
            nodes = np.flatnonzero(of.live & (of.depth > 0))
            nodes = nodes[self._owners.unheld(of.blocks[nodes, place.columns]).any(axis=1)]
            if not nodes.size:
                return
            deepest = nodes[np.argsort(-of.depth[nodes], kind="stable")][: cdiv(missing, place.per_unit)]
            self.drop_nodes(of.in_subtrees(deepest.astype(np.int32)))

    def _drop_windows(self, flat: Int64) -> None:
        """Drop the points that keep a window block among `flat`; its node may stay."""
        of, num_full = self._trunk.nodes, self._layout.num_full_columns
        nodes = np.unique(self._owners.node_of[flat])
        wanted = np.isin(of.blocks[nodes, num_full:], flat[flat > 0])
        hit = set(
            zip(
                *(part.tolist() for part in (nodes[np.nonzero(wanted)[0]], np.nonzero(wanted)[1] + num_full)),
                strict=True,
            )
        )
        if not hit:
            return
        for point in self._points.all():
            if not hit.isdisjoint(
                zip(point.contents.kept_nodes.tolist(), point.contents.kept_columns.tolist(), strict=True)
            ):
                self.drop_point(point)

    def _points_before(self, point: ResumePoint) -> list[ResumePoint]:
        """Return the other points from which a sequence on its way to `point` could have gone on."""
        of, unit = self._trunk.nodes, self._layout.unit
        line = of.lineage(point.node)
        found = [self._points.at(slot) for slot in of.point[line[of.point[line] != NO_POINT]].tolist()]
        for depth in np.flatnonzero(of.num_tails[line]).tolist():
            behind = of.tokens[line[depth + 1]] if depth + 1 < len(line) else point.contents.tail_tokens
            for other in self._points.tails_of(int(line[depth])):
                length = other.position % unit
                if np.array_equal(other.contents.tail_tokens, behind[:length]):
                    found.append(other)
        return [other for other in found if other is not point]

    def _by_value(self, slots: Int64) -> Int64:
        stats = self._points.stats.take(slots)
        # Of equal ones the earlier position: what goes on from it can go on from a later one at least as well.
        return slots[np.lexsort((stats.position, self._policy.value(stats)))]
