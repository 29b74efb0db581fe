"""Steps of a serving worker for block tables, with what every table must hold after them.

A workload makes steps ahead of time, in the two currencies of the systems that take them: int32 arrays, lists of Python
integers. It keeps a plain record of block ids by ordinal, from which the expected tables and slots follow.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK_SIZE = 16
NUM_ROWS = 256
CONTEXT = 8192
_MAX_BLOCK_ID = 2**22
_RECORD_COLUMNS = 2048


@dataclass(frozen=True)
class GroupShape:
    """One group's table: `width` in blocks; `window` in tokens, None for full attention."""

    width: int
    window: int | None = None


@dataclass(frozen=True)
class Drop:
    """Ordinals below `first_blocks[i]` of rows `rows[i]` leave the window of a group."""

    group: int
    rows: NDArray[np.int64]
    first_blocks: NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """Every row `append_rows[i]` gets `ids[g, i]` in group g, then the batch of `rows` computes its tokens.

    Shapes: append_rows [n]; ids [G, n, k]; rows, query_lens, num_computed [R]; token_rows, positions [T]
    """

    append_rows: NDArray[np.int64]
    ids: NDArray[np.int32]
    rows: NDArray[np.int32]
    query_lens: NDArray[np.int32]
    num_computed: NDArray[np.int32]
    token_rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    drops: tuple[Drop, ...] = ()

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Return `[G, n]`: blocks by group and appended row."""
        return np.full(self.ids.shape[:2], self.ids.shape[2])

    @cached_property
    def flat_ids(self) -> list[NDArray[np.int32]]:
        """Return the ids of each group, row after row."""
        return [np.ascontiguousarray(group).reshape(-1) for group in self.ids]

    @cached_property
    def lists(self) -> list[tuple[int, tuple[list[int], ...]]]:
        """Return each row with one list of ids per group."""
        return _lists(self.append_rows, self.ids)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows [R] int32, query_start_loc [R+1] int32, positions [T] int64."""
        starts = np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)
        return torch.from_numpy(self.rows), torch.from_numpy(starts), torch.from_numpy(self.positions)


