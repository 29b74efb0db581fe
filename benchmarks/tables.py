"""Block tables of a serving worker side by side with vLLM's, and with the least numpy work for the same outputs.

    python benchmarks/make_peer_env.py DIR                      once: fetches vLLM 0.33's Python files
    python benchmarks/tables.py --peer DIR [--check] [--json] [--cases ...] [--rounds 11]

Every system takes the same steps of 256 rows: append block ids, bring the device tables up to date, map tokens to slots
in all groups. One process on one core; in each round every system runs a block of steps, in turns; a time is the median
of a block, a ratio the median over rounds of (peer's time / our time) of the same round. Times are those of the thread
on the core, so that other jobs of the machine count less. After each block the tables and slots that were timed are
compared with a plain record of the history, so that systems are equal to it, hence to each other.

    vLLM V1             its MultiGroupBlockTable; the device is a second host buffer, so that a commit is a real copy
    vLLM V1, no copy    the same with the device table in the host buffer
    vLLM V2, host part  its gpu.BlockTables, staged writer included
    numpy floor         arrays in, nothing checked
    ours, numpy         our tables without the compiled helper, as an installation without a compiler has them

vLLM's kernel launches are left out, which favours it (see `vllm_tables.py`). Block ids come in each system's own
currency: lists of Python integers for vLLM, int32 arrays for ours, the floor. Positions are given to peers and floor;
we make them ourselves.

`--check` exits 1 if a target is missed, a peer cannot be set up or the helper was not built; unequal outputs raise in
any case.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from side_by_side import Row, interleave, rows_of, run_command
from table_workloads import (
    BLOCK_SIZE,
    NUM_ROWS,
    Admission,
    Churn,
    Decode,
    Floor,
    GroupShape,
    Prefill,
    Record,
    Step,
)
from vllm_tables import Modules, VllmV1, VllmV2, import_vllm

from hybridkv.block_table import BlockTable
from hybridkv.limits import BatchLimits
from hybridkv.multi_group import MultiGroupBlockTable
from hybridkv.plan import SlotMappingMode
from hybridkv.planner import plan_cache
from hybridkv.specs import ModelSpec
from hybridkv.table_arrays import TableShape
from hybridkv_kernels import host

V1, V1_NO_COPY, V2, FLOOR = "vLLM V1", "vLLM V1, no copy", "vLLM V2, host part", Floor.name
FLOOR_TARGET = 0.5
EIGHT_GROUPS = (GroupShape(2048),) * 8
EIGHT_LONG_GROUPS = (GroupShape(65536),) * 8
# Gemma-3-27B has 10 layers of full attention beside 52 of a window of 1,024 tokens, which vLLM makes groups of ten of.
SEVEN_GROUPS = (GroupShape(2048), *(GroupShape(2048, window=1024),) * 6)


class Ours:
    """The tables of this library; as in every system only the three `*_step` methods are timed."""

    name = "ours"

    def __init__(self, groups: tuple[GroupShape, ...], max_num_tokens: int) -> None:
        modes = {None: SlotMappingMode.FULL}
        shapes = [
            TableShape(group.width, BLOCK_SIZE, modes.get(group.window, SlotMappingMode.SLIDING_WINDOW))
            for group in groups
        ]
        self.num_groups = len(groups)
        self.tables = MultiGroupBlockTable(BlockTable.of_groups(NUM_ROWS, shapes), max_num_tokens)
        self._slots: torch.Tensor | None = None

    def fill(self, record: Record) -> None:
        """Take over the rows of a record."""
        for group, table in enumerate(self.tables.tables):
            for row, (first, count) in enumerate(zip(record.first[group], record.count[group], strict=True)):
                table.add_row(row, record.ids[group, row, first:count], int(first))
        self.tables.commit()

    def decode_step(self, step: Step) -> None:
        """Drop, append, then one step: commit and map."""
        tables, num_groups = self.tables, self.num_groups
        for drop in step.drops:
            if drop.group < num_groups:
                tables.tables[drop.group].drop_rows_head(drop.rows, drop.first_blocks)
        tables.append_rows(step.append_rows, step.counts[:num_groups], step.ids[:num_groups].reshape(-1))
        self._slots = tables.step(step.rows, step.query_lens, step.num_computed).slot_mapping

    def prefill_step(self, step: Step) -> None:
        """Append, commit, map."""
        self.decode_step(step)

    def churn_step(self, step: Churn, *, commit: bool) -> None:
        """Clear, move, add."""
        tables = self.tables
        tables.clear_rows(step.finished)
        tables.move_rows(step.sources, step.holes)
        tables.add_rows(step.admitted, step.counts, step.ids.reshape(-1))
        if commit:
            tables.commit()

    def clear(self, rows: NDArray[np.int64]) -> None:
        """Empty rows; not timed."""
        self.tables.clear_rows(rows)
        self.tables.commit()

    def settle(self, _step: Step | Churn) -> None:
        """Commit what a step without a commit left; not timed."""
        self.tables.commit()

    def slots(self, _step: Step) -> NDArray[np.int64]:
        """Return the slots of the last step."""
        return self._slots.numpy()

    def device_table(self, group: int) -> NDArray[np.int32]:
        """Return `[NUM_ROWS, width]` as committed."""
        return self.tables.block_table_cpu(group)


class OursInNumpy(Ours):
    """The same without the compiled helper."""

    name = "ours, numpy"

    def __init__(self, groups: tuple[GroupShape, ...], max_num_tokens: int) -> None:
        with mock.patch.dict(os.environ, {host.VARIABLE: "0"}):
            super().__init__(groups, max_num_tokens)


System: TypeAlias = Ours | Floor | VllmV1 | VllmV2


@dataclass(frozen=True)
class Case:
    """One workload at one size; `targets` are least ratios by peer, a peer without one is for information."""

    workload: Callable[[tuple[GroupShape, ...]], Decode | Prefill | Admission]
    groups: tuple[GroupShape, ...]
    max_num_tokens: int
    run: Callable[[System, Step | Churn], None]
    num_steps: int
    targets: dict[str, float] = field(default_factory=dict)
    our_groups: Callable[[], tuple[GroupShape, ...]] | None = None


def gemma_groups() -> tuple[GroupShape, ...]:
    """Return the two groups that a plan makes of Gemma-3-27B: full attention, then the window's ring."""
    limits = BatchLimits(max_num_seqs=NUM_ROWS, max_model_len=32768, max_num_batched_tokens=8192)
    plan = plan_cache(ModelSpec.load("gemma-3-27b"), 2**38, limits, block_size=BLOCK_SIZE)
    by_mode = {group.mode: group for group in plan.groups}
    full, ring = by_mode[SlotMappingMode.FULL], by_mode[SlotMappingMode.SLIDING_WINDOW]
    return GroupShape(full.table_width), GroupShape(ring.table_width, window=ring.group.lifecycle.window)


