"""Blocks for whoever needs them: free ones first, then those of cached prefixes, cheapest first.

A group that is short tries, in this order: free blocks in its own slabs, slabs nobody owns, empty slabs of other
groups, cached blocks of its own, other groups' slabs in which nothing is held and whose cached content was used
longest ago.
"""

import numpy as np
from numpy.typing import NDArray

from hybridkv.block_pool import BlockPool
from hybridkv.errors import InvariantError, OutOfBlocks
from hybridkv.prefix_index import PrefixIndex

Int64 = NDArray[np.int64]
_LEAST_BATCH = 64
_BATCH_PART = 64  # evict at least this part of what is cached at once: a pass over the index serves many steps


class BlockLender:
    """Takes blocks from the pool, evicting cached prefixes where it must.

    Attributes:
        num_evictions: passes over the index.
    """

    def __init__(self, pool: BlockPool, index: PrefixIndex | None) -> None:
        self.pool, self._index = pool, index
        self.num_evictions = 0

    def fits(self, need: Int64) -> NDArray[np.bool_]:
        """Return `[...]`: whether blocks `need` [num_groups, ...] could be had, were everything cached evicted."""
        fits = self.pool.fits_now(need)
        if self._index is None or fits.all():
            return fits
        return self.pool.fits(need)

    def shortfall(self, need: Int64) -> Int64:
        """Return blocks `[num_groups, ...]` that are missing even then, groups served in order."""
        return self.pool.shortfall(need)

    def take(self, need: Int64) -> Int64:
        """Return flat blocks, `need[g]` of each group, group by group, each held once.

        Raises: OutOfBlocks if not even evicting everything brings them; nothing changes then.
        """
        if self._index is not None and not self.pool.fits_now(need) and self.pool.fits(need):
            self._make_room(need)
        return self.pool.take(need)

    def take_spare(self, need: Int64) -> Int64 | None:
        """Return flat blocks for something optional, None if there are none.

        It may take the place of what was cached and not used for longer, never of a running sequence: once cached, such
        blocks are evicted for whoever needs them.
        """
        try:
            return self.take(need) if self.fits(need).all() else None
        except (OutOfBlocks, MemoryError):
            return None

    def _make_room(self, need: Int64) -> None:
        """Evict until `need` fits; `fits` has promised that it will."""
        self.num_evictions += 1
        index, pool = self._index, self.pool
        assert index is not None
        for own in (True, False):
            for group in np.flatnonzero(need > pool.num_free).tolist():
                if pool.fits_now(need):
                    return
                missing = int(need[group] - pool.num_free[group])
                if own:
                    batch = max(_LEAST_BATCH, int(pool.num_cached[group]) // _BATCH_PART)
                    index.evict(group, max(missing, batch))
                else:
                    num_slabs = -(-missing // int(pool.blocks_per_slab[group]))
                    for slab in pool.slabs_of_least_value(group, index.last_used_of_blocks(), num_slabs).tolist():
                        index.drop_blocks(pool.blocks_of_slab(slab))
        self._make_more_room(need)

    def _make_more_room(self, need: Int64) -> None:
        """Evict bit by bit for all groups in need: a slab that one of them was to get may have gone to another."""
        index, pool = self._index, self.pool
        assert index is not None
        while not pool.fits_now(need):
            before = int(pool.num_cached.sum())
            for group in np.flatnonzero(need).tolist():
                index.evict(group, max(_LEAST_BATCH, int(pool.num_cached[group]) // _BATCH_PART))
                if pool.fits_now(need):
                    return
                for slab in pool.slabs_of_least_value(group, index.last_used_of_blocks(), 1).tolist():
                    index.drop_blocks(pool.blocks_of_slab(slab))
                if pool.fits_now(need):
                    return
            if int(pool.num_cached.sum()) == before:
                raise InvariantError(f"blocks {need.tolist()} (by group) were to fit after evicting, and do not")
