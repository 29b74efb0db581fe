"""The worked example and the byte accounts of docs/tables.md, made by the real code.

Without an option the parts are printed; `--write-docs` puts them into the page, `--check` exits 1 if the page differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.block_table import BlockTable, make_block_tables
from hybridkv.limits import BatchLimits
from hybridkv.multi_group import MultiGroupBlockTable, TableStep
from hybridkv.page_index import PageIndexRequest
from hybridkv.plan import SlotMappingMode
from hybridkv.planner import plan_cache
from hybridkv.specs import ModelSpec
from hybridkv.staging import pack, staging_words
from hybridkv.step_batch import StepBatch
from hybridkv.table_arrays import TableArrays, TableShape
from hybridkv_kernels.block_offsets import block_offsets_reference
from hybridkv_kernels.block_runs import block_runs_reference
from hybridkv_kernels.cells import Cells, cells_reference
from hybridkv_kernels.group_rows import GroupRows
from hybridkv_kernels.load_plan import load_plan_reference
from hybridkv_kernels.token_table import token_table_reference

DOCS = Path(__file__).resolve().parents[1] / "docs" / "tables.md"
BLOCK_SIZE, NUM_ROWS, ROW, NUM_PREFILLED = 16, 4, 2, 1000
WIDTH, LAST = 128, NUM_PREFILLED // BLOCK_SIZE
# 63 blocks as a pool may hand them out: one run of 40, one of 22, then a single one.
BLOCK_IDS = np.array([*range(100, 140), *range(300, 322), 57], dtype=np.int32)
BLOCK_AFTER_RESUME = 91
STEPS_PER_SECOND, BATCH = 50, 256


def example_tables() -> MultiGroupBlockTable:
    """Return tables of one full-attention group, of which row 2 is in use."""
    tables = BlockTable.of_groups(NUM_ROWS, [TableShape(WIDTH, BLOCK_SIZE)])
    requests = {0: PageIndexRequest(block_table=True, csr=True)}
    return MultiGroupBlockTable(tables, 1024, page_indices=requests)


def worked_example() -> str:
    """Return the life of one sequence: prefill, token 1,001, a preemption that moves block 62."""
    tables = example_tables()
    tables.append_row(ROW, [BLOCK_IDS])
    prefill = tables.step([ROW], [NUM_PREFILLED], [0])
    lines = [
        f"prefill      {NUM_PREFILLED} tokens of row {ROW} fill {len(BLOCK_IDS)} blocks: ordinals 0..{LAST}",
        f"             block table  entries[{ROW}, {LAST - 1}:{LAST + 2}] = {entries(tables)}",
        f"             slot mapping [0]..[15] = {span(prefill, 0, 16)}, [{NUM_PREFILLED - 8}]..[{NUM_PREFILLED - 1}] = "
        f"{span(prefill, NUM_PREFILLED - 8, NUM_PREFILLED)}",
        *decode(tables, "token 1,001"),
    ]
    tables.clear_row(ROW)
    lines += ["", f"preempted    row {ROW} reads null: entries[{ROW}, {LAST - 1}:{LAST + 2}] = {entries(tables)}"]
    moved = BLOCK_IDS.copy()
    moved[LAST] = BLOCK_AFTER_RESUME
    tables.add_row(ROW, [moved])
    lines += [f"resumed      ordinal {LAST} is now block {BLOCK_AFTER_RESUME}; nothing else moved"]
    return "\n".join([*lines, *decode(tables, "token 1,001")])


def decode(tables: MultiGroupBlockTable, name: str) -> list[str]:
    """Return the four ids of the token at position 1,000."""
    step = tables.step([ROW], [1], [NUM_PREFILLED])
    ordinal, offset = divmod(NUM_PREFILLED, BLOCK_SIZE)
    block, slot = int(tables.block_table_cpu(0)[ROW, ordinal]), int(step.slot_mapping[0, 0])
    return [
        f"{name:<12} row {ROW} -> position {NUM_PREFILLED} -> ordinal {NUM_PREFILLED} // {BLOCK_SIZE} = {ordinal}, "
        f"offset {offset}",
        f"             -> block table[{ROW}, {ordinal}] = block {block} "
        f"-> slot {block} * {BLOCK_SIZE} + {offset} = {slot}",
    ]


def entries(tables: MultiGroupBlockTable) -> list[int]:
    """Return the row's last entries."""
    listed: list[int] = tables.tables[0].entries[ROW, LAST - 1 : LAST + 2].tolist()
    return listed


