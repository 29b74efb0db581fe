"""A manager's pool, rows and prefix tree as plain data or as text, for debugging."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from pydantic import TypeAdapter

from hybridkv.cache_metrics import CacheMetrics, VerbCounts, collect_metrics
from hybridkv.index_events import CachedGroup, chains
from hybridkv.prefix_index import PrefixIndex, ResumePoint
from hybridkv.row_lengths import RowState
from hybridkv.sequence_store import SequenceStore
from hybridkv.units import INT64_MAX, format_bytes

DEFAULT_MAX_LINES = 200
_MAX_LISTED = 8  # tokens, runs of blocks on one line
_MAX_INDENT = 24
_MAX_SALT = 60


@dataclass(frozen=True)
class BlocksView:
    """A row's live blocks in one group: ids from `first_ordinal` on."""

    first_ordinal: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class RowView:
    """A row that a sequence has, or that waits for steps in flight.

    Attributes:
        tokens_in_tree: tokens of its whole units in the prefix tree; None if it is not cached (any further).
        next_point: where its next resume point is wanted; None without one.
        groups: its blocks by group.
    """

    row: int
    state: str
    committed: int
    settled: int
    computed: int
    capacity: int
    tokens_in_tree: int | None
    next_point: int | None
    groups: tuple[BlocksView, ...]


@dataclass(frozen=True)
class PointView:
    """A resume point: the groups that keep something there, by id, and the tokens behind the last whole unit."""

    position: int
    groups: tuple[int, ...]
    tail_tokens: tuple[int, ...]


@dataclass(frozen=True)
class RunView:
    """A path of the prefix tree without branches: tokens `[begin, end)`.

    Attributes:
        parent: the run above, its place in `PrefixView.runs`; None where the sequence begins.
        first_tokens: the first of its tokens.
        last_hash: hash of the prefix up to its end.
        rows: rows whose last whole unit lies on it.
        points: resume points behind its units.
    """

    parent: int | None
    begin: int
    end: int
    first_tokens: tuple[int, ...]
    last_hash: int
    rows: tuple[int, ...]
    points: tuple[PointView, ...]


@dataclass(frozen=True)
class PrefixView:
    """What is cached under one salt, with the rows and the points before the first whole unit."""

    salt: str
    rows: tuple[int, ...]
    points: tuple[PointView, ...]
    runs: tuple[RunView, ...]


@dataclass(frozen=True)
class ManagerView:
    """A manager as it is. `unit` is the tokens of a unit of the prefix tree, 0 without one."""

    metrics: CacheMetrics
    block_sizes: tuple[int, ...]
    slab_bytes: int
    steps_in_flight: int
    unit: int
    rows: tuple[RowView, ...]
    prefixes: tuple[PrefixView, ...]

    def to_dict(self) -> dict[str, object]:
        """Return the view as what JSON can hold."""
        document: dict[str, object] = _adapter().dump_python(self, mode="json")
        return document

    def to_text(self, max_lines: int = DEFAULT_MAX_LINES) -> str:
        """Return the view as text: a line a group, a row, a run and a resume point; the last one says what is left out.

        Raises: ValueError for less than one line.
        """
        if max_lines < 1:
            raise ValueError(f"max_lines: got {max_lines}, expected at least 1")
        lines = [*_pool_lines(self), *_row_lines(self.rows), *_prefix_lines(self)]
        if len(lines) > max_lines:
            lines[max_lines - 1 :] = [f"... {len(lines) - max_lines + 1} more lines"]
        return "\n".join(lines)


def view_of(store: SequenceStore, counts: VerbCounts) -> ManagerView:
    """Return a view of a manager's parts; nothing changes."""
    plan, index = store.plan, store.index
    return ManagerView(
        metrics=collect_metrics(store, counts),
        block_sizes=tuple(group.block_size for group in plan.groups),
        slab_bytes=plan.slab_bytes,
        steps_in_flight=store.pool.num_launched - store.pool.num_settled,
        unit=0 if index is None else index.unit,
        rows=tuple(_row(store, row) for row in np.flatnonzero(store.rows.states != RowState.FREE).tolist()),
        prefixes=() if index is None else _prefixes(store, index),
    )


@cache
def _adapter() -> TypeAdapter[ManagerView]:
    return TypeAdapter(ManagerView)


def _row(store: SequenceStore, row: int) -> RowView:
    lengths, recorder, tokens_in_tree, next_point = store.rows, store.recorder, None, None
    if recorder is not None and recorder.tracked[row]:
        assert store.index is not None
        of, node = store.index.trunk.nodes, int(recorder.node[row])
        tokens_in_tree = int(of.depth[node]) * recorder.unit if of.live[node] else None
        next_point = int(recorder.next_point[row])
    return RowView(
        row=row,
        state=RowState(int(lengths.states[row])).name,
        committed=int(lengths.committed[row]),
        settled=int(lengths.settled[row]),
        computed=int(lengths.computed[row]),
        capacity=int(lengths.capacity[row]),
        tokens_in_tree=tokens_in_tree,
        next_point=None if next_point == INT64_MAX else next_point,
        groups=tuple(
            BlocksView(int(store.arrays.first[g, row]), tuple(table.row_block_ids(row).tolist()))
            for g, table in enumerate(store.tables)
        ),
    )


