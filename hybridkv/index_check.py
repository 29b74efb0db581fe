"""Whether the prefix index keeps its own laws."""

import numpy as np
from numpy.typing import NDArray

from hybridkv.block_owners import BlockOwners
from hybridkv.errors import InvariantError
from hybridkv.index_layout import IndexLayout
from hybridkv.node_arrays import NO_POINT
from hybridkv.prefix_trunk import PrefixTrunk
from hybridkv.resume_points import ResumePoints


def check_index(layout: IndexLayout, trunk: PrefixTrunk, points: ResumePoints, owners: BlockOwners) -> None:
    """Check nodes, points and references against each other.

    Raises: InvariantError if they disagree.
    """
    _check_tree(trunk)
    keeps = _check_points(layout, trunk, points)
    of, num_full = trunk.nodes, layout.num_full_columns
    units = np.flatnonzero(of.live & (of.depth > 0))
    _require((of.blocks[units, :num_full] > 0).all(), "a node lacks a block of a full-attention group")
    _require(np.array_equal(of.blocks[:, num_full:] > 0, keeps[:, num_full:] > 0), "window blocks and points disagree")
    in_nodes = of.blocks[of.blocks > 0]
    owned = owners.node_of[in_nodes]
    _require(np.array_equal(owned, np.nonzero(of.blocks > 0)[0]), "a block belongs to another node than it says")
    in_points = [point.own_blocks for point in points.all()]
    owners.check(in_nodes, np.concatenate([np.empty(0, dtype=np.int64), *in_points]))


def _check_tree(trunk: PrefixTrunk) -> None:
    of = trunk.nodes
    units = np.flatnonzero(of.live & (of.depth > 0))
    roots = np.flatnonzero(of.live & (of.depth == 0))
    parents = of.parent[units]
    _require(sorted(trunk.roots.values()) == roots.tolist(), "the roots are not those of the salts")
    _require(not of.parent[~of.live].any() and not of.parent[roots].any(), "a root or a lost node has a parent")
    _require(of.live[parents].all(), "a node hangs on one that is gone")
    _require((of.depth[units] == of.depth[parents] + 1).all(), "a node's depth is not its parent's and one")
    counts = np.bincount(parents, minlength=of.capacity)
    _require(np.array_equal(counts, of.num_children), "children are miscounted")
    below = of.depth[parents] > 0
    _require((of.last_used[units] <= of.last_used[parents])[below].all(), "a node was used after its parent")
    _require(len(trunk) == len(units), "the hash table counts other nodes")
    _require(np.array_equal(trunk.look_up(of.hash[units]), units), "the hash table finds another node")
    locks = np.where(of.live, of.pins, 0)
    for depth in range(int(of.depth.max()), 0, -1):
        level = units[of.depth[units] == depth]
        np.add.at(locks, of.parent[level], locks[level])
    _require(np.array_equal(locks, of.locks), "rows on a path are miscounted")
    taken = of.live | (of.pins > 0)
    _require(of.num_taken == taken.sum() and not taken[0], "a node is neither taken nor free")


def _check_points(layout: IndexLayout, trunk: PrefixTrunk, points: ResumePoints) -> NDArray[np.int32]:
    of = trunk.nodes
    keeps = np.zeros_like(of.keeps)
    at_nodes = np.full_like(of.point, NO_POINT)
    num_tails = np.zeros_like(of.num_tails)
    for point in points.all():
        node, tail = point.node, point.position % layout.unit
        _require(of.live[node] and of.depth[node] == point.position // layout.unit, "a resume point lost its node")
        line = of.lineage(node)
        _require(np.isin(point.contents.kept_nodes, line).all(), "a resume point keeps blocks off its path")
        keeps[point.contents.kept_nodes, point.contents.kept_columns] += 1
        needed = 0
        for place in layout.windows:
            first = place.first_ordinal(point.position)
            needed += max(int(of.depth[node]) * place.per_unit - first, 0)
        _require(len(point.contents.kept_nodes) == needed, "a resume point keeps part of a window")
        _require(bool(points.has_states[point.slot]) == (point.states.size > 0), "states are misnoted")
        if tail:
            num_tails[node] += 1
            _require(
                points.tail(node, point.contents.tail_tokens, point.contents.tail_key) is point, "a tail is not found"
            )
        else:
            at_nodes[node] = point.slot
    _require(np.array_equal(keeps, of.keeps), "the points that need a window block are miscounted")
    _require(np.array_equal(at_nodes, of.point), "points behind whole units are misnoted")
    _require(np.array_equal(num_tails, of.num_tails), "tails are miscounted")
    return keeps


def _require(holds: bool | np.bool_, problem: str) -> None:
    if not holds:
        raise InvariantError(f"prefix index: {problem}")