def span(step: TableStep, begin: int, end: int) -> str:
    """Return consecutive slots as a range."""
    slots = step.slot_mapping[0, begin:end].tolist()
    assert slots == list(range(slots[0], slots[-1] + 1))
    return f"{slots[0]}..{slots[-1]}"


def dialects() -> str:
    """Return what each dialect holds for the row after token 1,001."""
    tables = example_tables()
    tables.append_row(ROW, [BLOCK_IDS])
    step = tables.step([ROW], [1], [NUM_PREFILLED])
    table, csr = step.local_table(0), step.csr(0)
    length = int(step.geometry.seq_lens[0])
    batch = GroupRows(tables.words, tables.arrays.group_metas[0], step.geometry.rows, step.geometry.seq_lens)
    i32 = torch.int32
    tokens = torch.zeros(1, length, dtype=i32)
    token_table_reference(batch, out=tokens)
    offsets = torch.zeros(1, 1, 2, WIDTH, dtype=i32)
    block_offsets_reference(batch, torch.tensor([[2, 0, 1]]), out=offsets)
    cells = Cells(
        torch.zeros(1024, dtype=torch.int64), torch.zeros(1024, dtype=torch.int64), torch.zeros(1024, dtype=i32),
        torch.zeros(2, dtype=i32),
    )  # fmt: skip
    cells_reference(batch, out=cells)
    runs, counts = torch.zeros(1, 8, 2, dtype=i32), torch.zeros(1, dtype=i32)
    block_runs_reference(batch, runs=runs, counts=counts)
    segments, num_segments = torch.zeros(1, 8, 4, dtype=i32), torch.zeros(1, dtype=i32)
    ranges = torch.tensor([[NUM_PREFILLED - 32, length + 2]], dtype=i32)
    load_plan_reference(batch, ranges, segments=segments, counts=num_segments)
    last = length - 1
    rows = [
        ("block_table", f"[0, {LAST}] = {table.block_table[0, LAST]}, seq_lens[0] = {table.seq_lens[0]}"),
        (
            "csr",
            f"kv_indptr = {csr.indptr.tolist()}, kv_indices[{LAST}] = {csr.indices[LAST]}, "
            f"kv_last_page_len = {csr.last_page_len.tolist()}",
        ),
        ("token_table", f"[0, {last}] = {tokens[0, last]}"),
        ("block_offsets", f"[0, 0, :, {LAST}] = {offsets[0, 0, :, LAST].tolist()} (K, V; scale 2, shifts 0 and 1)"),
        (
            "cells",
            f"id {cells.ids[last]}, position {cells.positions[last]}, row {cells.rows[last]}; {cells.indptr[1]} cells",
        ),
        (
            "runs",
            f"{[tuple(run) for run in runs[0, : counts[0]].tolist()]}; "
            f"tokens {ranges[0, 0]}..{ranges[0, 1] - 1} load as "
            f"{[tuple(segment) for segment in segments[0, : num_segments[0]].tolist()]}",
        ),
    ]
    body = "\n".join(f"| `{name}` | {text} |" for name, text in rows)
    return f"| dialect | row {ROW}, position {last} |\n|---|---|\n{body}"


