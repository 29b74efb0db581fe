"""What running rows add to the prefix index: whole units as they fill, resume points where the policy wants them.

    tokens   | unit 0 | unit 1 | unit 2 ..|            unit: the index's step, 4 tokens here
             0        4        8      11
                      node[row]  pending[row] = 3 tokens, committed = 11

A row is tracked from its admission with token ids on, as long as every commit brings its ids.
"""

import numpy as np
from numpy.typing import NDArray

from hybridkv.block_lender import BlockLender
from hybridkv.copy_list import CopyList
from hybridkv.group_arrays import GroupArrays
from hybridkv.prefix_index import Match, PrefixIndex, ResumePoint
from hybridkv.resume_builder import Tail
from hybridkv.resume_policy import ResumePolicy
from hybridkv.table_arrays import TableArrays
from hybridkv.units import INT64_MAX

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
_NO_POSITION = INT64_MAX
_BATCH = 256  # units that wait for the index at most


class PrefixRecorder:
    """Rows' places in the prefix index.

    Attributes:
        num_skipped_points: resume points that found no room for their states, which never push a needed block out.
    Shapes:
        tracked      [num_rows] bool, whether the ids of all committed tokens are known
        node         [num_rows] int32, the node of the last whole unit, or the root
        next_point   [num_rows] int64, where the next resume point is wanted
    """

    def __init__(
        self,
        index: PrefixIndex,
        policy: ResumePolicy,
        groups: GroupArrays,
        arrays: TableArrays,
        lender: BlockLender,
        copies: CopyList,
    ) -> None:
        self.index, self.policy = index, policy
        self._groups, self._arrays, self._lender, self._copies = groups, arrays, lender, copies
        num_rows, self.unit = arrays.num_rows, index.unit
        self.tracked = np.zeros(num_rows, dtype=np.bool_)
        self.node = np.zeros(num_rows, dtype=np.int32)
        self.next_point = np.full(num_rows, _NO_POSITION, dtype=np.int64)
        self.num_skipped_points = 0
        self._state_need = np.zeros(arrays.num_groups, dtype=np.int64)
        self._state_need[groups.states] = groups.fixed[groups.states, 0]
        self._hash = np.zeros(num_rows, dtype=np.uint64)
        self._pending = np.zeros((num_rows, self.unit), dtype=np.int32)
        self._prompt_end = np.zeros(num_rows, dtype=np.int64)
        self._shared = np.zeros(num_rows, dtype=np.int64)
        self._has_points = bool(index.layout.windowed or index.layout.states)
        self._filled: list[tuple[Int64, Int64, Int32]] = []
        self._is_filled = np.zeros(num_rows, dtype=np.bool_)
        self._num_filled = 0
        self._keys: dict[int, Int32] = {}
        self._of_rows: tuple[NDArray[np.generic], ...] = (
            self.tracked,
            self.node,
            self.next_point,
            self._hash,
            self._pending,
            self._prompt_end,
            self._shared,
        )

    # Rows

    def start(self, row: int, match: Match, num_tokens: int, tokens: Int32) -> None:
        """Track a row that begins with the first `num_tokens` of its prompt's tokens in the cache."""
        num_units = num_tokens // self.unit
        self.tracked[row] = True
        self.node[row] = match.node_at(num_units)
        self._hash[row] = match.hash_state_at(num_units)
        self._pending[row, : num_tokens % self.unit] = tokens[num_units * self.unit : num_tokens]
        self._prompt_end[row], self._shared[row] = len(tokens), match.num_shared_tokens
        if match.keys.any():
            self._keys[row] = match.keys
        self._plan_point(row, num_tokens)
        self.index.pin(self.node[row : row + 1])

    def stop(self, row: int) -> None:
        """Forget a row."""
        if self._is_filled[row]:
            self.flush()
        if self.tracked[row]:
            self.index.unpin(self.node[row : row + 1])
        self.tracked[row] = False
        self.next_point[row] = _NO_POSITION
        self._keys.pop(row, None)

    def assign(self, targets: Int64, sources: Int64) -> None:
        """Let row `targets[i]` go on where row `sources[i]` is; both may name the same rows."""
        self.flush()
        old = self.node[targets][self.tracked[targets]]
        keys = {t: self._keys[s] for t, s in zip(targets.tolist(), sources.tolist(), strict=True) if s in self._keys}
        self.index.pin(self.node[sources][self.tracked[sources]])
        self.index.unpin(old)
        for values in self._of_rows:
            values[targets] = values[sources]
        for target in targets.tolist():
            self._keys.pop(target, None)
        self._keys |= keys

    # Commits

    def record(self, rows: Int64, starts: Int64, counts: Int64, tokens: Int32 | None) -> None:
        """Take note of `counts[i]` more committed tokens of each row, those from `starts[i]` on.

        Shapes: rows, starts, counts [n]; tokens [sum(counts)] int32, row after row; None if nobody knows them
        """
        tracked = self.tracked[rows]
        if tokens is None:
            for row in rows[tracked].tolist():
                self.stop(row)
            return
        if np.count_nonzero(tracked) < len(rows):
            tokens = tokens[tracked.repeat(counts)]
            rows, starts, counts = rows[tracked], starts[tracked], counts[tracked]
        if not len(rows):
            return
        if len(tokens) == len(rows):  # a decode
            self._record_short(rows, starts, counts, tokens)
            self._reach_due(rows, starts + 1)
            return
        is_long = counts > self.unit
        if is_long.any():
            self._record_long(rows, starts, counts, tokens, is_long)
            tokens = tokens[~is_long.repeat(counts)]
            rows, starts, counts = rows[~is_long], starts[~is_long], counts[~is_long]
        if len(rows):
            self._record_short(rows, starts, counts, tokens)
            self._reach_due(rows, starts + counts)

    def retire(self, row: int, num_tokens: int) -> ResumePoint | None:
        """Keep the end of a row that gives its blocks up right after, so that a sequence can go on from it."""
        self.flush()
        if not self.tracked[row] or not self.policy.finish or not num_tokens:
            return None
        layout, tail = self.index.layout, num_tokens % self.unit
        if not tail and not (layout.windowed or layout.states):
            return None
        tail_blocks = [
            self._held_blocks(group, row, (num_tokens - tail) // place.block_size, -(-num_tokens // place.block_size))
            for group, place in zip(layout.token_groups, layout.places, strict=True)
        ]
        return self.index.add_resume(
            int(self.node[row]),
            num_tokens,
            window_blocks=self._window_blocks(row, num_tokens),
            states=self._states(row),
            tail=Tail(self._pending[row, :tail].copy(), tail_blocks, self._key(row, num_tokens // self.unit))
            if tail
            else None,
        )

    def _record_short(self, rows: Int64, starts: Int64, counts: Int64, tokens: Int32) -> None:
        """Record at most one unit's worth of tokens a row."""
        unit = self.unit
        if len(tokens) == len(rows):  # a decode: one token a row
            self._pending[rows, starts % unit] = tokens
            filled = (starts + 1) % unit == 0
            if np.count_nonzero(filled):
                self._fill_later(rows[filled], starts[filled] // unit)
            return
        ends = counts.cumsum()
        positions = np.arange(len(tokens)) + (starts - ends + counts).repeat(counts)
        of_row, first_unit = rows.repeat(counts), starts // unit
        is_early = positions // unit == first_unit.repeat(counts)
        self._pending[of_row[is_early], positions[is_early] % unit] = tokens[is_early]
        filled = (starts + counts) // unit > first_unit
        if filled.any():
            self._fill_later(rows[filled], first_unit[filled])
        late = ~is_early
        self._pending[of_row[late], positions[late] % unit] = tokens[late]

    def _fill_later(self, rows: Int64, units: Int64) -> None:
        """Note one whole unit of each row; the index gets many at once, for a fraction of the cost of one by one."""
        if np.count_nonzero(self._is_filled[rows]):
            self.flush()
        kept = self.tracked[rows]  # a row whose last unit found no place is no longer
        if np.count_nonzero(kept) < len(rows):
            rows, units = rows[kept], units[kept]
        self._is_filled[rows] = True
        self._filled.append((rows, units, self._pending[rows]))
        self._num_filled += len(rows)
        if self._num_filled >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Add the units that were filled since the last time; before anyone looks up or a row's blocks change hands."""
        if not self._filled:
            return
        rows, units, tokens = (np.concatenate(parts) for parts in zip(*self._filled, strict=True))
        self._filled.clear()
        self._num_filled = 0
        self._is_filled[rows] = False
        self._fill(rows, units, tokens)

    def _fill(self, rows: Int64, units: Int64, tokens: Int32) -> None:
        """Add one whole unit of each row."""
        parents = self.node[rows]
        keys = np.zeros(len(rows), dtype=np.int32)
        if self._keys:
            for i, (row, unit) in enumerate(zip(rows.tolist(), units.tolist(), strict=True)):
                keys[i] = self._key(row, unit)
        hashes, self._hash[rows] = self.index.hasher.many(self._hash[rows], tokens, keys)
        nodes = self.index.add_leaves(parents, hashes, tokens, keys, self._unit_blocks(rows, units))
        self._step_on(rows, parents, nodes)

    def _record_long(
        self, rows: Int64, starts: Int64, counts: Int64, tokens: Int32, is_long: NDArray[np.bool_]
    ) -> None:
        ends = counts.cumsum()
        for i in np.flatnonzero(is_long).tolist():
            end, count = int(ends[i]), int(counts[i])
            self._record_chunk(int(rows[i]), int(starts[i]), tokens[end - count : end])

    def _record_chunk(self, row: int, start: int, tokens: Int32) -> None:
        """Record a prefill chunk of one row."""
        if self._is_filled[row]:
            self.flush()
        if not self.tracked[row]:
            return
        unit, first = self.unit, start // self.unit
        known = np.concatenate([self._pending[row, : start % unit], tokens])
        num_units = len(known) // unit
        units = np.arange(first, first + num_units)
        keys = np.zeros(num_units, dtype=np.int32)
        if row in self._keys:
            of_row = self._keys[row][first : first + num_units]
            keys[: len(of_row)] = of_row
        of_units = known[: num_units * unit].reshape(num_units, unit)
        hashes, state = self.index.hasher.chain(self._hash[row], of_units, keys)
        self._hash[row] = state
        parent = self.node[row : row + 1].copy()
        blocks = self._unit_blocks(np.full(num_units, row), units)
        nodes = self.index.add_chain(int(parent[0]), hashes, of_units, keys, blocks)
        rest = known[num_units * unit :]
        self._pending[row, : len(rest)] = rest
        self._step_on(np.array([row]), parent, nodes[-1:])
        if self.tracked[row] and start + len(tokens) >= self.next_point[row]:
            self._reach(row, start + len(tokens))

    def _step_on(self, rows: Int64, parents: Int32, nodes: Int32) -> None:
        """Move rows' pins to new nodes; a row whose unit could not be cached is no longer tracked."""
        if not nodes.all():
            for row in rows[nodes == 0].tolist():
                self.stop(row)
            kept = nodes != 0
            rows, parents, nodes = rows[kept], parents[kept], nodes[kept]
        self.index.move_pins(parents, nodes)
        self.node[rows] = nodes

    # Resume points

    def _reach_due(self, rows: Int64, ends: Int64) -> None:
        """Keep the resume points that rows have come to with their committed `ends`."""
        if not self._has_points:
            return
        due = ends >= self.next_point[rows]
        if np.count_nonzero(due):
            self.flush()
            for row, end in zip(rows[due].tolist(), ends[due].tolist(), strict=True):
                self._reach(row, end)

    def _reach(self, row: int, end: int) -> None:
        """Keep a resume point at each wanted position up to the committed `end`."""
        while (position := int(self.next_point[row])) <= end:
            if position == end or not self._groups.states:
                self._keep(row, position, end)
            self._plan_point(row, position)

    def _keep(self, row: int, position: int, end: int) -> None:
        """Keep a point at a whole unit, states by copy: the row goes on to write its own."""
        node = int(self.node[row])
        for _ in range(end // self.unit - position // self.unit):
            node = int(self.index.parent[node])
        own = self._states(row)
        if not len(own):
            self.index.add_resume(node, position, window_blocks=self._window_blocks(row, position))
            return
        states = self._lender.take_spare(self._state_need)
        if states is None:
            self.num_skipped_points += 1
            return
        point = self.index.add_resume(node, position, window_blocks=self._window_blocks(row, position), states=states)
        if point is not None:
            self._copies.add(own, states)
        self._lender.pool.release(states)

    def _states(self, row: int) -> Int64:
        """Return the flat blocks of a row's states."""
        parts = [self._held_blocks(g, row, 0, int(self._groups.fixed[g, 0])) for g in self._groups.states]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _window_blocks(self, row: int, position: int) -> list[Int64]:
        """Return by windowed group the flat blocks of whole units that a query at `position` or later sees."""
        blocks = []
        for place in self.index.layout.windows:
            first_unit = place.first_ordinal(position) // place.per_unit
            end = position // self.unit * place.per_unit
            blocks.append(self._held_blocks(place.group_id, row, first_unit * place.per_unit, end))
        return blocks

    def _plan_point(self, row: int, position: int) -> None:
        """Decide where the next resume point after `position` is wanted."""
        if not self._has_points:
            return
        wanted = self.policy.next_position(position, int(self._prompt_end[row]), int(self._shared[row]), self.unit)
        self.next_point[row] = _NO_POSITION if wanted is None else wanted

    def _key(self, row: int, unit: int) -> int:
        keys = self._keys.get(row)
        return 0 if keys is None or unit >= len(keys) else int(keys[unit])

    def _unit_blocks(self, rows: Int64, units: Int64) -> Int64:
        """Return the flat blocks `[n, columns]` of the full-attention groups for one unit of each row."""
        parts = [np.empty((len(rows), 0), dtype=np.int64)]
        for group in self.index.layout.full:
            per_unit = self.unit // int(self._groups.block_sizes[group, 0])
            ordinals = units[:, None] * per_unit + np.arange(per_unit)
            entries = self._entries(group, rows[:, None], ordinals)
            parts.append(entries)
        return np.concatenate(parts, axis=1)

    def _held_blocks(self, group: int, row: int, begin: int, end: int) -> Int64:
        """Return the flat blocks of a row's ordinals `[begin, end)`, 0 for those that it no longer holds."""
        ordinals = np.arange(begin, max(begin, end))
        held = ordinals >= self._arrays.first[group, row]
        return np.where(held, self._entries(group, np.array(row), ordinals), 0)

    def _entries(self, group: int, rows: Int64, ordinals: Int64) -> Int64:
        """Return flat blocks of ordinals of rows, which must be live."""
        arrays = self._arrays
        addresses = arrays.offsets[group] + rows * arrays.strides[group] + ordinals % arrays.widths[group]
        blocks: Int64 = arrays.words[addresses] + self._lender.pool.offsets[group]
        return blocks
