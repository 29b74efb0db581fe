r"""The tree of cached prefixes: one node a unit of tokens.

    root(salt) - node - node - node          a path is a prefix; a node holds the full groups' blocks of its unit
                            \ node

A node is found by its prefix's hash and taken only if parent, tokens and features are equal too. At most one node has a
hash: a newcomer whose hash is taken by something else is not cached.
"""

from collections.abc import Callable, Hashable

import numpy as np
from numpy.typing import NDArray

from hybridkv.block_owners import BlockOwners
from hybridkv.errors import InvariantError
from hybridkv.index_layout import IndexLayout
from hybridkv.node_arrays import NO_POINT, NodeArrays
from hybridkv.node_table import NodeTable

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]
_SHORT_RUN = 8
_FIRST_BATCH = 32


class PrefixTrunk:
    """Nodes, the table that finds them, the roots by salt."""

    def __init__(self, layout: IndexLayout, owners: BlockOwners) -> None:
        self.nodes = NodeArrays(layout.unit, layout.num_full_columns + layout.num_window_columns)
        self.owners = owners
        self.roots: dict[Hashable, int] = {}
        self.clock = 1  # 0 is never
        self.num_evicted = 0
        # Told of nodes that were just added (True) or are about to go (False).
        self.watch: Callable[[Int32, bool], None] | None = None
        self._salts: dict[int, Hashable] = {}
        self._table = NodeTable()
        self._num_full = layout.num_full_columns

    def __len__(self) -> int:
        return len(self._table)

    def root_of(self, salt: Hashable) -> int:
        """Return the root of a salt's sequences, made if it is new."""
        root = self.roots.get(salt)
        if root is None:
            root = int(self.nodes.take(1)[0])
            self.nodes.live[root] = True
            self.nodes.last_used[root] = self.clock
            self.roots[salt], self._salts[root] = root, salt
        return root

    def walk(self, start: int, hashes: UInt64, tokens: Int32, keys: Int32) -> Int32:
        """Return the nodes of consecutive units below `start`, as far as they are cached.

        Shapes: hashes [n]; tokens [n, unit]; keys [n]; returns [at most n]
        """
        parts: list[Int32] = []
        at, parent, batch = 0, start, _FIRST_BATCH
        while at < len(hashes):
            node = self._table.get(int(hashes[at]))
            if not node:
                break
            run = self._run_length(node, parent, hashes[at:], tokens[at:], keys[at:])
            if not run:
                break
            parts.append(np.arange(node, node + run, dtype=np.int32))
            at, parent = at + run, node + run - 1
            if run < _SHORT_RUN and at < len(hashes):
                found = self._exact(parent, hashes[at : at + batch], tokens[at : at + batch], keys[at : at + batch])
                parts.append(found)
                at += len(found)
                if len(found):
                    parent = int(found[-1])
                batch *= 2
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def add_chain(self, parent: int, hashes: UInt64, tokens: Int32, keys: Int32, blocks: Int64) -> Int32:
        """Cache consecutive units of one sequence below `parent`; return their nodes, 0 from a collision on.

        Shapes: hashes, keys [n]; tokens [n, unit]; blocks [n, full columns]; returns [n]
        """
        nodes = np.zeros(len(hashes), dtype=np.int32)
        if not self.nodes.live[parent]:
            return nodes
        known = self.walk(parent, hashes, tokens, keys)
        have = len(known)
        nodes[:have] = known
        num_new = self._num_addable(hashes[have:], keys[have:])
        if num_new:
            new = self.nodes.take(num_new)
            above = int(known[-1]) if have else parent
            end = have + num_new
            parents = np.concatenate([np.array([above], dtype=np.int32), new[:-1]])
            self._create(new, parents, hashes[have:end], tokens[have:end], keys[have:end], blocks[have:end])
            self.nodes.depth[new] = np.arange(1, num_new + 1) + self.nodes.depth[above]
            self.nodes.last_used[new] = self.nodes.last_used[above]
            nodes[have:end] = new
            if self.watch is not None:
                self.watch(new, True)
        return nodes

    def add_leaves(self, parents: Int32, hashes: UInt64, tokens: Int32, keys: Int32, blocks: Int64) -> Int32:
        """Cache one unit of each of many sequences; return their nodes, 0 where the hash is something else's.

        Equal units below one parent are one node, with the first one's blocks.

        Shapes: parents, hashes, keys [R]; tokens [R, unit]; blocks [R, full columns]; returns [R]
        """
        of = self.nodes
        found = self._table.look_up(hashes)
        same = (of.parent[found] == parents) & (of.keys[found] == keys) & (of.tokens[found] == tokens).all(axis=1)
        result = np.where(same & (found > 0), found, 0).astype(np.int32)
        fresh = np.flatnonzero((found == 0) & of.live[parents] & (keys >= 0))
        if not fresh.size:
            return result
        leaders, leader_of = fresh, np.arange(len(fresh))
        if len(set(hashes[fresh].tolist())) < len(fresh):
            _, firsts, leader_of = np.unique(hashes[fresh], return_index=True, return_inverse=True)
            leaders = fresh[firsts]
        new = of.take(len(leaders))
        above = parents[leaders]
        self._create(new, above, hashes[leaders], tokens[leaders], keys[leaders], blocks[leaders])
        of.depth[new] = of.depth[above] + 1
        of.last_used[new] = of.last_used[above]
        if self.watch is not None:
            self.watch(new, True)
        if len(leaders) == len(fresh):
            result[fresh] = new
        else:
            mine, led = new[leader_of], leaders[leader_of]
            equal = (parents[led] == parents[fresh]) & (keys[led] == keys[fresh])
            equal &= (tokens[led] == tokens[fresh]).all(axis=1)
            result[fresh] = np.where(equal, mine, 0)
        return result

    def remove(self, gone: Int32) -> None:
        """Forget nodes, with every node below them among `gone` and no resume point left at any.

        Rows that are pinned to one keep its number, which matches nothing any more, until they let it go.
        """
        of = self.nodes
        if self.watch is not None:
            self.watch(gone, False)
        pinned = gone[of.pins[gone] > 0]
        for node in pinned.tolist():
            of.locks[of.lineage(node)] -= of.pins[node]
        blocks = of.blocks[gone, : self._num_full].reshape(-1)
        self._table.remove(gone)
        parents = of.parent[gone]
        np.subtract.at(of.num_children, parents, 1)
        if blocks.size:
            self.owners.take_from_nodes(blocks)
        of.clear(gone)
        of.give_back(gone[of.pins[gone] == 0])
        self.num_evicted += len(gone)
        roots = parents[of.live[parents] & (of.depth[parents] == 0)]
        for root in np.unique(roots).tolist():
            self.drop_unused_root(root)

    def salt_of(self, root: int) -> Hashable:
        """Return the salt of a root's sequences."""
        return self._salts[root]

    def drop_unused_root(self, root: int) -> None:
        """Forget a salt of which nothing is cached and that no row has."""
        of = self.nodes
        if of.live[root] and not (of.num_children[root] or of.locks[root] or of.num_tails[root]):
            del self.roots[self._salts.pop(root)]
            of.clear(np.array([root], dtype=np.int32))
            of.give_back(np.array([root], dtype=np.int32))

    def look_up(self, hashes: UInt64) -> Int32:
        """Return the nodes of hashes, 0 where there is none.

        Shapes: hashes [n]; returns [n] int32
        """
        return self._table.look_up(hashes)

    def touch(self, nodes: Int32) -> None:
        """Note that nodes, a path from a root, were used now."""
        self.clock += 1
        self.nodes.last_used[nodes] = self.clock

    def pin(self, node: int, count: int = 1) -> None:
        """Count one more row (or less, for -1) whose last whole unit this is: it and the nodes above stay.

        Raises: InvariantError if there is no such row.
        """
        of = self.nodes
        if of.pins[node] + count < 0 or not (of.live[node] or of.pins[node]):
            raise InvariantError(f"node {node}: unpinned more often than pinned, or no node at all")
        of.pins[node] += count
        if of.live[node]:
            line = of.lineage(node)
            of.locks[line] += count
            self.touch(line)
            if count < 0:
                self.drop_unused_root(int(line[0]))
        elif not of.pins[node]:
            of.give_back(np.array([node], dtype=np.int32))

    def move_pins(self, parents: Int32, nodes: Int32) -> None:
        """Move one pin from each parent to a live node below it.

        Shapes: parents, nodes [R]
        """
        of = self.nodes
        for pair in np.flatnonzero(of.parent[nodes] != parents).tolist():
            line = of.lineage(int(nodes[pair]))
            between = line[of.depth[parents[pair]] :]
            if not between.size or between[0] != parents[pair]:
                raise InvariantError(f"node {nodes[pair]} is not below node {parents[pair]}")
            of.locks[between[1:-1]] += 1
        np.add.at(of.pins, nodes, 1)
        np.add.at(of.locks, nodes, 1)
        np.subtract.at(of.pins, parents, 1)

    def _create(self, new: Int32, parents: Int32, hashes: UInt64, tokens: Int32, keys: Int32, blocks: Int64) -> None:
        of = self.nodes
        if blocks.size:
            flat = np.ascontiguousarray(blocks, dtype=np.int64).reshape(-1)
            try:
                self.owners.add_to_nodes(flat, new.repeat(self._num_full))
            except InvariantError:
                of.give_back(new)
                raise
            of.blocks[new, : self._num_full] = blocks
        of.live[new] = True
        of.parent[new] = parents
        of.hash[new] = hashes
        of.tokens[new] = tokens
        of.keys[new] = keys
        of.point[new] = NO_POINT
        np.add.at(of.num_children, parents, 1)
        self._table.insert(hashes, new)

    def _num_addable(self, hashes: UInt64, keys: Int32) -> int:
        """Return how many units from the first on have hashes that are neither taken nor repeated."""
        taken = (self._table.look_up(hashes) > 0) | (keys < 0)
        rising = np.sort(hashes)
        if (rising[1:] == rising[:-1]).any():
            _, firsts = np.unique(hashes, return_index=True)
            repeated = np.ones(len(hashes), dtype=np.bool_)
            repeated[firsts] = False
            taken |= repeated
        return int(taken.argmax()) if taken.any() else len(hashes)

    def _run_length(self, node: int, parent: int, hashes: UInt64, tokens: Int32, keys: Int32) -> int:
        """Return how many nodes from `node` on, by number, are the given units, the first one below `parent`."""
        of = self.nodes
        if of.parent.item(node) != parent:
            return 0
        run = min(len(hashes), of.capacity - node)
        run = _num_true(of.hash[node : node + run] == hashes[:run])
        run = 1 + _num_true(of.parent[node + 1 : node + run] == np.arange(node, node + run - 1)) if run else 0
        run = min(run, _num_true(of.keys[node : node + run] == keys[:run]))
        same = of.tokens[node : node + run] == tokens[:run]
        return run if same.all() else _num_true(same.all(axis=1))

    def _exact(self, parent: int, hashes: UInt64, tokens: Int32, keys: Int32) -> Int32:
        """Return the nodes of consecutive units below `parent`, as far as they are cached, whatever their numbers."""
        of = self.nodes
        found = self._table.look_up(hashes)
        parents = np.empty_like(found)
        parents[0], parents[1:] = parent, found[:-1]
        good = (found > 0) & (of.parent[found] == parents) & (of.keys[found] == keys)
        found = found[: _num_true(good)]
        same = (of.tokens[found] == tokens[: len(found)]).all(axis=1)
        return found[: _num_true(same)]


def _num_true(flags: NDArray[np.bool_]) -> int:
    """Return how many flags are set before the first that is not."""
    if not flags.size:
        return 0
    first = int(flags.argmin())
    return len(flags) if flags[first] else first
