"""Whatever the dialect, a row's token lands on the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.block_table import BlockTable
from hybridkv.multi_group import MultiGroupBlockTable, TableStep
from hybridkv.page_index import PageIndexRequest
from hybridkv.plan import SlotMappingMode
from hybridkv.units import cdiv
from hybridkv_kernels.block_offsets import block_offsets, block_offsets_torch
from hybridkv_kernels.block_runs import block_runs, block_runs_torch
from hybridkv_kernels.cells import Cells, cells, cells_torch
from hybridkv_kernels.group_rows import GroupRows
from hybridkv_kernels.kernel_blocks import kernel_block_table, kernel_block_table_torch
from hybridkv_kernels.load_plan import load_plan, load_plan_torch
from hybridkv_kernels.token_table import token_table, token_table_torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_ROWS = 4
TOKEN_BYTES = 10  # the keys of one token
KEY_SHIFT, VALUE_SHIFT, NUM_PLANES = 1, 2, 3  # planes of a kernel block: another layer's, this one's K, this one's V


class Ops(NamedTuple):
    """One implementation of every converter."""

    token_table: Callable[..., None]
    block_offsets: Callable[..., None]
    cells: Callable[..., None]
    block_runs: Callable[..., None]
    load_plan: Callable[..., None]
    kernel_block_table: Callable[..., None]


TORCH = Ops(
    token_table_torch, block_offsets_torch, cells_torch, block_runs_torch, load_plan_torch, kernel_block_table_torch
)
TRITON = Ops(token_table, block_offsets, cells, block_runs, load_plan, kernel_block_table)


def on_device(values: Sequence[int]) -> torch.Tensor:
    """Make an int32 tensor of values."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def poisoned(*shape: int) -> torch.Tensor:
    """Make an int32 tensor to be overwritten."""
    return torch.full(shape, 12345, dtype=torch.int32, device=DEVICE)


