"""Claims about what a step costs: copies, launches, bytes, memory; counted from outside the tables."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hybridkv.block_table import BlockTable
from hybridkv.limits import BatchLimits
from hybridkv.manager import CacheManager
from hybridkv.multi_group import MultiGroupBlockTable
from hybridkv.plan import SlotMappingMode
from hybridkv.planner import plan_cache
from hybridkv.specs import ModelSpec
from hybridkv.table_arrays import TableShape
from hybridkv_kernels._triton import Launch

FULL, RING, NONE = SlotMappingMode.FULL, SlotMappingMode.SLIDING_WINDOW, SlotMappingMode.NONE
KIB, MIB = 2**10, 2**20
NUM_ROWS = 256


class Counter:
    """Copies into tensors, with their bytes, and kernel launches."""

    def __init__(self) -> None:
        self.num_launches, self.copies = 0, []


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Count every copy between tensors and every launch; kernels do not run."""
    counted = Counter()
    copy = torch.Tensor.copy_

    def counting_copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        counted.copies.append(source.nbytes)
        return copy(target, source, non_blocking)

    def counting_launch(_launch: Launch) -> None:
        counted.num_launches += 1

    monkeypatch.setattr(torch.Tensor, "copy_", counting_copy)
    monkeypatch.setattr(Launch, "run", counting_launch)
    return counted


def mixed_shapes(num_groups: int) -> list[TableShape]:
    """Full, ring and state groups in turns."""
    kinds = [TableShape(64, 16, FULL), TableShape(9, 16, RING), TableShape(2, 1, NONE)]
    return [kinds[group % 3] for group in range(num_groups)]


@pytest.mark.parametrize("num_groups", [1, 2, 8, 32])
def test_one_copy_and_one_launch(num_groups: int, counter: Counter) -> None:
    """Prefill, decode and a step after moves and clears take one copy and one launch, whatever the groups."""
    tables = MultiGroupBlockTable(BlockTable.of_groups(8, mixed_shapes(num_groups)), 256, use_triton=True)
    ids = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]] * 11
    for row in range(4):
        tables.append_row(row, ids[:num_groups])
    tables.step([0, 1, 2, 3], [60, 1, 64, 3], [0, 59, 0, 0])
    assert (counter.num_launches, len(counter.copies)) == (1, 1)
    tables.step([0, 1, 2, 3], [1] * 4, [60, 60, 60, 60], num_reqs_padded=8, num_tokens_padded=8)
    assert (counter.num_launches, len(counter.copies)) == (2, 2)
    tables.clear_row(0)
    tables.move_row(3, 5)
    tables.swap_row(1, 2)
    tables.step([5], [1], [61])
    assert (counter.num_launches, len(counter.copies)) == (3, 3)
    assert counter.copies == [4 * words for words in counter_words(counter)]


def counter_words(counter: Counter) -> list[int]:
    """Copied int32 words; a copy of anything else would not divide."""
    assert all(nbytes % 4 == 0 for nbytes in counter.copies)
    return [nbytes // 4 for nbytes in counter.copies]


def gemma_tables(max_model_len: int) -> tuple[CacheManager, MultiGroupBlockTable]:
    """256 rows of Gemma-3-27B."""
    limits = BatchLimits(max_num_seqs=NUM_ROWS, max_model_len=max_model_len, max_num_batched_tokens=8192)
    plan = plan_cache(ModelSpec.load("gemma-3-27b"), 2**38, limits, block_size=16)
    manager = CacheManager(plan)
    return manager, MultiGroupBlockTable(manager.tables, limits.max_num_batched_tokens, use_triton=True)


@pytest.mark.parametrize("max_model_len", [131_072, 1_048_576])
def test_a_steady_decode_copies_16_kib_at_most(max_model_len: int, counter: Counter) -> None:
    """256 rows of Gemma-3-27B copy at most 16 KiB in a decode step, at 131,072 tokens as at 1M."""
    manager, tables = gemma_tables(max_model_len)
    rows = [manager.admit(1 + row).admitted_row for row in range(NUM_ROWS)]
    scheduled, copied = np.ones(NUM_ROWS, dtype=np.int64), []
    for row in rows:
        manager.reserve([row], [1 + 8 * row])
        manager.commit([row], [1 + 8 * row])
    for step in range(40):
        manager.reserve(rows, scheduled)
        counter.copies.clear()
        tables.step(rows, scheduled, manager.num_computed_tokens[rows])
        manager.commit(rows, scheduled)
        if step:
            copied.append(sum(counter.copies))
    assert 3 * KIB < max(copied) <= 16 * KIB
    assert tables.num_rounds == 1


def test_device_tables_of_gemma_take_12_mib_at_most() -> None:
    """256 rows of Gemma-3-27B at 131,072 tokens keep at most 12 MiB of tables and step buffers on the device."""
    _, tables = gemma_tables(131_072)
    on_device = [tables.words, *(tensor for _, tensor in tables._buffers.named())]
    on_device += [buffer.tensor for buffer in tables._path._device]
    assert sum(tensor.nbytes for tensor in on_device) <= 12 * MIB


@pytest.mark.parametrize("use_triton", [False, True])
def test_a_steady_step_leaves_no_memory_behind(use_triton: bool, counter: Counter, host_path: str) -> None:
    """1,000 decode steps, with appended blocks and dropped heads, end with the memory they began with."""
    tables = MultiGroupBlockTable(BlockTable.of_groups(8, mixed_shapes(3)), 64, use_triton=use_triton)
    rows, ones = np.arange(8), np.ones(8, dtype=np.int64)

    def decode(first: int, last: int) -> None:
        for position in range(first, last):
            ordinal = position // 16
            if position % 16 == 0:
                counts = np.array([[ordinal < 64] * 8, [True] * 8, [position == 0] * 8]) * 1
                counts[2] *= 2
                tables.append_rows(rows, counts, np.ones(counts.sum(), dtype=np.int32))
                if ordinal >= 4:
                    tables.tables[1].drop_rows_head(rows, np.full(8, ordinal - 4))
            tables.step(rows, ones, np.full(8, position))
            counter.copies.clear()

    decode(0, 300)
    tracemalloc.start()
    decode(300, 600)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    decode(600, 1600)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    # A kept object a step would be 50 KiB; numpy's own cache of small arrays moves a few.
    assert grown < 24 * KIB
