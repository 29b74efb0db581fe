"""One block table per KV cache group, their device mirror, and what a forward pass asks of them.

    row operations  -> host tables (the authority), each recording what it changed
    step            -> one copy to the device, one launch: every change arrives, whatever the batch; positions, lengths,
                       slots, states' slots and page indices of all groups leave, at fixed addresses

On a CPU the same happens in numpy. The mirror is one int32 buffer, laid out as the `words` of `TableArrays`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Before the kernels, which need torch too: this import's error says what to install.
from hybridkv._torch import allocate_zeros, torch
from hybridkv.batch import BatchGeometry
from hybridkv.block_table import BlockTable, join_tables, make_block_tables
from hybridkv.limits import BatchLimits
from hybridkv.page_index import CsrTable, IndexBuffer, LocalTable, PageIndexRequest, csr_table, host_pages, local_table
from hybridkv.plan import CachePlan
from hybridkv.planner import DEFAULT_BLOCK_SIZE, plan_cache
from hybridkv.row_operations import RowOperations
from hybridkv.specs import ModelSpec
from hybridkv.step_batch import StepBatch
from hybridkv.step_path import NumpyPath, StepPath, TritonPath
from hybridkv.table_arrays import TableArrays
from hybridkv.units import INT32_MAX
from hybridkv_kernels.constants import PAD_SLOT_ID
from hybridkv_kernels.step_layout import IndexMeta
from hybridkv_kernels.step_tables import StepOutputs

_MAX_KEPT_SIZES = 64
_NO_ROWS = StepBatch.of([], [], [])


@dataclass(frozen=True)
class ExtraTokens:
    """Tokens in the cache that the device knows of before the host does, such as accepted draft tokens.

    Shapes: `num_tokens` [num_rows] int32 on the device, contiguous, from 0 to `most` for every row of the batch.
    Raises: ValueError if `most` is negative or does not fit int32.
    """

    num_tokens: torch.Tensor
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.most <= INT32_MAX:
            raise ValueError(f"extra tokens: got at most {self.most}, expected 0..{INT32_MAX}")

    def check(self, num_rows: int, device: torch.device) -> None:
        """Raise ValueError unless the tensor is what tables of `num_rows` on `device` read."""
        got = self.num_tokens
        if (got.dtype, got.shape, got.device) != (torch.int32, (num_rows,), device) or not got.is_contiguous():
            raise ValueError(
                f"extra tokens: got {got.dtype} of shape {tuple(got.shape)} and stride {got.stride()} on {got.device}, "
                f"expected contiguous torch.int32 of shape ({num_rows},) on {device}"
            )


@dataclass(frozen=True)
class TableStep:
    """What a forward pass reads of all groups' tables; valid until the next step, which writes the same buffers.

    Shapes: `slot_mapping` [num_groups, T] int64, -1 for padding, for tokens without a live block or of another rank,
        and for groups of states.
    """

    geometry: BatchGeometry
    slot_mapping: torch.Tensor
    _arrays: TableArrays
    _outputs: StepOutputs
    _metas: Sequence[IndexMeta]
    _extra_tokens: torch.Tensor | None

    def state_slots(self, group_id: int) -> torch.Tensor:
        """Return the slots of a state group's blocks.

        Shapes: [width, R] int64; row `part * (1 + spec) + k` is checkpoint k of a part; -1 for padding or no block
        Raises: ValueError for a group that keeps tokens.
        """
        begin = self._meta(group_id, "state_row").state_row
        end = next((m.state_row for m in self._metas[group_id + 1 :] if m.state_row >= 0), None)
        return self._outputs.state_slots[begin:end]

    def local_table(self, group_id: int) -> LocalTable:
        """Return a group's blocks by batch position.

        Raises: ValueError if the tables were not made to write it.
        """
        meta = self._meta(group_id, "table_at")
        return local_table(self._outputs.index, meta, len(self.geometry.rows))

    def csr(self, group_id: int) -> CsrTable:
        """Return a group's blocks in compressed rows.

        Raises: ValueError if the tables were not made to write it.
        """
        return csr_table(self._outputs.index, self._meta(group_id, "indptr_at"), len(self.geometry.rows))

    def csr_cpu(self, group_id: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return `indptr` and `last_page_len` of `csr` on the host, for kernels that plan there.

        They follow the host's tables: call it before the next row operation, and not where the device knows of more
        tokens than the host.

        Shapes: [R+1] int32, [R] int32
        """
        self._meta(group_id, "indptr_at")
        batch, size = self.geometry.batch, len(self.geometry.rows)
        indptr, last_page_len = np.zeros(size + 1, dtype=np.int32), np.zeros(size, dtype=np.int32)
        num_pages, last_page_len[: batch.num_reqs] = host_pages(self._arrays, group_id, batch.rows, batch.seq_lens)
        num_pages.cumsum(out=indptr[1 : batch.num_reqs + 1])
        indptr[batch.num_reqs + 1 :] = indptr[batch.num_reqs]
        return indptr, last_page_len

    def _meta(self, group_id: int, place: str) -> IndexMeta:
        """Return a group's meta; raise ValueError unless it has this place."""
        if not 0 <= group_id < len(self._metas):
            raise ValueError(f"group: got {group_id}, expected 0..{len(self._metas) - 1}")
        meta = self._metas[group_id]
        if getattr(meta, place) >= 0:
            return meta
        if place == "state_row":
            raise ValueError(f"group {group_id}: keeps tokens, whose slots are in slot_mapping; it has no states")
        if meta.state_row >= 0:
            raise ValueError(f"group {group_id}: keeps states, whose slots are in state_slots; it has no pages")
        dialect = "csr" if place == "indptr_at" else "block_table"
        raise ValueError(f"group {group_id}: never asked for {dialect}; name it in page_indices")