@dataclass(frozen=True)
class Case:
    """Rows of one group's committed table; a block is `ratio` kernel blocks, each laid out plane by plane."""

    tables: MultiGroupBlockTable
    group: int
    rows: list[int]
    seq_lens: list[int]
    ratio: int
    ops: Ops

    @property
    def table(self) -> BlockTable:
        """The host's table of the group, the authority."""
        return self.tables.tables[self.group]

    @property
    def kernel_size(self) -> int:
        """Tokens of a kernel block."""
        return self.table.block_size // self.ratio

    @property
    def max_tokens(self) -> int:
        """More tokens than any row has."""
        return max([0, *self.seq_lens]) + 3

    def batch(self) -> GroupRows:
        """The rows as the converters take them."""
        meta = self.tables.arrays.group_metas[self.group]
        return GroupRows(self.tables.words, meta, on_device(self.rows), on_device(self.seq_lens))

    def byte_in_kernel_block(self, kernel_id: int, position: int, shift: int = KEY_SHIFT) -> int:
        """First byte of a token's keys (or of its values) in a kernel block."""
        return ((kernel_id * NUM_PLANES + shift) * self.kernel_size + position % self.kernel_size) * TOKEN_BYTES

    def byte_of_slot(self, slot: int) -> int:
        """First byte of a slot's keys."""
        return self.byte_in_kernel_block(slot // self.kernel_size, slot)

    def candidates(self, index: int) -> range:
        """Positions of a batch position that may have keys, dead ones included."""
        return range(self.seq_lens[index] if self.rows[index] >= 0 else 0)


Bytes = list[dict[int, int]]
"""For each batch position, the first byte of the keys of every token that it can reach."""


def by_host_table(case: Case) -> Bytes:
    """What is true: the slot of every token whose block the host's table holds."""
    found = []
    for index, row in enumerate(case.rows):
        held = dict(enumerate(case.table.row_block_ids(row), case.table.first_block_per_row[row])) if row >= 0 else {}
        size = case.table.block_size
        found.append(
            {
                position: case.byte_of_slot(int(held[position // size]) * size + position % size)
                for position in case.candidates(index)
                if position // size in held
            }
        )
    return found


def by_token_table(case: Case) -> Bytes:
    """The table of slots, 0 where a token has none."""
    out = poisoned(len(case.rows), case.max_tokens)
    case.ops.token_table(case.batch(), out=out)
    return [
        {position: case.byte_of_slot(slot) for position, slot in enumerate(slots) if slot} for slots in out.tolist()
    ]


def by_cells(case: Case) -> Bytes:
    """The list of cells, its batch positions from indptr."""
    out = Cells.empty(sum(case.seq_lens) + 3, len(case.rows), DEVICE)
    case.ops.cells(case.batch(), out=out)
    ids, positions, rows, ends = (t.tolist() for t in (out.ids, out.positions, out.rows, out.indptr))
    for index, row in enumerate(case.rows):
        assert rows[ends[index] : ends[index + 1]] == [row] * (ends[index + 1] - ends[index])
    return [{positions[c]: case.byte_of_slot(ids[c]) for c in range(begin, end)} for begin, end in pairwise(ends)]


def by_block_offsets(case: Case, *, window_local: bool = False) -> Bytes:
    """The K offset of each kernel block, with V where it belongs beside it."""
    out = poisoned(1, len(case.rows), 2, cdiv(case.max_tokens, case.kernel_size) + 2)
    pools = torch.tensor([[NUM_PLANES, KEY_SHIFT, VALUE_SHIFT]], device=DEVICE)
    case.ops.block_offsets(case.batch(), pools, ratio=case.ratio, window_local=window_local, out=out)
    found: Bytes = []
    for index, (keys, values) in enumerate(out[0].tolist()):
        base = int(case.table.first_block_per_row[case.rows[index]]) * case.ratio if window_local else 0
        found.append({})
        for position in case.candidates(index):
            column = position // case.kernel_size - base
            if column < 0 or keys[column] == KEY_SHIFT:
                continue
            assert values[column] - keys[column] == VALUE_SHIFT - KEY_SHIFT
            token = keys[column] * case.kernel_size + position % case.kernel_size
            found[-1][position] = token * TOKEN_BYTES
    return found


def by_window_local_block_offsets(case: Case) -> Bytes:
    """Columns that count from the first live ordinal."""
    return by_block_offsets(case, window_local=True)


def by_runs(case: Case) -> Bytes:
    """Runs of kernel blocks from the first live ordinal on."""
    runs, counts = poisoned(len(case.rows), case.table.width, 2), poisoned(len(case.rows))
    case.ops.block_runs(case.batch(), ratio=case.ratio, runs=runs, counts=counts)
    found: Bytes = []
    for index, (row_runs, count) in enumerate(zip(runs.tolist(), counts.tolist(), strict=True)):
        kernel_ids = [start + step for start, length in row_runs[:count] for step in range(length)]
        first = int(case.table.first_block_per_row[case.rows[index]]) * case.table.block_size
        found.append(
            {
                position: case.byte_in_kernel_block(kernel_ids[(position - first) // case.kernel_size], position)
                for position in case.candidates(index)
                if 0 <= position - first < len(kernel_ids) * case.kernel_size
            }
        )
    return found


def by_load_plan(case: Case) -> Bytes:
    """The copies of each row's tokens."""
    ranges = [(0, seq_len) for seq_len in case.seq_lens]
    segments, counts = poisoned(len(case.rows), case.table.width + 3, 4), poisoned(len(case.rows))
    case.ops.load_plan(case.batch(), on_device(ranges).view(-1, 2), segments=segments, counts=counts)
    found: Bytes = []
    for row_segments, count in zip(segments.tolist(), counts.tolist(), strict=True):
        found.append({})
        for source, begin, end, destination in row_segments[:count]:
            for token in range(begin, end) if source > 0 else ():
                slot = source * case.table.block_size + token
                found[-1][destination + token - begin] = case.byte_of_slot(slot)
    return found


def by_kernel_block_table(case: Case) -> Bytes:
    """The block table of kernel blocks, a ring of `width * ratio` columns."""
    num_columns = case.table.width * case.ratio
    out = poisoned(NUM_ROWS, num_columns)
    case.ops.kernel_block_table(case.tables.block_table(case.group), case.ratio, out=out)
    found: Bytes = []
    for index, row in enumerate(case.rows):
        live = range(0)
        if row >= 0:
            live = range(int(case.table.first_block_per_row[row]), int(case.table.num_blocks_per_row[row]))
        found.append({})
        for position in case.candidates(index):
            if position // case.table.block_size in live:
                kernel_id = int(out[row, position // case.kernel_size % num_columns])
                found[-1][position] = case.byte_in_kernel_block(kernel_id, position)
    return found


def scheduled(case: Case) -> list[int]:
    """Batch positions that a step may have: those of rows with tokens."""
    return [index for index, row in enumerate(case.rows) if row >= 0 and case.seq_lens[index]]


def by_slot_mapping(case: Case) -> Bytes:
    """The slots of a step that computes every token of every row."""
    found: Bytes = [{} for _ in case.rows]
    for index in scheduled(case):
        step = case.tables.step([case.rows[index]], [case.seq_lens[index]], [0])
        slots = step.slot_mapping[case.group].tolist()
        found[index] = {position: case.byte_of_slot(slot) for position, slot in enumerate(slots) if slot >= 0}
    return found


def by_blocks(case: Case, blocks: Callable[[TableStep, int], tuple[int, list[int]]]) -> Bytes:
    """A first position and the blocks from there on, for each batch position of a decode step."""
    live, size = scheduled(case), case.table.block_size
    rows, lengths = [case.rows[index] for index in live], [case.seq_lens[index] for index in live]
    step = case.tables.step(rows, [1] * len(live), [length - 1 for length in lengths], num_reqs_padded=NUM_ROWS)
    found: Bytes = [{} for _ in case.rows]
    for number, index in enumerate(live):
        first, ids = blocks(step, number)
        for position in case.candidates(index):
            column = (position - first) // size
            if 0 <= column < len(ids) and ids[column]:
                found[index][position] = case.byte_of_slot(ids[column] * size + position % size)
    return found


def by_local_table(case: Case) -> Bytes:
    """The block table by batch position that a step writes."""

    def blocks(step: TableStep, number: int) -> tuple[int, list[int]]:
        table = step.local_table(case.group)
        return int(table.first_positions[number]), table.block_table[number].tolist()

    return by_blocks(case, blocks)


def by_csr(case: Case) -> Bytes:
    """The compressed rows that a step writes; the host's copies of them are equal."""

    def blocks(step: TableStep, number: int) -> tuple[int, list[int]]:
        csr, (indptr, last_page_len) = step.csr(case.group), step.csr_cpu(case.group)
        assert csr.indptr.tolist() == indptr.tolist()
        assert csr.last_page_len.tolist() == last_page_len.tolist()
        first = int(case.table.first_block_per_row[int(step.geometry.rows[number])])
        return first * case.table.block_size, csr.indices[indptr[number] : indptr[number + 1]].tolist()

    return by_blocks(case, blocks)


DIALECTS: dict[str, Callable[[Case], Bytes]] = {
    "slot mapping": by_slot_mapping,
    "block_table": by_local_table,
    "csr": by_csr,
    "token_table": by_token_table,
    "block_offsets": by_block_offsets,
    "block_offsets, window local": by_window_local_block_offsets,
    "cells": by_cells,
    "runs": by_runs,
    "load plan": by_load_plan,
    "block_table of kernel blocks": by_kernel_block_table,
}


def empty_tables(ops: Ops) -> MultiGroupBlockTable:
    """Make the tables of a full group, a ring and a group of states, whose steps run where the converters run."""
    full, ring, states = SlotMappingMode.FULL, SlotMappingMode.SLIDING_WINDOW, SlotMappingMode.NONE
    groups = [BlockTable(NUM_ROWS, 6, 4, full), BlockTable(NUM_ROWS, 3, 2, ring), BlockTable(NUM_ROWS, 1, 1, states)]
    requests = dict.fromkeys(range(2), PageIndexRequest(block_table=True, csr=True))
    return MultiGroupBlockTable(groups, 128, DEVICE, page_indices=requests, use_triton=ops is TRITON)


def draw_tables(draw: st.DrawFn, ops: Ops) -> MultiGroupBlockTable:
    """Make tables with a random history, committed."""
    tables = empty_tables(ops)
    groups = tables.tables
    rows = st.integers(0, NUM_ROWS - 1)
    # Few ids, so that many neighbours in a row are neighbours in memory; most appends run upwards.
    runs = st.builds(lambda start, length: list(range(start, start + length)), st.integers(1, 9), st.integers(0, 3))
    lists = runs | st.lists(st.integers(1, 9), max_size=4)
    for _ in range(draw(st.integers(1, 12))):
        row, other = draw(rows), draw(rows)
        match draw(st.sampled_from(["append", "append", "append", "add", "clear", "move", "swap", "drop", "drop"])):
            case "append" | "add" as verb:
                ids = [draw(lists)[: table.width] for table in groups]
                firsts = draw(st.tuples(st.just(0), st.integers(0, 4), st.just(0)))
                try:
                    tables.append_row(row, ids) if verb == "append" else tables.add_row(row, ids, firsts)
                except ValueError:
                    continue
            case "clear":
                tables.clear_row(row)
            case "move":
                tables.move_row(row, other)
            case "swap":
                tables.swap_row(row, other)
            case "drop":
                first, end = groups[1].first_block_per_row[row], groups[1].num_blocks_per_row[row]
                groups[1].drop_row_head(row, draw(st.integers(int(first), int(end))))
    tables.commit()
    return tables


@st.composite
def histories(draw: st.DrawFn, ops: Ops) -> list[Case]:
    """Draw committed tables with a batch of some of their rows, once for every attention group and ratio."""
    tables = draw_tables(draw, ops)
    rows = draw(st.permutations(range(-1, NUM_ROWS)))[: draw(st.integers(1, NUM_ROWS + 1))]
    found = []
    for group, table in enumerate(tables.tables[:2]):
        ends = [0 if row < 0 else int(table.num_blocks_per_row[row]) * table.block_size for row in rows]
        # One row in three ends inside a block that is reserved ahead, one lacks blocks.
        seq_lens = [max(0, end - draw(st.sampled_from([0, 0, 1, 3, 5, -2]))) for end in ends]
        found += [Case(tables, group, list(rows), seq_lens, ratio, ops) for ratio in (1, 2)]
    return found


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("ops", [TORCH, TRITON], ids=["torch", "triton"])
def test_every_dialect_leads_to_the_bytes_of_wrapped_rings(dialect: str, ops: Ops) -> None:
    """Rings that wrapped, rows out of order, padding, blocks reserved ahead resolve to the host's bytes."""
    tables = empty_tables(ops)
    tables.append_row(0, [[3, 4, 9, 8], [5, 6, 2], [1]])
    tables.add_row(2, [[2, 7, 1], [9, 1, 2], [2]], (0, 4, 0))
    tables.commit()
    for group, seq_lens in enumerate([[9, 99, 14], [13, 99, 6]]):
        for ratio in (1, 2):
            case = Case(tables, group, [2, -1, 0], seq_lens, ratio, ops)
            expected = by_host_table(case)
            assert [len(found) for found in expected] == [[9, 0, 14], [5, 0, 6]][group]
            assert DIALECTS[dialect](case) == expected


@pytest.mark.parametrize("dialect", DIALECTS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_dialect_leads_to_the_same_bytes(dialect: str, data: st.DataObject) -> None:
    """After any history, in every group, a dialect resolves every live token of a row to its bytes and no other."""
    for case in data.draw(histories(TORCH)):
        assert DIALECTS[dialect](case) == by_host_table(case)


@pytest.mark.parametrize("dialect", DIALECTS)
@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_every_dialect_of_the_kernels_leads_to_the_same_bytes(dialect: str, data: st.DataObject) -> None:
    """The kernels' page indices lead to the same bytes as the host's tables."""
    for case in data.draw(histories(TRITON)):
        assert DIALECTS[dialect](case) == by_host_table(case)


def test_states_have_no_page_index() -> None:
    """A group of states is refused: its entries are the states themselves."""
    tables = MultiGroupBlockTable([BlockTable(NUM_ROWS, 1, 1, SlotMappingMode.NONE)], 4, DEVICE)
    with pytest.raises(ValueError, match="a group of states has no tokens"):
        Case(tables, 0, [0], [1], 1, TORCH).batch()
