"""The order in which the trunk's nodes are evicted."""

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import InvariantError
from hybridkv.node_arrays import NodeArrays

_DEPTH_BITS = 24
_LEAST_QUEUE = 4096
_QUEUE_PART = 8  # a pass over all nodes sorts at least this part of what can go


class TrunkOrder:
    """Nodes no row has on its path: longest unused first, of equally old ones the deepest.

    A node was used whenever one below it was, so any first part of this order holds every node below its own. The order
    is a queue that one pass over all nodes fills for many calls; what was used since is skipped.
    """

    def __init__(self, nodes: NodeArrays) -> None:
        self._nodes = nodes
        self._queue = np.empty(0, dtype=np.int32)
        self._ages = np.empty(0, dtype=np.int64)
        self._inside = np.zeros(nodes.capacity, dtype=np.int32)

    def next(self, count: int) -> NDArray[np.int32]:
        """Return the next nodes to evict, at most `count`, fewer only if no more can go; the caller removes them.

        Shapes: returns [at most count], no node twice, every node's children before or not there
        """
        chosen = self._from_queue(count)
        if len(chosen) == count and self._is_closed(chosen):
            return chosen
        self._fill(count)
        chosen = self._from_queue(count)
        if not self._is_closed(chosen):
            raise InvariantError("a node was used before one below it")
        return chosen

    def _from_queue(self, count: int) -> NDArray[np.int32]:
        parts, wanted = [self._queue[:0]], count
        while wanted and len(self._queue):
            head = self._queue[: 2 * wanted]
            still = np.flatnonzero((self._age_of(head) == self._ages[: len(head)]) & self._can_go(head))[:wanted]
            end = int(still[-1]) + 1 if len(still) == wanted else len(head)
            parts.append(head[still])
            self._queue, self._ages, wanted = self._queue[end:], self._ages[end:], wanted - len(still)
        return np.concatenate(parts)

    def _fill(self, count: int) -> None:
        nodes = np.flatnonzero(self._nodes.live & (self._nodes.locks == 0) & (self._nodes.depth > 0)).astype(np.int32)
        ages = self._age_of(nodes)
        wanted = max(2 * count, len(nodes) // _QUEUE_PART, _LEAST_QUEUE)
        if wanted < len(nodes):
            oldest = np.argpartition(ages, wanted)[:wanted]
            nodes, ages = nodes[oldest], ages[oldest]
        order = np.argsort(ages, kind="stable")
        self._queue, self._ages = nodes[order], ages[order]

    def _age_of(self, nodes: NDArray[np.int32]) -> NDArray[np.int64]:
        ages: NDArray[np.int64] = (self._nodes.last_used[nodes] << _DEPTH_BITS) - self._nodes.depth[nodes]
        return ages

    def _can_go(self, nodes: NDArray[np.int32]) -> NDArray[np.bool_]:
        can: NDArray[np.bool_] = self._nodes.live[nodes] & (self._nodes.locks[nodes] == 0)
        return can

    def _is_closed(self, nodes: NDArray[np.int32]) -> bool:
        parents = self._nodes.parent[nodes]
        if len(self._inside) < self._nodes.capacity:
            self._inside = np.zeros(self._nodes.capacity, dtype=np.int32)
        np.add.at(self._inside, parents, 1)
        is_closed = bool((self._inside[nodes] == self._nodes.num_children[nodes]).all())
        self._inside[parents] = 0
        return is_closed