class MultiGroupBlockTable(RowOperations):
    """The block tables of all groups of a model.

    Row operations take one list of block ids per group and are atomic: if one group refuses, none changes. The rows of
    tables that a `CacheManager` made are changed by the manager's verbs only, which count their blocks.

    Tables have one mirror: wrapping them again brings all that they hold to the new one and ends the old one, whose
    `stage`, `step` and `commit` raise ValueError from then on.

    Attributes:
        tables: one `BlockTable` per group, in group order.
        words: [num_words] int32, the mirror on the device.
        num_words_copied: int32 words that the last step moved to the device.
        num_rounds: launches of the last step, one unless it changed more than the staging buffer holds.
    """

    def __init__(
        self,
        tables: Sequence[BlockTable],
        max_num_batched_tokens: int,
        device: str | torch.device = "cpu",
        *,
        page_indices: Mapping[int, PageIndexRequest] | None = None,
        use_triton: bool | None = None,
        copy_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Join the tables and allocate everything that a step writes.

        Args:
            max_num_batched_tokens: the most tokens of a step, padding included.
            page_indices: by group, what each step writes besides slots and states.
            use_triton: launch the kernel rather than compute in numpy; by default, on every device but a CPU.
            copy_stream: for the copies, beside the stream of the forward passes; by default they share one.

        Raises: ValueError for tables of unequal rows, or of which some belong to others or are wrapped alone already.
        """
        super().__init__(tables, join_tables(tables))
        self.device = torch.device(device)
        self.max_num_batched_tokens = max_num_batched_tokens
        self._index = IndexBuffer(self.arrays, page_indices or {}, self.arrays.num_rows)
        self.words = self._allocate_mirror()
        self._buffers = self._allocate()
        self._outputs: dict[tuple[int, int], StepOutputs] = {}
        self._path: StepPath
        if use_triton or (use_triton is None and self.device.type != "cpu"):
            self._path = TritonPath(self.arrays, self.words, self._index, max_num_batched_tokens, copy_stream)
        else:
            self._path = NumpyPath(self.arrays, self.words, self._index)
        self._staged: TableStep | None = None
        self._consumer = object()
        self.arrays.attach(self._consumer)

    @classmethod
    def from_plan(
        cls,
        plan: CachePlan,
        *,
        device: str | torch.device = "cpu",
        tables: Sequence[BlockTable] | None = None,
        page_indices: Mapping[int, PageIndexRequest] | None = None,
    ) -> "MultiGroupBlockTable":
        """Build the tables of a plan, or wrap the ones a `CacheManager` made for it."""
        tables = make_block_tables(plan) if tables is None else tables
        return cls(tables, plan.limits.max_num_batched_tokens, device, page_indices=page_indices)

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
    def num_words_copied(self) -> int:
        """Int32 words that the last step moved to the device."""
        return self._path.num_words_copied

    @property
    def num_rounds(self) -> int:
        """Copies and launches of the last step: one unless it changed more than the staging buffer holds."""
        return self._path.num_rounds

    def commit(self) -> None:
        """Bring the device's tables up to date without a batch; `step` does it for itself.

        If it fails, what was to travel stays dirty. A step that was staged and not launched must be staged again.

        Raises: ValueError if the tables were wrapped again.
        """
        self._check_owned()
        nothing, self._staged = self._outputs_of(0, 0), None
        self._path.stage(_NO_ROWS, nothing, None)
        self._path.launch(nothing, None)

    def step(
        self,
        rows: ArrayLike,
        num_scheduled_tokens: ArrayLike,
        num_computed_tokens: ArrayLike,
        *,
        num_reqs_padded: int = 0,
        num_tokens_padded: int = 0,
        extra: ExtraTokens | None = None,
    ) -> TableStep:
        """Bring the device's tables up to date and map a batch in which row `rows[i]` computes some tokens.

        All changes travel, those of rows outside the batch too. Nothing is read back. If it fails, they stay dirty.

        Args:
            extra: tokens in the cache beyond `num_computed_tokens`.

        Shapes: rows, num_scheduled_tokens, num_computed_tokens [num_reqs]
        Raises: ValueError for a batch that `StepBatch.of` refuses, more rows, tokens or pages than the tables were made
            for, a row they lack, extra tokens of another form, or tables that were wrapped again; nothing changes then.
        """
        staged = self.stage(
            rows,
            num_scheduled_tokens,
            num_computed_tokens,
            num_reqs_padded=num_reqs_padded,
            num_tokens_padded=num_tokens_padded,
            extra=extra,
        )
        self.launch(staged)
        return staged

    def stage(
        self,
        rows: ArrayLike,
        num_scheduled_tokens: ArrayLike,
        num_computed_tokens: ArrayLike,
        *,
        num_reqs_padded: int = 0,
        num_tokens_padded: int = 0,
        extra: ExtraTokens | None = None,
    ) -> TableStep:
        """Do the first half of `step`: pack and copy; what it returns is filled by `launch`.

        For engines that capture graphs: capture `launch` once for a pair of padded sizes, then stage every step of
        these sizes, replay and call `replayed`. What was staged and never launched travels again with the next step.

        Args, shapes, raises: as `step`
        """
        self._check_owned()
        batch = StepBatch.of(rows, num_scheduled_tokens, num_computed_tokens, self.arrays.native)
        size_r, size_t = batch.padded_sizes(num_reqs_padded, num_tokens_padded)
        extra_tokens, most = (None, 0) if extra is None else (extra.num_tokens, extra.most)
        self._check_batch(batch, size_r, size_t, most)
        if extra is not None:
            extra.check(self.arrays.num_rows, self.words.device)
        outputs, self._staged = self._outputs_of(size_r, size_t), None
        self._path.stage(batch, outputs, extra_tokens)
        geometry = BatchGeometry(
            batch,
            batch.max_query_len,
            batch.max_seq_len + most,
            outputs.rows,
            outputs.query_start_loc,
            outputs.seq_lens,
            outputs.zero_start,
            outputs.token_rows,
            outputs.positions,
        )
        self._staged = TableStep(geometry, outputs.slots, self.arrays, outputs, self._index.metas, extra_tokens)
        return self._staged

    def launch(self, step: TableStep) -> None:
        """Compute a staged step, on the current stream, which may be capturing; nothing is allocated or read back.

        Launching the last staged step again changes nothing.

        Raises: ValueError for any other step, whose work is no longer in the staging buffer.
        """
        if step is not self._staged:
            raise ValueError(
                "step: got one that is not the last staged; stage it again, after `commit` too, then launch"
            )
        self._path.launch(step._outputs, step._extra_tokens)

    def replayed(self) -> None:
        """Take note that a graph with a captured `launch` was replayed on the current stream for the staged step."""
        self._path.replayed()

    def block_table(self, group_id: int) -> torch.Tensor:
        """Return a group's committed table on the device.

        Shapes: [num_rows, width] int32, a view; ordinal j is in column `j % width`.
        """
        table, begin = self.tables[group_id], int(self.arrays.offsets[group_id])
        entries = self.words[begin : begin + table.entries.size].view(table.num_rows, table.stride)
        return entries[:, : table.width]

    def block_table_cpu(self, group_id: int) -> NDArray[np.int32]:
        """Return a group's committed table as the host sees it: the mirror on a CPU, the authority beside a GPU."""
        table = self.tables[group_id]
        if self.device.type != "cpu":
            return table.entries[:, : table.width]
        mirror: NDArray[np.int32] = self.block_table(group_id).numpy()
        return mirror

    def _check_owned(self) -> None:
        if self.arrays.consumer is not self._consumer:
            raise ValueError("tables: were taken over by a later MultiGroupBlockTable of the same tables; use that one")

    def _check_batch(self, batch: StepBatch, size_r: int, size_t: int, most_extra: int) -> None:
        """Raise ValueError for a padded batch that the tables were not made for."""
        num_rows = self.arrays.num_rows
        if size_t > self.max_num_batched_tokens:
            raise ValueError(f"batch: got {size_t} tokens, the tables were made for {self.max_num_batched_tokens}")
        if batch.highest_row >= num_rows:
            raise ValueError(f"batch: got row {batch.highest_row}, the tables have {num_rows} rows")
        if size_r > num_rows:
            raise ValueError(f"batch: got {size_r} batch positions, the tables have {num_rows} rows")
        if batch.max_seq_len + most_extra > INT32_MAX:
            raise ValueError(
                f"lengths: got a row of {batch.max_seq_len} tokens and {most_extra} extra ones, expected at most "
                f"{INT32_MAX}: lengths on the device are int32"
            )
        self._index.check_room(batch, most_extra)

    def _allocate_mirror(self) -> torch.Tensor:
        num_words = len(self.arrays.words)
        if self.device.type == "cpu":
            # Numpy asks for huge pages: a step touches a few words of every row.
            return torch.from_numpy(np.zeros(num_words, dtype=np.int32))
        return allocate_zeros("block tables", (num_words,), torch.int32, self.device)

    def _allocate(self) -> StepOutputs:
        num_rows, num_tokens = self.arrays.num_rows, self.max_num_batched_tokens

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return allocate_zeros("step outputs", shape, dtype, self.device)

        return StepOutputs(
            rows=zeros(torch.int32, num_rows),
            query_start_loc=zeros(torch.int32, num_rows + 1),
            seq_lens=zeros(torch.int32, num_rows),
            zero_start=zeros(torch.bool, num_rows),
            token_rows=zeros(torch.int32, num_tokens),
            positions=zeros(torch.int64, num_tokens),
            slots=zeros(torch.int64, self.num_groups, num_tokens).fill_(PAD_SLOT_ID),
            state_slots=zeros(torch.int64, self._index.num_state_rows, num_rows),
            index=zeros(torch.int32, self._index.num_words),
        )

    def _outputs_of(self, num_reqs: int, num_tokens: int) -> StepOutputs:
        """Return views of the buffers for a padded batch; the last sizes' are kept."""
        key = num_reqs, num_tokens
        if key not in self._outputs:
            if len(self._outputs) >= _MAX_KEPT_SIZES:
                self._outputs.clear()
            self._outputs[key] = self._buffers.narrowed(num_reqs, num_tokens)
        return self._outputs[key]
