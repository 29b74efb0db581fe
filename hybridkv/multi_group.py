"""One block table per KV cache group, their device mirror, the slot mapping of a step.

    row operations  -> host tables (the authority), each recording what it changed
    commit          -> every changed word travels to the device mirror in one copy, whatever the batch
    map_slots       -> slots of every token in every group, one launch (GPU) or one vectorised pass (CPU)

The mirror is one int32 buffer: the `words` of all groups' tables, one after another.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Before the kernels, which need torch too: this import's error says what to install.
from hybridkv._torch import allocate_zeros, torch
from hybridkv.batch import BatchGeometry
from hybridkv.block_table import BlockTable
from hybridkv.limits import BatchLimits
from hybridkv.manager import make_block_tables
from hybridkv.plan import CachePlan, SlotMappingMode
from hybridkv.planner import DEFAULT_BLOCK_SIZE, plan_cache
from hybridkv.specs import ModelSpec
from hybridkv_kernels.constants import PAD_SLOT_ID
from hybridkv_kernels.slot_mapping import compute_slot_mapping, compute_slot_mapping_numpy


class MultiGroupBlockTable:
    """The block tables of all groups of a model.

    Row operations take one list of block ids per group and are atomic: if one group refuses, none changes. The rows of
    tables that a `CacheManager` made are changed by the manager's verbs only, which count their blocks.

    Attributes:
        tables: one `BlockTable` per group, in group order.
        num_words_committed: words the last `commit` copied.
    """

    def __init__(
        self, tables: Sequence[BlockTable], max_num_batched_tokens: int, device: str | torch.device = "cpu"
    ) -> None:
        if not tables or len({table.num_rows for table in tables}) != 1:
            raise ValueError(
                f"tables: got {[t.num_rows for t in tables]} rows, expected at least one table, equal rows"
            )
        self.tables = list(tables)
        self.device = torch.device(device)
        self.num_words_committed = 0
        sizes = [len(table.words) for table in self.tables]
        self._bases = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._mirror = allocate_zeros("block tables", (int(self._bases[-1]),), torch.int32, self.device)
        self._mirror_cpu = self._mirror.numpy() if self.device.type == "cpu" else None
        meta = np.array(
            [
                [
                    base,
                    table.stride,
                    table.width,
                    0 if table.mode is SlotMappingMode.NONE else table.block_size,
                    base + table.first_offset,
                    base + table.count_offset,
                ]
                for base, table in zip(self._bases[:-1].tolist(), self.tables, strict=True)
            ],
            dtype=np.int64,
        )
        self._meta_cpu = meta
        self._meta = torch.from_numpy(meta).to(self.device)
        self._slots = torch.full(
            (len(self.tables), max_num_batched_tokens), PAD_SLOT_ID, dtype=torch.int64, device=self.device
        )

    @classmethod
    def from_plan(
        cls, plan: CachePlan, *, device: str | torch.device = "cpu", tables: Sequence[BlockTable] | None = None
    ) -> "MultiGroupBlockTable":
        """Build the tables of a plan, or wrap the ones a `CacheManager` made for it."""
        tables = make_block_tables(plan) if tables is None else tables
        return cls(tables, plan.limits.max_num_batched_tokens, device)

    @classmethod
    def from_spec(
        cls,
        spec: ModelSpec,
        memory_bytes: int,
        limits: BatchLimits,
        *,
        block_size: int | Mapping[int, int] = DEFAULT_BLOCK_SIZE,
        device: str | torch.device = "cpu",
    ) -> "MultiGroupBlockTable":
        """Plan a model's layer spec and build its tables.

        Raises: SpecError if the plan is refused.
        """
        return cls.from_plan(plan_cache(spec, memory_bytes, limits, block_size=block_size), device=device)

    @property
    def num_groups(self) -> int:
        """Number of KV cache groups."""
        return len(self.tables)

    def append_row(self, row: int, block_ids: Sequence[ArrayLike]) -> None:
        """Append each group's blocks to a row.

        Raises: ValueError as `BlockTable.append_row`, or for a wrong number of lists; no group changes then.
        """
        ids = self._check_lists(block_ids)
        for table, group_ids in zip(self.tables, ids, strict=True):
            table.check_append(row, len(group_ids))
        for table, group_ids in zip(self.tables, ids, strict=True):
            table.append_row(row, group_ids)

    @property
    def num_blocks_per_row(self) -> NDArray[np.int32]:
        """Return `[num_groups, num_rows]`, a copy: the next ordinal to append to each row of each group."""
        return np.stack([table.num_blocks_per_row for table in self.tables])

    @property
    def first_block_per_row(self) -> NDArray[np.int32]:
        """Return `[num_groups, num_rows]`, a copy: the first live ordinal of each row of each group."""
        return np.stack([table.first_block_per_row for table in self.tables])

    def drop_row_head(self, row: int, first_blocks: Sequence[int]) -> list[NDArray[np.int32]]:
        """Forget in each group the ordinals below `first_blocks[g]`; return the ids by group.

        Raises: ValueError if a group's row has not so many ordinals; no group changes then.
        """
        if len(first_blocks) != self.num_groups:
            raise ValueError(f"first_blocks: got {len(first_blocks)} ordinals, expected {self.num_groups}")
        for table, first_block in zip(self.tables, first_blocks, strict=True):
            table.check_drop(row, first_block)
        return [table.drop_row_head(row, first) for table, first in zip(self.tables, first_blocks, strict=True)]

    def add_row(self, row: int, block_ids: Sequence[ArrayLike], first_blocks: Sequence[int] | None = None) -> None:
        """Replace a row in every group; group g's blocks become ordinals `first_blocks[g], ...` (0 by default).

        Raises: ValueError as `BlockTable.add_row`, or for a wrong number of lists; no group changes then.
        """
        starts = [0] * self.num_groups if first_blocks is None else list(first_blocks)
        if len(starts) != self.num_groups or min(starts) < 0:
            raise ValueError(f"first_blocks: got {starts}, expected {self.num_groups} ordinals of at least 0")
        ids = self._check_lists(block_ids)
        for table, group_ids in zip(self.tables, ids, strict=True):
            table.check_fill(row, len(group_ids))
        for table, group_ids, first_block in zip(self.tables, ids, starts, strict=True):
            table.add_row(row, group_ids, first_block)

    def clear_row(self, row: int) -> list[NDArray[np.int32]]:
        """Empty a row in every group; return per group the ids it held."""
        return [table.clear_row(row) for table in self.tables]

    def move_row(self, source: int, target: int) -> None:
        """Move a row in every group; the source reads null afterwards."""
        for table in self.tables:
            table.move_row(source, target)

    def swap_row(self, row_a: int, row_b: int) -> None:
        """Exchange two rows in every group."""
        for table in self.tables:
            table.swap_row(row_a, row_b)

    def commit(self) -> None:
        """Copy every changed word to the device mirror.

        All dirty words travel, those of rows outside the batch too; a steady decode step moves a few hundred bytes.

        If the copy fails, what was to travel stays dirty.

        Units: `num_words_committed` in int32 words.
        """
        dirty = [table.take_dirty() for table in self.tables]
        try:
            self._copy_words(dirty)
        except BaseException:
            for table, words in zip(self.tables, dirty, strict=True):
                table.mark_dirty(words)
            raise

    def _copy_words(self, dirty: list[NDArray[np.int64]]) -> None:
        where = np.concatenate([words + base for base, words in zip(self._bases[:-1], dirty, strict=True)])
        what = np.concatenate([table.words[words] for table, words in zip(self.tables, dirty, strict=True)])
        self.num_words_committed = len(where)
        if not len(where):
            return
        if self._mirror_cpu is not None:
            self._mirror_cpu[where] = what
            return
        staged = (
            torch.from_numpy(np.stack([where, what.astype(np.int64)])).pin_memory().to(self.device, non_blocking=True)
        )
        self._mirror[staged[0]] = staged[1].to(torch.int32)

    def map_slots(self, geometry: BatchGeometry) -> torch.Tensor:
        """Return the slot of every token in every group, from the committed tables.

        Shapes: returns [num_groups, num_tokens_padded] int64, a view of a persistent buffer; -1 for padding, for
            tokens whose block is not live and for groups of states or of cross attention.
        Raises: ValueError if the batch has more tokens than the tables were made for or a row that they lack.
        """
        num_tokens = len(geometry.positions_cpu)
        if num_tokens > self._slots.shape[1]:
            raise ValueError(f"batch: got {num_tokens} tokens, the tables were made for {self._slots.shape[1]}")
        highest_row = geometry.rows_cpu.max(initial=PAD_SLOT_ID)
        if highest_row >= self.tables[0].num_rows:
            raise ValueError(f"batch: got row {highest_row}, the tables have {self.tables[0].num_rows} rows")
        out = self._slots[:, :num_tokens]
        if self._mirror_cpu is not None:
            compute_slot_mapping_numpy(
                self._mirror_cpu, self._meta_cpu, geometry.token_rows_cpu, geometry.positions_cpu, out=out.numpy()
            )
        else:
            compute_slot_mapping(self._mirror, self._meta, geometry.token_rows, geometry.positions, out=out)
        return out

    def block_table(self, group_id: int) -> torch.Tensor:
        """Return a group's committed table on the device.

        Shapes: [num_rows, width] int32, a view; ordinal j is in column `j % width`.
        """
        table, base = self.tables[group_id], int(self._bases[group_id])
        entries = self._mirror[base : base + table.first_offset].view(table.num_rows, table.stride)
        return entries[:, : table.width]

    def block_table_cpu(self, group_id: int) -> NDArray[np.int32]:
        """Return a group's committed table as the host sees it: the mirror on a CPU, the authority beside a GPU."""
        table, base = self.tables[group_id], int(self._bases[group_id])
        if self._mirror_cpu is None:
            return table.entries[:, : table.width]
        entries = self._mirror_cpu[base : base + table.first_offset].reshape(table.num_rows, table.stride)
        return entries[:, : table.width]

    def _check_lists(self, block_ids: Sequence[ArrayLike]) -> list[NDArray[np.int32]]:
        if len(block_ids) != self.num_groups:
            raise ValueError(f"block_ids: got lists for {len(block_ids)} groups, expected {self.num_groups}")
        return [table.check_ids(ids) for table, ids in zip(self.tables, block_ids, strict=True)]
