"""vLLM's block tables as the benchmark's peers: its own classes, on a CPU.

Its Triton kernels need a GPU, so a launch ends in `NoKernel`, which keeps the arguments, computes nothing. All Python
of vLLM up to the launch runs, timed; the cost of the launch, which a GPU host pays, is not. That favours it. Outside
the timed part, numpy applies the writes that a kernel was handed, then reads the slots off the device table, so that
tables and slots can be compared.
"""

import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from table_workloads import BLOCK_SIZE, NUM_ROWS, Churn, GroupShape, Record, Step

VERSION = "0.33.0"
_CPU = torch.device("cpu")
Modules: TypeAlias = tuple[ModuleType, ModuleType, ModuleType]


class NoKernel:
    """Stands in for a Triton kernel: keeps the last launch's arguments."""

    def __init__(self, function: object) -> None:
        # With triton's decorator a kernel knows its names; without, it is still a plain function.
        self.arg_names = getattr(function, "arg_names", None) or tuple(inspect.signature(function).parameters)
        self.args: tuple[object, ...] | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> "NoKernel":
        return self

    def __call__(self, *args: object, **_options: object) -> None:
        """Keep what a launch was handed."""
        self.args = args


def import_vllm(folder: Path, *, has_kernels: bool = False) -> Modules:
    """Import V1's block table, V2's block tables, V2's buffers from a folder that `make_peer_env.py` made.

    Args:
        has_kernels: keep vLLM's own kernels, for triton's interpreter.
    Raises: ImportError if vLLM or what it imports is missing or of another version.
    """
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if has_kernels:
        # vLLM drops triton where it finds no GPU, unless it is told that there is none to see.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Last, so that torch, numpy and the like are those of this environment.
    sys.path.append(str(folder.resolve()))
    import vllm
    import vllm.v1.worker.block_table as v1
    import vllm.v1.worker.cpu.buffer_utils as cpu_buffers
    import vllm.v1.worker.gpu.block_table as v2
    import vllm.v1.worker.gpu.buffer_utils as buffers

    if vllm.__version__ != VERSION:
        raise ImportError(f"vllm: got version {vllm.__version__}, expected {VERSION}")
    # What vLLM's own CPU worker does: host memory stands for memory that a GPU can read.
    buffers.UvaBuffer, buffers.is_uva_available = cpu_buffers.UvaBuffer, lambda: True
    if not has_kernels:
        v1.ComputeSlotMappingKernel.kernel = NoKernel(v1.ComputeSlotMappingKernel.kernel)
        buffers._apply_write_kernel = NoKernel(buffers._apply_write_kernel)
        v2._gather_block_tables_kernel = NoKernel(v2._gather_block_tables_kernel)
        v2._compute_slot_mappings_kernel = NoKernel(v2._compute_slot_mappings_kernel)
    return v1, v2, buffers


class VllmV1:
    """V1's `MultiGroupBlockTable`, whose commit copies the rows of the batch at full width.

    With `copies` the device table is a second host buffer; without, it is the host buffer itself, as on vLLM's CPU
    backend, and a commit copies nothing.
    """

    def __init__(self, modules: Modules, groups: tuple[GroupShape, ...], max_num_tokens: int, *, copies: bool) -> None:
        self.name = "vLLM V1" if copies else "vLLM V1, no copy"
        self.num_groups = len(groups)
        widths = [group.width for group in groups]
        sizes = [BLOCK_SIZE] * len(groups)
        self.tables = modules[0].MultiGroupBlockTable(NUM_ROWS, max_num_tokens, False, _CPU, sizes, widths)
        if not copies:
            for table in self.tables.block_tables:
                table.block_table.gpu = table.block_table.cpu

    def fill(self, record: Record) -> None:
        """Take over the rows of a record, blocks behind a window too, as its worker keeps them."""
        for row, counts in enumerate(record.count.T):
            self.tables.add_row(tuple(record.ids[g, row, :n].tolist() for g, n in enumerate(counts)), row)
        self.tables.commit_block_table(NUM_ROWS)

    def decode_step(self, step: Step) -> None:
        """Append, commit, map."""
        _, query_start_loc, positions = step.tensors
        for row, ids in step.lists:
            self.tables.append_row(ids, row)
        self.tables.commit_block_table(len(step.rows))
        self.tables.compute_slot_mapping(len(step.rows), query_start_loc, positions)

    def prefill_step(self, step: Step) -> None:
        """Add, commit, map."""
        _, query_start_loc, positions = step.tensors
        for row, ids in step.lists:
            self.tables.add_row(ids, row)
        self.tables.commit_block_table(len(step.rows))
        self.tables.compute_slot_mapping(len(step.rows), query_start_loc, positions)

    def churn_step(self, step: Churn, *, commit: bool) -> None:
        """Clear, move, add."""
        for row in step.finished.tolist():
            self.tables.clear_row(row)
        for source, hole in step.moves:
            self.tables.move_row(source, hole)
        for row, ids in step.lists:
            self.tables.add_row(ids, row)
        if commit:
            self.tables.commit_block_table(NUM_ROWS)

    def clear(self, rows: NDArray[np.int64]) -> None:
        """Empty rows; not timed."""
        for row in rows.tolist():
            self.tables.clear_row(row)

    def settle(self, step: Step | Churn) -> None:
        """Commit what a step without a commit left; not timed."""
        if isinstance(step, Churn):
            self.tables.commit_block_table(NUM_ROWS)

    def slots(self, step: Step) -> NDArray[np.int64]:
        """Compute the slots of a step from the device table."""
        return _slots([self.device_table(group) for group in range(self.num_groups)], step)

    def device_table(self, group: int) -> NDArray[np.int32]:
        """Return `[NUM_ROWS, width]` as committed."""
        return self.tables[group].block_table.gpu.numpy()