def _decode(system: System, step: Step) -> None:
    system.decode_step(step)


def _prefill(system: System, step: Step) -> None:
    system.prefill_step(step)


def _churn(system: System, step: Churn) -> None:
    system.churn_step(step, commit=False)


def _churn_commit(system: System, step: Churn) -> None:
    system.churn_step(step, commit=True)


CASES = {
    "decode, 32K": Case(Decode, EIGHT_GROUPS, NUM_ROWS, _decode, 20, {V1: 15, V1_NO_COPY: 3, V2: 2}),
    "decode, 1M": Case(Decode, EIGHT_LONG_GROUPS, NUM_ROWS, _decode, 5, {V1: 300}),
    "decode, 32K, Gemma-3-27B": Case(Decode, SEVEN_GROUPS, NUM_ROWS, _decode, 20, our_groups=gemma_groups),
    "prefill": Case(Prefill, EIGHT_GROUPS, Prefill.num_rows * Prefill.num_tokens, _prefill, 10, {V1: 3}),
    "churn": Case(Admission, EIGHT_GROUPS, NUM_ROWS, _churn, 6, {V1: 6}),
    "churn, commit": Case(Admission, EIGHT_GROUPS, NUM_ROWS, _churn_commit, 6, {V1: 20}),
}


def run_case(name: str, modules: Modules | None, num_rounds: int) -> list[Row]:
    """Measure one case.

    Raises: RuntimeError if a system's tables or slots differ from the record.
    """
    case = CASES[name]
    workload = case.workload(case.groups)
    our_groups = case.groups if case.our_groups is None else case.our_groups()
    systems: list[System] = [Ours(our_groups, case.max_num_tokens), Floor(our_groups, case.max_num_tokens)]
    if host.is_built():
        systems.append(OursInNumpy(our_groups, case.max_num_tokens))
    if modules is not None:
        systems += [
            VllmV1(modules, case.groups, case.max_num_tokens, copies=True),
            VllmV1(modules, case.groups, case.max_num_tokens, copies=False),
            VllmV2(modules, case.groups, case.max_num_tokens),
        ]
    for system in systems:
        system.fill(workload.record)

    def time_block(system: System, steps: Sequence[Step | Churn]) -> float:
        median = _run_block(system, case, steps)
        _check_outputs(f"{name}: {system.name}", system, workload.record, steps[-1])
        return median

    seconds = interleave(systems, num_rounds, lambda: [workload.next_step() for _ in range(case.num_steps)], time_block)
    return rows_of(name, Ours.name, seconds, {FLOOR: FLOOR_TARGET, **case.targets})


def _run_block(system: System, case: Case, steps: Sequence[Step | Churn]) -> float:
    seconds = []
    for step in steps:
        if case.workload is Prefill:
            system.clear(step.append_rows)
        # Made here once, whatever system comes first.
        _ = (
            (step.lists, step.moves, step.counts)
            if isinstance(step, Churn)
            else (step.lists, step.tensors, step.flat_ids, step.counts)
        )
        started = time.thread_time_ns()
        case.run(system, step)
        seconds.append((time.thread_time_ns() - started) / 1e9)
        system.settle(step)
    return statistics.median(seconds)


def _check_outputs(where: str, system: System, record: Record, step: Step | Churn) -> None:
    """Raise RuntimeError unless tables and slots of a system are those of the record."""
    for group in range(system.num_groups):
        table = system.device_table(group)
        row, ordinal, ids = record.live(group)
        if not np.array_equal(table[row, ordinal % table.shape[1]], ids):
            raise RuntimeError(f"{where}: the table of group {group} differs from the record")
        if isinstance(system, Ours) and np.count_nonzero(table) != len(ids):
            raise RuntimeError(f"{where}: a dead entry of group {group} is not null")
    if isinstance(step, Step) and not np.array_equal(system.slots(step), record.slots(step)[: system.num_groups]):
        raise RuntimeError(f"{where}: the slots differ from the record")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 where `--check` finds a target missed, no peer or no compiled helper."""
    problems = [] if host.is_built() else ["the compiled helper was not built, so ours is numpy; see the README"]
    return run_command(__doc__, list(CASES), import_vllm, run_case, argv, problems)


if __name__ == "__main__":
    sys.exit(main())