@dataclass(frozen=True)
class Churn:
    """Rows finish, the rows `sources` move into those of `holes`, the last rows are admitted with new blocks.

    Shapes: finished, admitted [n]; sources, holes [m]; ids [G, n, k]
    """

    finished: NDArray[np.int64]
    sources: NDArray[np.int64]
    holes: NDArray[np.int64]
    admitted: NDArray[np.int64]
    ids: NDArray[np.int32]

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Return `[G, n]`: blocks by group and admitted row."""
        return np.full(self.ids.shape[:2], self.ids.shape[2])

    @cached_property
    def lists(self) -> list[tuple[int, tuple[list[int], ...]]]:
        """Return each admitted row with one list of ids per group."""
        return _lists(self.admitted, self.ids)

    @cached_property
    def moves(self) -> list[tuple[int, int]]:
        """Return (source, hole) pairs."""
        return list(zip(self.sources.tolist(), self.holes.tolist(), strict=True))

    @cached_property
    def touched(self) -> NDArray[np.int64]:
        """Return the rows whose content differs afterwards."""
        return np.concatenate([self.holes, self.admitted])


def _lists(rows: NDArray[np.int64], ids: NDArray[np.int32]) -> list[tuple[int, tuple[list[int], ...]]]:
    return [(row, tuple(group.tolist() for group in ids[:, i])) for i, row in enumerate(rows.tolist())]


class Record:
    """What every table must hold: `ids [G, NUM_ROWS, ordinal]`, live in `[first, count) [G, NUM_ROWS]`."""

    def __init__(self, groups: tuple[GroupShape, ...], rng: np.random.Generator) -> None:
        self.groups, self.rng = groups, rng
        self.ids = np.zeros((len(groups), NUM_ROWS, _RECORD_COLUMNS), dtype=np.int32)
        self.first = np.zeros((len(groups), NUM_ROWS), dtype=np.int64)
        self.count = np.zeros((len(groups), NUM_ROWS), dtype=np.int64)

    def new_ids(self, num_rows: int, num_blocks: int) -> NDArray[np.int32]:
        """Draw ids `[G, num_rows, num_blocks]`."""
        shape = (len(self.groups), num_rows, num_blocks)
        return self.rng.integers(1, _MAX_BLOCK_ID, shape, dtype=np.int32)

    def append(self, rows: NDArray[np.int64], ids: NDArray[np.int32]) -> None:
        """Append `ids [G, n, k]`."""
        ordinals = self.count[:, rows, None] + np.arange(ids.shape[2])
        self.ids[np.arange(len(self.groups))[:, None, None], rows[None, :, None], ordinals] = ids
        self.count[:, rows] += ids.shape[2]

    def clear(self, rows: NDArray[np.int64]) -> None:
        """Forget rows."""
        self.ids[:, rows] = 0
        self.first[:, rows] = self.count[:, rows] = 0

    def move(self, sources: NDArray[np.int64], holes: NDArray[np.int64]) -> None:
        """Move rows into empty ones."""
        for array in (self.ids, self.first, self.count):
            array[:, holes] = array[:, sources]
        self.clear(sources)

    def drop(self, num_computed: NDArray[np.int32]) -> tuple[Drop, ...]:
        """Forget what the windows leave behind when row i computes position `num_computed[i]`."""
        drops = []
        for group, shape in enumerate(self.groups):
            if shape.window is None:
                continue
            first = np.maximum(num_computed.astype(np.int64) - shape.window + 1, 0) // BLOCK_SIZE
            rows = np.flatnonzero(first > self.first[group])
            drops.append(Drop(group, rows, first[rows]))
            self.first[group] = first
        return tuple(drops)

    def live(self, group: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """Return row, ordinal, id of every live block of a group."""
        ordinals = np.arange(_RECORD_COLUMNS)
        mask = (ordinals >= self.first[group][:, None]) & (ordinals < self.count[group][:, None])
        row, ordinal = np.nonzero(mask)
        return row, ordinal, self.ids[group][row, ordinal]

    def slots(self, step: Step) -> NDArray[np.int64]:
        """Return the slots `[G, T]` of a step's tokens."""
        ids = self.ids[:, step.token_rows, step.positions // BLOCK_SIZE].astype(np.int64)
        return ids * BLOCK_SIZE + step.positions % BLOCK_SIZE


class Decode:
    """256 rows at 8,192 tokens and a few, each computes one token a step; 16 rows cross a block boundary."""

    def __init__(self, groups: tuple[GroupShape, ...]) -> None:
        self.record = Record(groups, np.random.default_rng(0))
        self._computed = (CONTEXT + np.arange(NUM_ROWS) % BLOCK_SIZE).astype(np.int32)
        full = self.record.new_ids(NUM_ROWS, CONTEXT // BLOCK_SIZE)
        self.record.append(np.arange(NUM_ROWS), full)
        inside = np.flatnonzero(self._computed % BLOCK_SIZE)
        self.record.append(inside, self.record.new_ids(len(inside), 1))
        self.record.drop(self._computed)

    def next_step(self) -> Step:
        """Make the next step and record it."""
        computed = self._computed.copy()
        crossing = np.flatnonzero(computed % BLOCK_SIZE == 0)
        ids = self.record.new_ids(len(crossing), 1)
        drops = self.record.drop(computed)
        self.record.append(crossing, ids)
        self._computed += 1
        rows, ones = np.arange(NUM_ROWS, dtype=np.int32), np.ones(NUM_ROWS, dtype=np.int32)
        positions = computed.astype(np.int64)
        return Step(crossing, ids, rows, ones, computed, rows.astype(np.int64), positions, drops)


class Prefill:
    """4 rows of 2,048 tokens enter empty rows."""

    num_rows, num_tokens = 4, 2048

    def __init__(self, groups: tuple[GroupShape, ...]) -> None:
        self.record = Record(groups, np.random.default_rng(0))

    def next_step(self) -> Step:
        """Make the next step, which takes the place of the one before, and record it."""
        rows = np.arange(self.num_rows)
        ids = self.record.new_ids(self.num_rows, self.num_tokens // BLOCK_SIZE)
        self.record.clear(rows)
        self.record.append(rows, ids)
        query_lens = np.full(self.num_rows, self.num_tokens, dtype=np.int32)
        positions = np.tile(np.arange(self.num_tokens), self.num_rows)
        token_rows = np.repeat(rows, self.num_tokens)
        return Step(rows, ids, rows.astype(np.int32), query_lens, np.zeros_like(query_lens), token_rows, positions)


class Admission:
    """16 of 256 rows of 512 blocks finish, tail rows move into their places, 16 rows are admitted."""

    num_rows, num_blocks = 16, CONTEXT // BLOCK_SIZE

    def __init__(self, groups: tuple[GroupShape, ...]) -> None:
        self.record = Record(groups, np.random.default_rng(0))
        self.record.append(np.arange(NUM_ROWS), self.record.new_ids(NUM_ROWS, self.num_blocks))

    def next_step(self) -> Churn:
        """Make the next step and record it."""
        finished = np.sort(self.record.rng.choice(NUM_ROWS, self.num_rows, replace=False))
        admitted = np.arange(NUM_ROWS - self.num_rows, NUM_ROWS)
        holes, sources = finished[finished < admitted[0]], np.setdiff1d(admitted, finished)
        ids = self.record.new_ids(self.num_rows, self.num_blocks)
        self.record.clear(finished)
        self.record.move(sources, holes)
        self.record.append(admitted, ids)
        return Churn(finished, sources, holes, admitted, ids)


class Floor:
    """The least numpy work for the same tables and slots: no validation, no liveness, no dirty tracking.

    It knows the workload: every row of a step gets equally many blocks, a prefill starts at position 0 and fills whole
    blocks, an admitted row is as long as the one it follows. Positions are given, as they are to the peers.
    """

    name = "numpy floor"

    def __init__(self, groups: tuple[GroupShape, ...], max_num_tokens: int) -> None:
        self.num_groups = len(groups)
        self._width = np.array([[group.width] for group in groups])
        sizes = NUM_ROWS * self._width[:, 0]
        starts = np.cumsum(sizes) - sizes
        self._row_base = starts[:, None] + np.arange(NUM_ROWS) * self._width
        self._has_rings = any(group.window is not None for group in groups)
        self._words = np.zeros(sizes.sum(), dtype=np.int32)
        self._mirror = np.zeros_like(self._words)
        self._tables = [self._mirror[a : a + n].reshape(NUM_ROWS, -1) for a, n in zip(starts, sizes, strict=True)]
        if not self._has_rings:
            self._words_3d = self._words.reshape(self.num_groups, NUM_ROWS, -1)
            self._mirror_3d = self._mirror.reshape(self.num_groups, NUM_ROWS, -1)
        self._counts = np.zeros((self.num_groups, NUM_ROWS), dtype=np.int64)
        self._slots = np.full((self.num_groups, max_num_tokens), -1)
        self._staged = np.empty(self.num_groups * NUM_ROWS * 2, dtype=np.int32)
        self._in_block = np.arange(BLOCK_SIZE)

    def fill(self, record: Record) -> None:
        """Take over the rows of a record."""
        for group in range(self.num_groups):
            row, ordinal, ids = record.live(group)
            where = self._row_base[group, row] + ordinal % self._width[group, 0]
            self._words[where] = self._mirror[where] = ids
        self._counts[:] = record.count[: self.num_groups]

    def decode_step(self, step: Step) -> None:
        """Append, stage, apply, map one token a row."""
        rows, num_groups = step.append_rows, self.num_groups
        ordinals = self._counts[:, rows]
        where = (self._row_base[:, rows] + (ordinals % self._width if self._has_rings else ordinals)).reshape(-1)
        what = step.ids[:num_groups].reshape(-1)
        for drop in step.drops:
            if drop.group < num_groups:
                dropped = self._row_base[drop.group, drop.rows] + (drop.first_blocks - 1) % self._width[drop.group]
                where = np.concatenate([where, dropped])
                what = np.concatenate([what, np.zeros(len(dropped), dtype=np.int32)])
        self._words[where] = what
        self._counts[:, rows] += 1
        staged = self._staged[: len(what)]
        staged[:] = what
        self._mirror[where] = staged
        ordinals = step.positions >> 4
        address = self._row_base.take(step.rows, axis=1)
        address += ordinals % self._width if self._has_rings else ordinals
        slots = self._slots[:, : len(ordinals)]
        np.multiply(self._mirror.take(address), BLOCK_SIZE, out=slots, dtype=np.int64)
        slots += step.positions & 15

    def prefill_step(self, step: Step) -> None:
        """Write whole rows, map whole blocks."""
        rows, num_blocks = step.append_rows, step.ids.shape[2]
        self._words_3d[:, rows, :num_blocks] = step.ids
        self._counts[:, rows] = num_blocks
        self._mirror_3d[:, rows, :num_blocks] = step.ids
        starts = np.multiply(step.ids, BLOCK_SIZE, dtype=np.int64)
        np.add(starts[..., None], self._in_block, out=self._slots.reshape(*starts.shape, BLOCK_SIZE))

    def churn_step(self, step: Churn, *, commit: bool) -> None:
        """Move, write whole rows; every row that finished is written over."""
        num_blocks = step.ids.shape[2]
        words, mirror, counts = self._words_3d, self._mirror_3d, self._counts
        words[:, step.holes, :num_blocks] = words[:, step.sources, :num_blocks]
        words[:, step.admitted, :num_blocks] = step.ids
        counts[:, step.holes] = counts[:, step.sources]
        counts[:, step.admitted] = num_blocks
        if commit:
            mirror[:, step.holes, :num_blocks] = words[:, step.holes, :num_blocks]
            mirror[:, step.admitted, :num_blocks] = step.ids

    def clear(self, rows: NDArray[np.int64]) -> None:
        """Empty rows; not timed."""
        self._words_3d[:, rows] = self._mirror_3d[:, rows] = 0
        self._counts[:, rows] = 0

    def settle(self, step: Step | Churn) -> None:
        """Commit what a step without a commit left; not timed."""
        if isinstance(step, Churn):
            self._mirror_3d[:, step.touched] = self._words_3d[:, step.touched]

    def slots(self, step: Step) -> NDArray[np.int64]:
        """Return the slots of the last step."""
        return self._slots[:, : len(step.positions)]

    def device_table(self, group: int) -> NDArray[np.int32]:
        """Return `[NUM_ROWS, width]` as committed."""
        return self._tables[group]
