"""Chunked attention for kernels that know only causal masks: one virtual row for every chunk that has queries.

    chunk 8, a row computes positions 5..18      virtual row     0       1        2
                                                 queries        5..7    8..15    16..18
                                                 keys           0..7    8..15    16..18

A virtual row's queries stay where they are in the flat batch; its keys are those of its chunk, in a block table of its
own.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv._torch import torch
from hybridkv.step_batch import StepBatch
from hybridkv_kernels.constants import NULL_BLOCK_ID


@dataclass(frozen=True)
class ChunkRows:
    """The virtual rows of one batch.

    Shapes (V virtual rows):
        batch_positions  [V] int64, the batch position each belongs to
        rows             [V] int64, its table row
        query_start_loc  [V+1] int32, token range of each in the flat batch
        seq_lens         [V] int32, keys of each: those of its chunk up to its last query
        first_ordinals   [V] int64, the ordinal at which its chunk begins
    """

    batch_positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    query_start_loc: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    first_ordinals: NDArray[np.int64]
    blocks_per_chunk: int
    block_size: int

    @classmethod
    def of(cls, batch: StepBatch, chunk: int, block_size: int) -> "ChunkRows":
        """Split the live batch positions of a step at the chunks' boundaries.

        Units: chunk and block_size in tokens
        Raises: ValueError for a chunk that is no multiple of the block size: its keys would begin inside a block.
        """
        if chunk < 1 or chunk % block_size:
            raise ValueError(f"chunk: got {chunk} tokens, expected a multiple of the block size {block_size}")
        first, last = batch.computed // chunk, (batch.seq_lens - 1) // chunk
        counts = last - first + 1
        index = np.repeat(np.arange(batch.num_reqs), counts)
        ends = counts.cumsum()
        chunks = np.arange(len(index)) + np.repeat(first - ends + counts, counts)
        key_ends = np.minimum(batch.seq_lens[index], (chunks + 1) * chunk)
        query_begins = np.maximum(batch.computed[index], chunks * chunk)
        starts = np.zeros(len(index) + 1, dtype=np.int32)
        (key_ends - query_begins).cumsum(out=starts[1:])
        return cls(
            batch_positions=index,
            rows=batch.rows[index],
            query_start_loc=starts,
            seq_lens=(key_ends - chunks * chunk).astype(np.int32),
            first_ordinals=chunks * (chunk // block_size),
            blocks_per_chunk=chunk // block_size,
            block_size=block_size,
        )

    def block_table(self, table: torch.Tensor, first: NDArray[np.int32], count: NDArray[np.int32]) -> torch.Tensor:
        """Gather the virtual rows' blocks from a group's committed table.

        The live ranges are the host's `first_block_per_row` and `num_blocks_per_row` of the group as they were when the
        table was committed: in a ring, the column of an ordinal outside them holds another ordinal's block.

        Shapes: table [num_rows, width] int32, ordinal j in column `j % width`; first, count [num_rows] int32, row r has
            the ordinals `[first[r], count[r])`; returns [V, blocks_per_chunk] int32, null past the last key and where
            the row has no block
        """
        columns = np.arange(self.blocks_per_chunk)
        ordinals = self.first_ordinals[:, None] + columns
        live = columns * self.block_size < self.seq_lens[:, None]
        live &= (ordinals >= first[self.rows, None]) & (ordinals < count[self.rows, None])
        ordinals = np.where(live, ordinals, 0)
        rows, places, mask = (
            torch.from_numpy(array).to(table.device) for array in (self.rows[:, None], ordinals % table.shape[1], ~live)
        )
        return table[rows, places].masked_fill_(mask, NULL_BLOCK_ID)
