"""Comparable copies of everything that an object of the library remembers."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

import numpy as np

from hybridkv.drain_queue import DrainQueue
from hybridkv.free_stacks import FreeStacks
from hybridkv.index_layout import IndexLayout
from hybridkv.manager import CacheManager
from hybridkv.node_arrays import NodeArrays
from hybridkv.node_table import NodeTable
from hybridkv.plan import CachePlan, GroupPlan
from hybridkv.pool_state import PoolState
from hybridkv.row_lengths import RowLengths
from hybridkv.slabs import Slabs
from hybridkv.table_arrays import TableShape
from hybridkv.token_hash import UnitHasher
from hybridkv.trunk_order import TrunkOrder

# What looking a prefix up may change: when it was used.
TIMES = ("clock", "last_used")


def snapshot(value: object, *, ignore: Collection[str] = ()) -> object:
    """Return a deep, comparable copy of everything that an object of the library remembers, plans left out.

    Counts that are brought up to date when they are read are so first, and what is left over in places that nothing
    refers to any more does not count. `ignore` names attributes to leave out.
    """
    return _Snapshot(ignore).of(value)


class _Snapshot:
    """One walk over an object and all it refers to; each object is looked into once."""

    def __init__(self, ignore: Collection[str]) -> None:
        self._ignore = {"plan", "plans", *ignore}
        self._seen: dict[int, object] = {}

    def of(self, value: object) -> object:
        """Copy a value."""
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tolist()
        if isinstance(value, list | tuple):
            return [self.of(item) for item in value]
        if isinstance(value, dict):
            return {key: self.of(item) for key, item in value.items()}
        if not hasattr(value, "__dict__") or isinstance(value, _COMPARED_WHOLE) or callable(value):
            return value
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._seen[id(value)] = "an object that refers to itself"
        if isinstance(value, PoolState):
            value.counted_slabs()
        if isinstance(value, CacheManager) and value._store.recorder is not None:
            value._store.recorder.flush()
        copied = {name: self.of(item) for name, item in _remembered(value).items() if name not in self._ignore}
        self._seen[id(value)] = copied
        return copied


_COMPARED_WHOLE = (type, UnitHasher, CachePlan, GroupPlan, IndexLayout, TableShape, Enum)


def _remembered(value: object) -> dict[str, object]:
    """Return an object's attributes without what nothing refers to any more."""
    attributes = dict(vars(value))
    if isinstance(value, FreeStacks):
        attributes["_flat"] = [value.content(group) for group in range(len(value.num))]
    elif isinstance(value, Slabs):
        attributes["_free"] = value.free_stack()
    elif isinstance(value, DrainQueue):
        attributes["_until"] = np.where(attributes["_until"] > value.settled, attributes["_until"], 0)
    elif isinstance(value, NodeArrays):
        used = np.flatnonzero(value.live | (value.pins > 0))
        by_node = [
            name for name, array in attributes.items() if name != "_free" and np.shape(array)[:1] == (value.capacity,)
        ]
        attributes = {name: attributes[name][used] for name in by_node} | {"num_taken": value.num_taken}
    elif isinstance(value, NodeTable):
        places = np.flatnonzero(attributes["_nodes"] > 0)
        pairs = zip(attributes["_hashes"][places].tolist(), attributes["_nodes"][places].tolist(), strict=True)
        attributes = {"nodes": dict(pairs)}
    elif isinstance(value, TrunkOrder):
        attributes = {}
    elif isinstance(value, RowLengths):
        del attributes["_last_running"]
    return attributes
