"""Copies of blocks that the manager asks its engine for, before the next step reads what they write."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybridkv.block_pool import BlockPool

Int64 = NDArray[np.int64]


def _nothing() -> Int64:
    return np.empty((0, 3), dtype=np.int64)


@dataclass(frozen=True)
class BlockCopies:
    """Whole blocks to copy, each (group, source block, destination block).

    Run `moves` first, then `from_host`, `within`, `to_host`, on the stream of the forward passes, before the next one:
    it may write what they read. Within one list no block is written twice and none is both read and written.

    Shapes: moves, within [n, 3]; to_host [m, 3], device block to host block; from_host [k, 3], host block to device
        block; all int64
    """

    moves: Int64 = field(default_factory=_nothing)
    within: Int64 = field(default_factory=_nothing)
    to_host: Int64 = field(default_factory=_nothing)
    from_host: Int64 = field(default_factory=_nothing)

    def __len__(self) -> int:
        return len(self.moves) + len(self.within) + len(self.to_host) + len(self.from_host)


_NO_COPIES = BlockCopies()


class CopyList:
    """Copies that no engine has taken yet.

    Blocks that are to be read or written have one more holder until the step that follows the copies has ended, so
    that nobody else gets them before.
    """

    def __init__(self, pool: BlockPool, host_pool: BlockPool | None) -> None:
        self._pool, self._host_pool = pool, host_pool
        self._parts: dict[str, list[tuple[Int64, Int64]]] = {"moves": [], "within": [], "to_host": [], "from_host": []}
        self._origins: dict[int, int] = {}
        self.num_moves = 0

    def add(self, sources: Int64, targets: Int64) -> None:
        """Ask for copies between flat blocks of equal groups.

        A source that is itself still to be written is read where its content comes from.
        """
        if not len(sources):
            return
        if self._origins:
            origins = self._origins
            sources = np.array([origins.get(source, source) for source in sources.tolist()], dtype=np.int64)
        self._pool.hold(np.concatenate([sources, targets]))
        self._origins.update(zip(targets.tolist(), sources.tolist(), strict=True))
        self._parts["within"].append((sources, targets))

    def add_moves(self, sources: Int64, targets: Int64) -> None:
        """Ask for copies of blocks that the pool moved: the sources drain, the targets are held as they were."""
        self._parts["moves"].append((sources, targets))
        self.num_moves += len(sources)

    @property
    def has_moves(self) -> bool:
        """Whether moves wait to be taken."""
        return bool(self._parts["moves"])

    def add_to_host(self, sources: Int64, targets: Int64) -> None:
        """Ask for copies of flat blocks into flat blocks of the host's pool."""
        assert self._host_pool is not None
        self._pool.hold(sources)
        self._host_pool.hold(targets)
        self._parts["to_host"].append((sources, targets))

    def add_from_host(self, sources: Int64, targets: Int64) -> None:
        """Ask for copies of flat blocks of the host's pool."""
        assert self._host_pool is not None
        self._pool.hold(targets)
        self._host_pool.hold(sources)
        self._parts["from_host"].append((sources, targets))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be copied."""
        return not any(self._parts.values())

    def held(self) -> Int64:
        """Return the flat blocks that copies hold, one entry for each time."""
        held = [column for part in self._parts["within"] for column in part]
        held += [sources for sources, _ in self._parts["to_host"]]
        held += [targets for _, targets in self._parts["from_host"]]
        return np.concatenate(held) if held else np.empty(0, dtype=np.int64)

    @property
    def awaits_host(self) -> bool:
        """Whether blocks are still to be copied to the host."""
        return bool(self._parts["to_host"])

    def take(self) -> BlockCopies:
        """Hand the copies over; from then on they count as done before the next step."""
        if self.is_empty:
            return _NO_COPIES
        taken = BlockCopies(
            self._take("moves", self._pool, self._pool),
            self._take("within", self._pool, self._pool),
            self._take("to_host", self._pool, self._host_pool),
            self._take("from_host", self._host_pool, self._pool),
        )
        self._origins.clear()
        return taken

    def _take(self, name: str, source_pool: BlockPool | None, target_pool: BlockPool | None) -> Int64:
        parts = self._parts[name]
        if not parts:
            return _nothing()
        assert source_pool is not None
        assert target_pool is not None
        sources, targets = (np.concatenate(column) for column in zip(*parts, strict=True))
        for pool, flat in ((source_pool, sources), (target_pool, targets)) if name != "moves" else ():
            # The host's blocks are written and read in the order of these copies alone.
            pool.release(flat, after_next=pool is self._pool)
        groups = np.searchsorted(source_pool.offsets, sources, side="right") - 1
        parts.clear()
        blocks = sources - source_pool.offsets[groups], targets - target_pool.offsets[groups]
        return np.stack([groups, *blocks], axis=1)
