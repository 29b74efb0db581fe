"""Claims about virtual rows of chunked attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.block_table import BlockTable
from hybridkv.chunk_rows import ChunkRows
from hybridkv.multi_group import MultiGroupBlockTable
from hybridkv.plan import SlotMappingMode
from hybridkv.step_batch import StepBatch
from hybridkv_kernels.paged_attention_reference import AttentionParams, PagedBatch, paged_attention_reference

CHUNK, BLOCK = 8, 4


def test_the_rows_drawn_in_the_module() -> None:
    """Positions 5..18 with chunks of 8 are three virtual rows; a decode inside a chunk is one."""
    rows = ChunkRows.of(StepBatch.of([2, 0], [14, 1], [5, 20]), CHUNK, BLOCK)
    assert rows.rows.tolist() == [2, 2, 2, 0]
    assert rows.batch_positions.tolist() == [0, 0, 0, 1]
    assert rows.query_start_loc.tolist() == [0, 3, 11, 14, 15]
    assert rows.seq_lens.tolist() == [8, 8, 3, 5]
    assert rows.first_ordinals.tolist() == [0, 2, 4, 4]
    table = torch.arange(1, 25, dtype=torch.int32).view(3, 8)
    live = np.zeros(3, dtype=np.int32), np.full(3, 8, dtype=np.int32)
    # Row 0 decodes at position 20, in its chunk of positions 16..23.
    assert rows.block_table(table, *live).tolist() == [[17, 18], [19, 20], [21, 0], [5, 6]]
    assert ChunkRows.of(StepBatch.of([], [], []), CHUNK, BLOCK).block_table(table, *live).shape == (0, 2)


def test_dead_blocks_of_a_ring_are_null() -> None:
    """In a ring that wrapped, ordinals dropped or not yet there are null, not the block that now has their column."""
    ring = BlockTable(2, 3, BLOCK, SlotMappingMode.SLIDING_WINDOW)
    ring.add_row(1, [14, 15, 16], 4)  # ordinals 4..6 in columns 1, 2, 0
    tables = MultiGroupBlockTable([ring], 32)
    tables.commit()
    # Positions 12..30: the chunks of ordinals 2..3 (dead), 4..5 (live), 6..7 (the second is not there).
    rows = ChunkRows.of(StepBatch.of([1], [19], [12]), CHUNK, BLOCK)
    assert rows.first_ordinals.tolist() == [2, 4, 6]
    live = ring.first_block_per_row, ring.num_blocks_per_row
    assert rows.block_table(tables.block_table(0), *live).tolist() == [[0, 0], [14, 15], [16, 0]]


def test_a_chunk_must_be_whole_blocks() -> None:
    """A chunk that begins inside a block cannot have a table of its own."""
    with pytest.raises(ValueError, match="chunk: got 10 tokens, expected a multiple of the block size 4"):
        ChunkRows.of(StepBatch.of([0], [1], [0]), 10, BLOCK)


@settings(max_examples=30, deadline=None)
@given(
    work=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=3), seed=st.integers(0, 99)
)
def test_causal_attention_over_virtual_rows_is_chunked_attention(work: list[tuple[int, int]], seed: int) -> None:
    """A kernel with a causal mask, given the virtual rows, returns what one with a chunked mask returns."""
    generator = torch.Generator().manual_seed(seed)
    batch = StepBatch.of(range(len(work)), [count for count, _ in work], [computed for _, computed in work])
    width, num_blocks = 10, 10 * len(work) + 1
    table = (torch.randperm(num_blocks - 1, generator=generator) + 1).to(torch.int32).view(len(work), width)
    key, value = (torch.randn(num_blocks, BLOCK, 1, 4, generator=generator) for _ in range(2))
    query = torch.randn(batch.num_tokens, 2, 4, generator=generator)
    rows = ChunkRows.of(batch, CHUNK, BLOCK)

    def attend(table: torch.Tensor, starts: np.ndarray, seq_lens: np.ndarray, chunk: int | None) -> torch.Tensor:
        paged = PagedBatch(
            block_table=table,
            rows=torch.arange(len(seq_lens), dtype=torch.int32),
            query_start_loc=torch.from_numpy(starts.astype(np.int32)),
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        )
        params = AttentionParams(scale=0.5, width=table.shape[1], max_query_len=int(np.diff(starts).max()), chunk=chunk)
        out = torch.empty_like(query)
        paged_attention_reference(query, key, value, paged, params, out=out)
        return out

    expected = attend(table, batch.query_starts, batch.seq_lens, CHUNK)
    live = np.zeros(len(work), dtype=np.int32), np.full(len(work), width, dtype=np.int32)
    got = attend(rows.block_table(table, *live), rows.query_start_loc, rows.seq_lens, None)
    assert torch.equal(got, expected)
