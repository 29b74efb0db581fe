"""Everything a manager's verbs share: rows, their blocks, where new ones come from, what is asked of the engine."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.block_lender import BlockLender
from hybridkv.block_pool import BlockPool
from hybridkv.block_table import BlockTable, join_tables, make_block_tables
from hybridkv.copy_list import CopyList
from hybridkv.errors import InvariantError, OutOfRows
from hybridkv.group_arrays import GroupArrays
from hybridkv.plan import CachePlan
from hybridkv.prefix_index import PrefixIndex
from hybridkv.prefix_recorder import PrefixRecorder
from hybridkv.resume_policy import ResumePolicy
from hybridkv.row_lengths import RowLengths, RowState
from hybridkv.row_operations import RowOperations

Int64 = NDArray[np.int64]


class SequenceStore:
    """Rows and blocks of every group of a plan.

    Attributes:
        rows: what each row is used for and how far it has come.
        scratch: [num_rows, num_state_blocks] int64, flat blocks of a second set of states a row; 0 without one.
        watermark_blocks: [num_groups] int64, blocks that admissions leave to running rows.
        num_freed_out_of_window: [num_groups] int64, blocks freed because no query could see them again.
    """

    def __init__(
        self,
        plan: CachePlan,
        tables: Sequence[BlockTable] | None,
        index: PrefixIndex | None,
        policy: ResumePolicy,
        host_pool: BlockPool | None,
        pool: BlockPool,
    ) -> None:
        self.plan, self.pool, self.host_pool, self.index = plan, pool, host_pool, index
        self.tables = list(tables) if tables is not None else make_block_tables(plan)
        _check_tables(plan, self.tables)
        self.arrays = join_tables(self.tables)
        self.operations = RowOperations(self.tables, self.arrays)
        self.groups = GroupArrays(plan)
        self.rows = RowLengths(plan.limits.max_num_seqs)
        self.lender = BlockLender(pool, index)
        self.copies = CopyList(pool, host_pool)
        self.recorder = (
            None if index is None else PrefixRecorder(index, policy, self.groups, self.arrays, self.lender, self.copies)
        )
        self.num_freed_out_of_window = np.zeros(len(plan.groups), dtype=np.int64)
        self._peaks = np.zeros(len(plan.groups), dtype=np.int64)
        self.watermark_blocks = np.zeros(len(plan.groups), dtype=np.int64)
        self.scratch = np.zeros((len(self.rows), int(self.groups.fixed[self.groups.states].sum())), dtype=np.int64)
        self._draining: list[tuple[int, int]] = []

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.plan.groups)

    def flat(self, ids: NDArray[np.int32], counts: Int64) -> Int64:
        """Return ids `[sum(counts)]`, `counts` [num_groups] of each group, as flat blocks."""
        blocks: Int64 = ids + self.pool.offsets.repeat(counts)
        return blocks

    def ids(self, flat: Int64, counts: Int64) -> NDArray[np.int32]:
        """Return flat blocks, `counts` [num_groups] of each group, as ids."""
        return (flat - self.pool.offsets.repeat(counts)).astype(np.int32)

    def row_blocks(self, group: int, row: int) -> Int64:
        """Return a row's live flat blocks in a group, first ordinal first."""
        blocks: Int64 = self.tables[group].row_block_ids(row) + self.pool.offsets[group]
        return blocks

    def num_whole_blocks(self, group: int, num_tokens: int) -> int:
        """Return how many blocks of a token group sequences may share: those in whole units of the index."""
        size = int(self.groups.block_sizes[group, 0])
        unit = size if self.index is None else self.index.unit
        return num_tokens // unit * unit // size

    def take_rows(self, num_rows: int) -> Int64:
        """Return free rows, lowest first; they stay free until they start.

        Raises: OutOfRows if there are too few.
        """
        free = self.rows.free_rows()
        if len(free) < num_rows:
            raise OutOfRows(len(self.rows))
        return free[:num_rows]

    @property
    def peak_blocks_per_row(self) -> Int64:
        """[num_groups] int64, the most blocks one row ever held."""
        self.note_peaks(np.arange(len(self.rows)))
        return self._peaks

    def note_peaks(self, rows: Int64) -> None:
        """Take note of what rows hold, before they give some of it up."""
        held = (self.arrays.count[:, rows] - self.arrays.first[:, rows]).max(axis=1, initial=0)
        np.maximum(self._peaks, held, out=self._peaks)

    def place(self, row: int, firsts: Int64, blocks: Sequence[Int64]) -> None:
        """Write an empty row: group g's flat blocks are the ordinals from `firsts[g]` on."""
        counts = np.array([len(of_group) for of_group in blocks], dtype=np.int64)
        pairs = np.arange(self.num_groups) * len(self.rows) + row
        self.arrays.set_rows(pairs, firsts, counts, self.ids(np.concatenate(blocks), counts))

    def drop_out_of_window(self, rows: Int64, num_tokens: Int64) -> None:
        """Release blocks that no query after `num_tokens[i]` tokens sees."""
        for group in self.groups.windowed:
            first = self.groups.first_blocks(group, num_tokens)
            passed = first > self.arrays.first[group, rows]
            if np.count_nonzero(passed):
                self.note_peaks(rows[passed])
                ids = self.tables[group].drop_rows_head(rows[passed], first[passed])
                self.pool.release(ids + self.pool.offsets[group])
                self.num_freed_out_of_window[group] += len(ids)

    def release(self, row: int, *, is_tracked: bool = False) -> None:
        """Give up a row's blocks; unless it is to come back as it was, the recorder forgets it."""
        if self.recorder is not None:
            self.recorder.flush()
            if not is_tracked:
                self.recorder.stop(row)
        counts = (self.arrays.count[:, row] - self.arrays.first[:, row]).astype(np.int64)
        np.maximum(self._peaks, counts, out=self._peaks)
        ids = self.operations.clear_rows([row])
        self.pool.release(self.flat(ids, counts))

    def end(self, row: int) -> None:
        """Free a row; it can be given away again once steps in flight have ended."""
        in_flight = self.pool.num_launched > self.pool.num_settled
        self.rows.end(row, RowState.DRAINING if in_flight else RowState.FREE)
        if in_flight:
            self._draining.append((self.pool.num_launched, row))

    def free_drained_rows(self) -> None:
        """Free the rows whose last step has ended."""
        settled = self.pool.num_settled
        for _, row in (entry for entry in self._draining if entry[0] <= settled):
            self.rows.states[row] = RowState.FREE
        self._draining = [entry for entry in self._draining if entry[0] > settled]

    def move(self, source: int, target: int) -> None:
        """Move a row to a free one."""
        if self.recorder is not None:
            self.recorder.flush()
        self.operations.move_row(source, target)
        state = self.rows.states[source]
        self.rows.assign(np.array([target]), np.array([source]))
        self.rows.states[target] = state
        self.rows.end(source, RowState.FREE)
        if self.recorder is not None:
            self.recorder.assign(np.array([target]), np.array([source]))
            self.recorder.stop(source)

    def held_beside_rows(self) -> Int64:
        """Return the flat blocks that checkpoints and pending copies hold, one entry for each time."""
        return np.concatenate([self.scratch[self.scratch > 0], self.copies.held()])

    def check(self) -> None:
        """Check that pool, tables, rows and prefix index agree.

        Raises: InvariantError if they do not.
        """
        self.pool.check()
        if self.index is not None:
            self.index.check()
        references = np.zeros_like(self.pool.holders)
        for group, table in enumerate(self.tables):
            live = table.live_mask()
            if table.entries[~live].any():
                raise InvariantError(f"group {group}: a column that is not live does not read null")
            np.add.at(references, table.entries[live] + self.pool.offsets[group], 1)
            idle = self.rows.states != RowState.RUNNING
            if table.num_blocks_per_row[idle].any():
                raise InvariantError(f"group {group}: a row that does not run holds blocks")
            reserved = self.groups.ends(self.rows.capacity)[group]
            if (reserved != table.num_blocks_per_row)[self.rows.capacity > 0].any():
                raise InvariantError(f"group {group}: a row's blocks do not match its capacity")
        np.add.at(references, self.held_beside_rows(), 1)
        wrong = np.flatnonzero(references != self.pool.holders)
        if wrong.size:
            group = int(np.searchsorted(self.pool.offsets, wrong[0], side="right")) - 1
            raise InvariantError(
                f"group {group} block {wrong[0] - self.pool.offsets[group]}: rows and pending copies hold it "
                f"{references[wrong[0]]} times, the pool counts {self.pool.holders[wrong[0]]}"
            )
        if not (
            (self.rows.committed <= self.rows.settled)
            & (self.rows.settled <= self.rows.computed)
            & (self.rows.computed <= self.rows.capacity)
        ).all():
            raise InvariantError("a row has more tokens committed than settled, computed or reserved")


def _check_tables(plan: CachePlan, tables: Sequence[BlockTable]) -> None:
    if len(tables) != len(plan.groups):
        raise ValueError(f"tables: got {len(tables)}, expected one for each of {len(plan.groups)} groups")
    for group, table in zip(plan.groups, tables, strict=True):
        got = table.num_rows, table.width, table.block_size, table.mode
        if got != (plan.limits.max_num_seqs, group.table_width, group.block_size, group.mode):
            raise ValueError(f"tables: group {group.group.group_id} got one of another plan: {got}")
