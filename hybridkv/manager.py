"""The facade over pool and tables: sequences come, grow, pause, go.

    admit -> row        a sequence gets a row; no block yet
    reserve(rows, n)    blocks for the next n tokens, per row OK / LATER / NEVER
    commit(rows, n)     n tokens are in the cache; blocks no query can see again are freed
    preempt -> resume   all blocks given up, the row kept; resume starts the row over
    finish              row and blocks are free again

Two lengths a row: `num_computed_tokens <= capacity_tokens`, the tokens in the cache and the tokens blocks are
reserved for. State is arrays over rows; a verb over R rows is a few array operations a group. A verb that fails
leaves everything as it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv.block_pool import BlockPool, slab_shortfall
from hybridkv.block_table import BlockTable, make_block_tables
from hybridkv.errors import InvalidRequest, InvariantError, NeverFits, OutOfRows
from hybridkv.plan import CachePlan
from hybridkv.retention import first_needed_token, frees_blocks
from hybridkv.units import RowId, format_bytes, int_array


class RowState(IntEnum):
    """What a row is used for."""

    FREE = 0
    RUNNING = 1
    PREEMPTED = 2


class Verdict(IntEnum):
    """Whether a row's blocks were reserved: yes, not now, or not even with the whole pool to itself."""

    OK = 0
    LATER = 1
    NEVER = 2


@dataclass(frozen=True)
class Reservation:
    """The outcome of `reserve`.

    Shapes:
        verdicts   [num_rows] int8, a `Verdict` per row in the order asked
        shortfall  [num_groups, num_rows] int64, blocks missing for this row and those before it
    """

    verdicts: NDArray[np.int8]
    shortfall: NDArray[np.int64]

    @property
    def num_ok(self) -> int:
        """How many rows, from the first on, got their blocks."""
        return int((self.verdicts == Verdict.OK).sum())


