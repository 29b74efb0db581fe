"""Preempted rows that wait on the host: their blocks are copied there and back instead of computed again."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hybridkv.plan import CachePlan
from hybridkv.sequence_store import SequenceStore

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class _Swapped:
    """A row on the host.

    Shapes: firsts, counts [num_groups] int64, live ordinals; blocks [sum(counts)] int64, flat blocks of the host's pool
    """

    firsts: Int64
    counts: Int64
    blocks: Int64
    num_tokens: int


def host_plan(plan: CachePlan, num_bytes: int) -> CachePlan:
    """Return a plan of the same groups and blocks for an arena of `num_bytes` bytes on the host."""
    num_slabs = num_bytes // plan.slab_bytes
    groups = tuple(replace(group, num_blocks=num_slabs * group.blocks_per_slab) for group in plan.groups)
    return replace(plan, memory_bytes=num_bytes, num_slabs=num_slabs, groups=groups)


class Swaps:
    """Rows on the host, by row."""

    def __init__(self, store: SequenceStore) -> None:
        self._store = store
        self._rows: dict[int, _Swapped] = {}

    def swap_out(self, row: int) -> bool:
        """Ask for copies of a row's content to the host, if there is room; the row still holds its blocks."""
        store, host_pool = self._store, self._store.host_pool
        if host_pool is None:
            return False
        firsts = store.arrays.first[:, row].astype(np.int64)
        ends = store.groups.ends(store.rows.computed[row : row + 1])[:, 0]
        counts = ends - firsts
        if not host_pool.fits_now(counts):
            return False
        sources = np.concatenate([store.row_blocks(g, row)[:n] for g, n in enumerate(counts.tolist())])
        targets = host_pool.take(counts)
        store.copies.add_to_host(sources, targets)
        self._rows[row] = _Swapped(firsts, counts, targets, int(store.rows.computed[row]))
        return True

    def needs(self, row: int) -> Int64:
        """Return the blocks by group that a row wants back."""
        return self._rows[row].counts

    def num_tokens(self, row: int) -> int:
        """Return how many tokens of a row are on the host."""
        return self._rows[row].num_tokens

    def swap_in(self, row: int) -> int:
        """Lend an empty row blocks for its content and ask for the copies; return its tokens.

        Raises: OutOfBlocks if they do not fit; nothing changes then.
        """
        store, swapped = self._store, self._rows[row]
        taken = store.lender.take(swapped.counts)
        try:
            store.place(row, swapped.firsts, np.split(taken, swapped.counts.cumsum()[:-1]))
        except BaseException:
            store.pool.release(taken)
            raise
        store.copies.add_from_host(swapped.blocks, taken)
        self.forget(row)
        return swapped.num_tokens

    def forget(self, row: int) -> None:
        """Give up a row's blocks on the host."""
        swapped = self._rows.pop(row, None)
        if swapped is not None:
            assert self._store.host_pool is not None
            self._store.host_pool.release(swapped.blocks)

    def move(self, source: int, target: int) -> None:
        """Move a row's blocks on the host to another row."""
        if source in self._rows:
            self._rows[target] = self._rows.pop(source)