class VllmV2:
    """V2's `BlockTables`, which stage what changed as Python lists.

    A request stays in its row: rows are in order of admission, `_row_of` finds the row of a batch position.
    """

    name = "vLLM V2, host part"

    def __init__(self, modules: Modules, groups: tuple[GroupShape, ...], max_num_tokens: int) -> None:
        self.num_groups = len(groups)
        widths = [group.width for group in groups]
        self.tables = modules[1].BlockTables([BLOCK_SIZE] * len(groups), NUM_ROWS, max_num_tokens, widths, _CPU)
        self._write_kernel: NoKernel = modules[2]._apply_write_kernel
        self._row_of = np.arange(NUM_ROWS)

    def fill(self, record: Record) -> None:
        """Take over the rows of a record."""
        for row, counts in enumerate(record.count.T):
            ids = tuple(record.ids[g, row, :n].tolist() for g, n in enumerate(counts))
            self.tables.append_block_ids(row, ids, overwrite=True)
        self.tables.apply_staged_writes()
        self._apply()

    def decode_step(self, step: Step) -> None:
        """Stage, apply, gather, map."""
        self._step(step, overwrite=False)

    def prefill_step(self, step: Step) -> None:
        """Stage, apply, gather, map."""
        self._step(step, overwrite=True)

    def _step(self, step: Step, *, overwrite: bool) -> None:
        rows, query_start_loc, positions = step.tensors
        for row, ids in step.lists:
            self.tables.append_block_ids(row, ids, overwrite)
        self.tables.apply_staged_writes()
        self.tables.gather_block_tables(rows, len(step.rows))
        self.tables.compute_slot_mappings(rows, query_start_loc, positions, len(step.positions))

    def churn_step(self, step: Churn, *, commit: bool) -> None:
        """Overwrite the rows that finished; nothing moves."""
        for row, (_, ids) in zip(self._row_of[step.finished].tolist(), step.lists, strict=True):
            self.tables.append_block_ids(row, ids, overwrite=True)
        if commit:
            self.tables.apply_staged_writes()

    def clear(self, rows: NDArray[np.int64]) -> None:
        """Do nothing: a new request overwrites the row."""

    def settle(self, step: Step | Churn) -> None:
        """Do what the kernel would have done; not timed."""
        if isinstance(step, Churn):
            freed = self._row_of[step.finished]
            self._row_of[step.holes] = self._row_of[step.sources]
            self._row_of[step.admitted] = freed
            self.tables.apply_staged_writes()
        self._apply()

    def _apply(self) -> None:
        if self._write_kernel.args is None:
            return
        _, _, rows, starts, contents, ends, groups = (np.asarray(arg) for arg in self._write_kernel.args)
        self._write_kernel.args = None
        begin = 0
        for group, row, start, end in zip(groups, rows, starts, ends, strict=True):
            self.tables.block_tables[group].gpu.numpy()[row, start : start + end - begin] = contents[begin:end]
            begin = end

    def slots(self, step: Step) -> NDArray[np.int64]:
        """Compute the slots of a step from the device table."""
        return _slots([self.device_table(group) for group in range(self.num_groups)], step)

    def device_table(self, group: int) -> NDArray[np.int32]:
        """Return `[NUM_ROWS, width]` in the order of the batch."""
        return self.tables.block_tables[group].gpu.numpy()[self._row_of]


def _slots(tables: list[NDArray[np.int32]], step: Step) -> NDArray[np.int64]:
    ids = np.stack([table[step.token_rows, step.positions // BLOCK_SIZE] for table in tables])
    return ids.astype(np.int64) * BLOCK_SIZE + step.positions % BLOCK_SIZE