class CacheManager:
    """Rows, blocks and tables of every group of a plan.

    Attributes:
        num_computed_tokens: [max_num_seqs] int64, tokens in the cache.
        capacity_tokens: [max_num_seqs] int64, tokens that blocks are reserved for.
        row_states: [max_num_seqs] int8, a `RowState` per row.
        num_freed_out_of_window: [num_groups] int64, blocks freed because no query could see them again.
        peak_blocks_per_row: [num_groups] int64, the most blocks one row ever held.
    """

    def __init__(self, plan: CachePlan, tables: Sequence[BlockTable] | None = None) -> None:
        self.plan = plan
        self.pool = BlockPool(plan)
        self.tables = list(tables) if tables is not None else make_block_tables(plan)
        if len(self.tables) != len(plan.groups):
            raise ValueError(f"tables: got {len(self.tables)}, expected one for each of {len(plan.groups)} groups")
        num_rows, num_groups = plan.limits.max_num_seqs, len(plan.groups)
        for group, table in zip(plan.groups, self.tables, strict=True):
            got = table.num_rows, table.width, table.block_size, table.mode
            if got != (num_rows, group.table_width, group.block_size, group.mode):
                raise ValueError(f"tables: group {group.group.group_id} got one of another plan: {got}")
        self.row_states = np.zeros(num_rows, dtype=np.int8)
        self.num_computed_tokens = np.zeros(num_rows, dtype=np.int64)
        self.capacity_tokens = np.zeros(num_rows, dtype=np.int64)
        self.num_freed_out_of_window = np.zeros(num_groups, dtype=np.int64)
        self.peak_blocks_per_row = np.zeros(num_groups, dtype=np.int64)
        self.num_preemptions = 0

    def admit(self, num_prompt_tokens: int, max_total_tokens: int | None = None) -> RowId:
        """Give a sequence a row; blocks come with `reserve`.

        Admission is optimistic: `max_total_tokens` (the prompt's length by default) is only checked against what the
        whole pool could hold, not set aside.

        Raises:
            InvalidRequest: a length below 1 or above `max_model_len`.
            NeverFits: the sequence would not fit even alone.
            OutOfRows: every row is taken.
        """
        total = num_prompt_tokens if max_total_tokens is None else max_total_tokens
        if num_prompt_tokens < 1 or total < num_prompt_tokens:
            raise InvalidRequest(
                f"tokens: got a prompt of {num_prompt_tokens} and a total of {total}, expected 1 <= prompt <= total"
            )
        self.check_fits(total)
        free = np.flatnonzero(self.row_states == RowState.FREE)
        if free.size == 0:
            raise OutOfRows(len(self.row_states))
        self.row_states[free[0]] = RowState.RUNNING
        return RowId(int(free[0]))

    @property
    def num_free_rows(self) -> int:
        """Rows that no sequence has."""
        return int((self.row_states == RowState.FREE).sum())

    def check_fits(self, num_tokens: int) -> None:
        """Check that one sequence of `num_tokens` tokens fits when it has the pool to itself.

        Raises: InvalidRequest if it is longer than `max_model_len`, NeverFits if it does not fit.
        """
        limit = self.plan.limits.max_model_len
        if num_tokens > limit:
            raise InvalidRequest(f"tokens: got a sequence of {num_tokens}, expected at most max_model_len={limit}")
        needed = self.plan.slabs_for(num_tokens)
        if needed > self.plan.num_usable_slabs:
            longest = self.plan.longest_sequence()
            in_flight = self.plan.limits.max_in_flight
            blocks = np.array([group.max_blocks(num_tokens, in_flight) for group in self.plan.groups])
            no_slabs = np.zeros_like(blocks)
            missing = slab_shortfall(blocks, no_slabs, self.pool.blocks_per_slab, self.plan.num_usable_slabs)
            short = {group: int(count) for group, count in enumerate(missing) if count}
            raise NeverFits(
                f"memory: a sequence of {num_tokens} tokens needs {format_bytes((needed + 1) * self.plan.slab_bytes)}, "
                f"the arena has {format_bytes(self.plan.arena_bytes)} (short of {short} blocks by group); "
                f"at most {longest} tokens fit",
                short,
            )

    def reserve(self, rows: ArrayLike, num_new_tokens: ArrayLike) -> Reservation:
        """Reserve blocks so that each row can compute `num_new_tokens` more tokens.

        Rows are served in the order given; from the first row that does not fit on, none gets anything.

        Shapes: rows [n] distinct running rows; num_new_tokens [n], from 1 to the limits' `max_in_flight` each
        Raises: ValueError for rows or counts that are not of this form, InvalidRequest for a row that would grow past
            `max_model_len`; nothing changes then.
        """
        row_ids, num_new = self._check_rows(rows, num_new_tokens)
        most = self.plan.limits.max_in_flight
        if (num_new > most).any():
            raise ValueError(
                f"num_new_tokens: got {num_new.max()}, expected at most {most} a row; plan with a larger "
                "max_num_batched_tokens"
            )
        targets = self.num_computed_tokens[row_ids] + num_new
        if (targets > self.plan.limits.max_model_len).any():
            row = row_ids[targets.argmax()]
            raise InvalidRequest(
                f"tokens: row {row} would grow to {targets.max()}, past max_model_len={self.plan.limits.max_model_len}"
            )
        growth = np.stack(
            [
                np.maximum(group.end_ordinal(targets) - table.num_blocks_per_row[row_ids], 0)
                for group, table in zip(self.plan.groups, self.tables, strict=True)
            ]
        )
        cumulative = growth.cumsum(axis=1)
        ok = self.pool.slabs_needed(cumulative) <= self.pool.num_free_slabs
        num_ok = int(ok.sum())
        if num_ok:
            self._lend(row_ids[:num_ok], growth[:, :num_ok])
            self.capacity_tokens[row_ids[:num_ok]] = np.maximum(
                self.capacity_tokens[row_ids[:num_ok]], targets[:num_ok]
            )
        verdicts = np.where(ok, Verdict.OK, Verdict.LATER).astype(np.int8)
        if num_ok == len(row_ids):
            return Reservation(verdicts, np.zeros_like(growth))
        waiting = np.arange(num_ok, len(row_ids))
        verdicts[waiting[~self._fit_alone(row_ids[waiting], growth[:, waiting])]] = Verdict.NEVER
        left = cumulative - cumulative[:, num_ok - 1 : num_ok] if num_ok else cumulative
        return Reservation(verdicts, np.where(ok, 0, self.pool.shortfall(np.maximum(left, 0))))

    def commit(self, rows: ArrayLike, num_new_tokens: ArrayLike) -> None:
        """Count tokens whose keys, values or states are now in the cache; free what no later query can see.

        Shapes: rows [n] distinct running rows; num_new_tokens [n]
        Raises: ValueError if a row would pass its capacity; nothing changes then.
        """
        row_ids, num_new = self._check_rows(rows, num_new_tokens)
        computed = self.num_computed_tokens[row_ids] + num_new
        if (computed > self.capacity_tokens[row_ids]).any():
            row = row_ids[(computed > self.capacity_tokens[row_ids]).argmax()]
            raise ValueError(
                f"row {row}: would have more tokens computed than its capacity of "
                f"{self.capacity_tokens[row]}; reserve first"
            )
        self.num_computed_tokens[row_ids] = computed
        for group, table in zip(self.plan.groups, self.tables, strict=True):
            if frees_blocks(group.group.lifecycle):
                first = first_needed_token(group.group.lifecycle, computed) // group.block_size
                freed = self.pool.free(group.group.group_id, table.drop_rows_head(row_ids, first))
                self.num_freed_out_of_window[group.group.group_id] += freed

    def preempt(self, row: int) -> None:
        """Give up all blocks of a running row; the row stays taken until `resume` or `finish`.

        Raises: ValueError if the row is not running.
        """
        self._check_state(row, RowState.RUNNING)
        self._release(row)
        self.row_states[row] = RowState.PREEMPTED
        self.num_preemptions += 1

    def resume(self, row: int, num_new_tokens: int) -> Verdict:
        """Start a preempted row over with blocks for its first `num_new_tokens` tokens.

        The row is replaced: it computes all its tokens again. Unless the verdict is OK it stays preempted.

        Raises: ValueError if the row is not preempted, and as `reserve`; the row stays preempted then.
        """
        self._check_state(row, RowState.PREEMPTED)
        self.row_states[row] = RowState.RUNNING
        verdict = Verdict.LATER
        try:
            verdict = Verdict(self.reserve([row], [num_new_tokens]).verdicts[0])
        finally:
            if verdict is not Verdict.OK:
                self.row_states[row] = RowState.PREEMPTED
        return verdict

    def finish(self, row: int) -> None:
        """Free a row and its blocks.

        Raises: ValueError if the row is free already.
        """
        if not 0 <= row < len(self.row_states) or self.row_states[row] == RowState.FREE:
            raise ValueError(f"row: got {row}, which holds no sequence")
        self._release(row)
        self.row_states[row] = RowState.FREE

    def move_row(self, source: int, target: int) -> None:
        """Move a sequence to a free row, as engines do that keep their rows dense; the source row is free afterwards.

        Raises: ValueError if the source holds no sequence or the target holds one.
        """
        for name, row, wants_free in (("source", source, False), ("target", target, True)):
            if not 0 <= row < len(self.row_states) or (self.row_states[row] == RowState.FREE) != wants_free:
                raise ValueError(
                    f"{name}: got row {row}, expected one {'without' if wants_free else 'with'} a sequence"
                )
        for table in self.tables:
            table.move_row(source, target)
        for values in (self.row_states, self.num_computed_tokens, self.capacity_tokens):
            values[target], values[source] = values[source], 0

    def check(self) -> None:
        """Check that pool, tables and rows agree.

        Raises: InvariantError if they do not.
        """
        self.pool.check()
        for group, table in zip(self.plan.groups, self.tables, strict=True):
            group_id = group.group.group_id
            live = table.live_mask()
            if table.entries[~live].any():
                raise InvariantError(f"group {group_id}: a column that is not live does not read null")
            references = np.bincount(table.entries[live], minlength=group.num_blocks)
            if not np.array_equal(references, self.pool.ref_counts[group_id]):
                raise InvariantError(f"group {group_id}: rows and reference counts disagree")
            stale = self.row_states != RowState.RUNNING
            if table.num_blocks_per_row[stale].any():
                raise InvariantError(f"group {group_id}: a row that does not run holds blocks")
            reserved = group.end_ordinal(self.capacity_tokens)
            if (reserved != table.num_blocks_per_row)[self.capacity_tokens > 0].any():
                raise InvariantError(f"group {group_id}: a row's blocks do not match its capacity")

    def _lend(self, rows: NDArray[np.int64], growth: NDArray[np.int64]) -> None:
        lent = self.pool.allocate(growth.sum(axis=1))
        for group_id, (table, block_ids) in enumerate(zip(self.tables, lent, strict=True)):
            table.append_rows(rows, growth[group_id], block_ids)
            held = table.num_blocks_per_row[rows] - table.first_block_per_row[rows]
            self.peak_blocks_per_row[group_id] = max(self.peak_blocks_per_row[group_id], held.max())

    def _fit_alone(self, rows: NDArray[np.int64], growth: NDArray[np.int64]) -> NDArray[np.bool_]:
        held = np.stack([table.num_blocks_per_row[rows] - table.first_block_per_row[rows] for table in self.tables])
        slabs = -(-(held + growth) // self.pool.blocks_per_slab[:, None])
        fits: NDArray[np.bool_] = slabs.sum(axis=0) <= self.plan.num_usable_slabs
        return fits

    def _release(self, row: int) -> None:
        for group_id, table in enumerate(self.tables):
            self.pool.free(group_id, table.clear_row(row))
        self.num_computed_tokens[row] = 0
        self.capacity_tokens[row] = 0

    def _check_rows(self, rows: ArrayLike, counts: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        row_ids, num_new = int_array("rows", rows), int_array("num_new_tokens", counts)
        if row_ids.shape != num_new.shape:
            raise ValueError(
                f"rows and counts: got shapes {row_ids.shape} and {num_new.shape}, expected equal, flat ones"
            )
        if row_ids.size and (row_ids.min() < 0 or row_ids.max() >= len(self.row_states)):
            raise ValueError(f"rows: got {row_ids.min()}..{row_ids.max()}, expected 0..{len(self.row_states) - 1}")
        if np.unique(row_ids).size != row_ids.size:
            raise ValueError(f"rows: got {row_ids.tolist()}, expected distinct rows")
        idle = row_ids[self.row_states[row_ids] != RowState.RUNNING]
        if idle.size:
            raise ValueError(f"rows: row {idle[0]} is {RowState(self.row_states[idle[0]]).name}, expected RUNNING")
        if (num_new < 1).any():
            raise ValueError(f"num_new_tokens: got {num_new.min()}, expected at least 1 a row")
        return row_ids, num_new

    def _check_state(self, row: int, expected: RowState) -> None:
        if not 0 <= row < len(self.row_states):
            raise ValueError(f"row: got {row}, expected 0..{len(self.row_states) - 1}")
        if self.row_states[row] != expected:
            raise ValueError(f"row {row} is {RowState(self.row_states[row]).name}, expected {expected.name}")
