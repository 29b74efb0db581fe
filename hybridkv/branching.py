"""Sequences that share a past: forks, and beams that change places.

parent   | full | full | full | part |          full blocks are shared, the part and the states are copied
child    | same | same | same | copy |
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import InvalidRequest
from hybridkv.sequence_store import SequenceStore

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class _Content:
    """What one row holds.

    Attributes:
        firsts: [num_groups] int64, first live ordinals.
        blocks: flat blocks by group, first ordinal first.
        shared: by group those that are never written again.
        copied: by group those that are, as far as they have content; behind them there are only reserved ones.
    """

    firsts: Int64
    blocks: list[Int64]
    shared: list[Int64]
    copied: list[Int64]


def check_can_branch(store: SequenceStore, rows: Int64) -> None:
    """Raise InvalidRequest unless all computed tokens of rows are final."""
    behind = store.rows.committed[rows] < store.rows.computed[rows]
    if behind.any():
        row = int(rows[behind][0])
        raise InvalidRequest(
            f"row {row}: has {store.rows.computed[row]} tokens computed and {store.rows.committed[row]} committed, "
            "expected as many; settle and commit its steps, or roll them back, first"
        )


def branch(store: SequenceStore, targets: Int64, sources: Int64) -> None:
    """Let row `targets[i]` go on where another row, `sources[i]`, is; what targets held is given up.

    Of a source that is a target itself, one target inherits the blocks; all others share the whole ones and get copies
    of the rest.

    Raises: OutOfBlocks if the copies do not fit; nothing changes then.
    """
    if store.recorder is not None:
        store.recorder.flush()
    contents = {source: _content(store, source) for source in {*sources.tolist()}}
    heirs = _heirs(targets.tolist(), sources.tolist())
    pairs = list(zip(targets.tolist(), sources.tolist(), strict=True))
    forks = [source for target, source in pairs if heirs.get(source) != target]
    copied = [[contents[source].copied[g] for source in forks] for g in range(store.num_groups)]
    need = np.array([sum(map(len, of_group)) for of_group in copied], dtype=np.int64)
    taken = store.lender.take(need)
    new = {g: iter(_split(part, copied[g])) for g, part in enumerate(np.split(taken, need.cumsum()[:-1]))}
    store.pool.hold(_joined([block for source in forks for block in contents[source].shared]))
    store.copies.add(_joined([block for of_group in copied for block in of_group]), taken)
    for target in targets.tolist():
        if target not in heirs:
            store.release(target)
        else:
            store.operations.clear_rows([target])
    for target, source in pairs:
        content = contents[source]
        blocks = content.blocks
        if heirs.get(source) != target:
            blocks = [np.concatenate([content.shared[g], next(new[g])]) for g in range(store.num_groups)]
        store.place(target, content.firsts, blocks)
    _assign(
        store, targets, sources, np.array([heirs.get(source) == target for target, source in pairs], dtype=np.bool_)
    )


def _content(store: SequenceStore, row: int) -> _Content:
    computed, groups = int(store.rows.computed[row]), store.groups
    blocks = [store.row_blocks(group, row) for group in range(store.num_groups)]
    firsts = store.arrays.first[:, row].astype(np.int64)
    shared, copied = [], []
    for group, of_group in enumerate(blocks):
        size = int(groups.block_sizes[group, 0])
        num_whole = max(store.num_whole_blocks(group, computed) - int(firsts[group]), 0)
        num_used = -(-computed // size) - int(firsts[group])
        if group in groups.cross:  # written once, before anything that follows
            num_whole = num_used = len(of_group)
        elif group in groups.states:
            num_whole, num_used = 0, len(of_group) if computed else 0
        shared.append(of_group[:num_whole])
        copied.append(of_group[num_whole:num_used])
    return _Content(firsts, blocks, shared, copied)


def _heirs(targets: list[int], sources: list[int]) -> dict[int, int]:
    """Return which target inherits the blocks of each source that is a target: the first."""
    heirs: dict[int, int] = {}
    for target, source in zip(targets, sources, strict=True):
        if source in targets:
            heirs.setdefault(source, target)
    return heirs


def _assign(store: SequenceStore, targets: Int64, sources: Int64, inherits: NDArray[np.bool_]) -> None:
    """Move on with lengths and places in the index; a fork has blocks for its computed tokens only."""
    rows = store.rows
    rows.assign(targets, sources)
    forks = targets[~inherits]
    rows.capacity[forks] = rows.computed[forks]
    if store.recorder is not None:
        store.recorder.assign(targets, sources)


def _split(flat: Int64, like: list[Int64]) -> list[Int64]:
    return np.split(flat, np.cumsum([len(part) for part in like])[:-1]) if like else []


def _joined(parts: list[Int64]) -> Int64:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