def _prefixes(store: SequenceStore, index: PrefixIndex) -> tuple[PrefixView, ...]:
    of, recorder = index.trunk.nodes, store.recorder
    assert recorder is not None
    rows_at: dict[int, list[int]] = {}
    for row in np.flatnonzero(recorder.tracked).tolist():
        rows_at.setdefault(int(recorder.node[row]), []).append(row)
    points_at: dict[int, list[ResumePoint]] = {}
    for point in sorted(index.points.all(), key=lambda point: point.position):
        points_at.setdefault(point.node, []).append(point)
    groups = CachedGroup.all_of(index.layout)

    def points_of(nodes: Sequence[int]) -> tuple[PointView, ...]:
        return tuple(_point(point, groups) for node in nodes for point in points_at.get(node, ()))

    def rows_of(nodes: Sequence[int]) -> tuple[int, ...]:
        return tuple(row for node in nodes for row in rows_at.get(node, ()))

    runs: dict[int, list[RunView]] = {root: [] for root in index.trunk.roots.values()}
    run_of_last: dict[int, int] = {}
    root_of_last: dict[int, int] = {root: root for root in runs}
    for chain in chains(of):
        nodes, parent = chain.tolist(), int(of.parent[chain[0]])
        root = root_of_last[nodes[-1]] = root_of_last[parent]
        run_of_last[nodes[-1]] = len(runs[root])
        begin = (int(of.depth[nodes[0]]) - 1) * index.unit
        runs[root].append(
            RunView(
                parent=run_of_last.get(parent),
                begin=begin,
                end=begin + len(nodes) * index.unit,
                first_tokens=tuple(of.tokens[chain].reshape(-1)[:_MAX_LISTED].tolist()),
                last_hash=int(of.hash[nodes[-1]]),
                rows=rows_of(nodes),
                points=points_of(nodes),
            )
        )
    return tuple(
        PrefixView(repr(salt), rows_of([root]), points_of([root]), tuple(runs[root]))
        for salt, root in index.trunk.roots.items()
    )


def _point(point: ResumePoint, groups: Sequence[CachedGroup]) -> PointView:
    kept = tuple(group.group_id for group in groups if group.is_kept_at(point))
    return PointView(point.position, kept, tuple(point.contents.tail_tokens.tolist()))


# Text


def _pool_lines(view: ManagerView) -> Iterator[str]:
    pool = view.metrics.pool
    yield (
        f"pool: {pool.usable_slabs} slabs of {format_bytes(view.slab_bytes)}, {pool.free_slabs} without owner, "
        f"{pool.occupancy:.0%} occupied, {view.steps_in_flight} steps in flight"
    )
    for group, size in zip(view.metrics.groups, view.block_sizes, strict=True):
        tokens = "" if group.lifecycle == "state" else f", {size} tokens a block"
        yield (
            f"  group {group.group_id} ({group.lifecycle}{tokens}): {group.slabs} slabs, {group.held} blocks held, "
            f"{group.cached} cached, {group.draining} draining, {group.free} free, "
            f"{group.fragmentation:.0%} fragmented"
        )


def _row_lines(rows: Sequence[RowView]) -> Iterator[str]:
    yield f"rows: {len(rows)}"
    for row in rows:
        parts = [
            f"  row {row.row} {row.state}: {row.committed} committed, {row.settled} settled, {row.computed} computed, "
            f"{row.capacity} reserved"
        ]
        if row.tokens_in_tree is not None:
            parts.append(f"{row.tokens_in_tree} in the tree")
        if row.next_point is not None:
            parts.append(f"next resume point at {row.next_point}")
        parts += [
            f"group {g} from {blocks.first_ordinal}: {_ranges(blocks.block_ids)}"
            for g, blocks in enumerate(row.groups)
            if blocks.block_ids
        ]
        yield "; ".join(parts)


def _prefix_lines(view: ManagerView) -> Iterator[str]:
    pool = view.metrics.pool
    if not view.unit:
        yield "prefixes: not cached"
        return
    yield f"prefixes: {pool.units} units of {view.unit} tokens, {pool.resume_points} resume points"
    for prefix in view.prefixes:
        yield f"  salt {prefix.salt[:_MAX_SALT]}{_rows(prefix.rows)}"
        yield from _point_lines(prefix.points, 4)
        children: dict[int | None, list[int]] = {}
        for number, run in enumerate(prefix.runs):
            children.setdefault(run.parent, []).append(number)
        todo = [(number, 4) for number in reversed(children.get(None, ()))]
        while todo:
            number, indent = todo.pop()
            run = prefix.runs[number]
            num_units = (run.end - run.begin) // view.unit
            yield (
                f"{' ' * indent}[{run.begin}, {run.end}) {num_units} {'units' if num_units > 1 else 'unit'}: "
                f"{_tokens(run.first_tokens, run.end - run.begin)}{_rows(run.rows)}"
            )
            yield from _point_lines(run.points, indent + 2)
            below = min(indent + 2, _MAX_INDENT)
            todo += [(child, below) for child in reversed(children.get(number, ()))]


def _point_lines(points: Sequence[PointView], indent: int) -> Iterator[str]:
    for point in points:
        tail = f", tail {_tokens(point.tail_tokens, len(point.tail_tokens))}" if point.tail_tokens else ""
        yield f"{' ' * indent}resume point at {point.position}: groups {', '.join(map(str, point.groups))}{tail}"


def _rows(rows: Sequence[int]) -> str:
    return f"; rows {', '.join(map(str, rows))}" if rows else ""


def _tokens(tokens: Sequence[int], num_tokens: int) -> str:
    shown = tokens[:_MAX_LISTED]
    return " ".join(map(str, shown)) + (" .." if num_tokens > len(shown) else "")


def _ranges(block_ids: Sequence[int]) -> str:
    """Return ids as runs of numbers, at most so many of them."""
    ids = np.array(block_ids)
    parts = np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1)
    texts = [f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts[:_MAX_LISTED]]
    return " ".join(texts) + (f" .. ({len(ids)} blocks)" if len(parts) > _MAX_LISTED else "")