def steady_bytes(arrays: TableArrays, context: int) -> tuple[int, int]:
    """Return mean and most bytes that a decode step of 256 rows copies, over one block's worth of steps."""
    rows, ones = np.arange(BATCH), np.ones(BATCH, dtype=np.int64)
    computed = context - 64 + rows % BLOCK_SIZE
    staging = np.zeros(staging_words(arrays, BATCH, 8192), dtype=np.int32)
    for group, shape in enumerate(arrays.shapes):
        end = computed // BLOCK_SIZE + 1
        first = np.maximum(end - shape.width + 8, 0) if shape.mode is SlotMappingMode.SLIDING_WINDOW else 0 * end
        arrays.set_rows(arrays.pairs(group, rows), first, end - first, _ids(int((end - first).sum())))
    arrays.take_dirty()
    copied = []
    for _ in range(BLOCK_SIZE):
        for group, shape in enumerate(arrays.shapes):
            pairs = arrays.pairs(group, rows[computed // BLOCK_SIZE >= arrays.count[group]])
            if shape.mode is SlotMappingMode.SLIDING_WINDOW:
                arrays.drop_head(pairs, arrays.first[group, pairs % BATCH] + 1)
            arrays.append(pairs, 1, _ids(len(pairs)))
        copied.append(4 * pack(arrays, arrays.take_dirty(), StepBatch.of(rows, ones, computed), staging))
        computed = computed + 1
    return round(sum(copied) / BLOCK_SIZE), max(copied)


def _ids(count: int) -> NDArray[np.int32]:
    return np.arange(1, count + 1, dtype=np.int32)


def byte_accounts() -> str:
    """Return the bytes of tables and steps beside those of a design that copies whole rows."""
    lines = [
        "| 256 rows, block size 16 | table | copied a decode step (most) | at 50 steps/s | copying whole rows |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, context in (("one full group, 32K", 32768), ("one full group, 1M", 1048576)):
        lines.append(account(name, TableArrays(BATCH, [TableShape(context // BLOCK_SIZE, BLOCK_SIZE)]), context))
    for context in (131072, 1048576):
        limits = BatchLimits(max_num_seqs=BATCH, max_model_len=context, max_num_batched_tokens=8192)
        plan = plan_cache(ModelSpec.load("gemma-3-27b"), 2**38, limits, block_size=BLOCK_SIZE)
        name = f"Gemma-3-27B, {len(plan.groups)} groups, {context:,} tokens"
        lines.append(account(name, make_block_tables(plan)[0].arrays, context))
    return "\n".join(lines)


def account(name: str, arrays: TableArrays, context: int) -> str:
    """Return one row of the accounts."""
    mean, most = steady_bytes(arrays, context)
    whole_rows = sum(shape.width for shape in arrays.shapes) * BATCH * 4
    return (
        f"| {name} | {arrays.words.nbytes / 2**20:.2f} MiB | {mean / 1024:.1f} KiB ({most / 1024:.1f}) | "
        f"{mean * STEPS_PER_SECOND / 2**20:.2f} MiB/s | {whole_rows * STEPS_PER_SECOND / 2**20:,.0f} MiB/s |"
    )


def parts() -> dict[str, str]:
    """Return the generated parts of the page by name."""
    return {
        "example": f"```text\n{worked_example()}\n```",
        "dialects": dialects(),
        "bytes": byte_accounts(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, write or check the parts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-docs", action="store_true", help=f"put the parts into {DOCS.name}")
    parser.add_argument("--check", action="store_true", help=f"exit 1 if {DOCS.name} holds other parts")
    options = parser.parse_args(arguments)
    made = parts()
    if not options.write_docs and not options.check:
        print("\n\n".join(made.values()))
        return 0
    page = DOCS.read_text()
    new = page
    for name, text in made.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        new = re.sub(f"{begin}.*?{end}", lambda _, t=text, b=begin, e=end: f"{b}\n{t}\n{e}", new, flags=re.DOTALL)
    if options.write_docs:
        DOCS.write_text(new)
    elif new != page:
        print(f"{DOCS.name}: differs from what the code gives; run with --write-docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
