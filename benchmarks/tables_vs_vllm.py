"""Slots and tables compared exactly with those of vLLM's own kernels, under triton's interpreter.

    python benchmarks/tables_vs_vllm.py --peer DIR [--histories 40]        DIR as for `tables.py`

Random histories of three groups of different block sizes (append, replace, clear, move, swap) run through our tables,
V1's MultiGroupBlockTable, V2's BlockTables; after each, a random batch of rows asks for slots of random ranges of
positions. Compared, without tolerance, are the slots of every token in every group, for 1 to 4 context-parallel ranks,
every rank of them, every interleave that divides the block sizes; without ranks, also the window's part of the table
that V2 gathers. The interpreter runs the kernels' Python, not the code that a GPU would get.

Exits 1 if anything differs or vLLM does not import.
"""

import argparse
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BLOCK_SIZES = (16, 32, 48)
INTERLEAVES = (1, 4, 16)
NUM_ROWS, WIDTH, WINDOW, MAX_TOKENS = 6, 24, 100, 64


@dataclass(frozen=True)
class Ranks:
    """One of `num_ranks` ranks that share the tokens of a sequence in turns of `interleave` tokens."""

    num_ranks: int
    rank: int
    interleave: int


@dataclass(frozen=True)
class Batch:
    """Row `rows[i]` computes `query_lens[i]` tokens from position `num_computed[i]` on; int32 arrays `[R]`."""

    rows: NDArray[np.int32]
    query_lens: NDArray[np.int32]
    num_computed: NDArray[np.int32]

    @property
    def starts(self) -> NDArray[np.int32]:
        """Return `[R+1]`: where each row's tokens start."""
        return np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)

    @property
    def positions(self) -> NDArray[np.int64]:
        """Return `[T]`."""
        ranges = [np.arange(n) + start for n, start in zip(self.query_lens, self.num_computed, strict=True)]
        return np.concatenate(ranges).astype(np.int64)


class Ours:
    """Our tables of three groups, on one rank; by turns its slots come from the kernel and from numpy."""

    def __init__(self, ranks: Ranks, use_triton: bool) -> None:
        from hybridkv.block_table import BlockTable
        from hybridkv.multi_group import MultiGroupBlockTable
        from hybridkv.plan import SlotMappingMode
        from hybridkv.table_arrays import TableShape

        self.ranks = ranks
        share = SlotMappingMode.FULL, ranks.num_ranks, ranks.rank, ranks.interleave
        shapes = [TableShape(WIDTH, size, *share) for size in BLOCK_SIZES]
        tables = BlockTable.of_groups(NUM_ROWS, shapes)
        self.tables = MultiGroupBlockTable(tables, MAX_TOKENS, use_triton=use_triton)

    def slots(self, batch: Batch) -> NDArray[np.int64]:
        """Return `[G, T]`."""
        return self.tables.step(batch.rows, batch.query_lens, batch.num_computed).slot_mapping.numpy()


class Peers:
    """V1 and V2 with the same rows."""

    def __init__(self, modules: tuple, ranks: Ranks) -> None:
        import torch

        self._torch, self.ranks, v1, v2 = torch, ranks, modules[0], modules[1]
        cpu, num_groups = torch.device("cpu"), len(BLOCK_SIZES)
        widths = [WIDTH] * num_groups
        self.v1 = v1.MultiGroupBlockTable(
            NUM_ROWS, MAX_TOKENS, False, cpu, list(BLOCK_SIZES), widths, cp_kv_cache_interleave_size=ranks.interleave
        )
        for table in self.v1.block_tables:
            # What an initialised process group would have told it.
            table.dcp_world_size, table.dcp_rank = ranks.num_ranks, ranks.rank
        self.v2 = v2.BlockTables(
            list(BLOCK_SIZES),
            NUM_ROWS,
            MAX_TOKENS,
            widths,
            cpu,
            *(ranks.num_ranks, ranks.rank, ranks.interleave),
            sliding_window_reach=[0] * (num_groups - 1) + [WINDOW - 1],
        )

    def slots(self, batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return `[G, T]` of V1's kernel, then of V2's."""
        torch, num_reqs = self._torch, len(batch.rows)
        starts, positions = torch.from_numpy(batch.starts), torch.from_numpy(batch.positions)
        # V1 has no map of batch positions to rows: the kernel gets a table in the order of the batch.
        self.v1.commit_block_table(NUM_ROWS)
        for table in self.v1.block_tables:
            table.block_table.gpu[:num_reqs] = table.block_table.cpu[torch.from_numpy(batch.rows).long()]
        self.v1.compute_slot_mapping(num_reqs, starts, positions)
        by_v1 = np.stack([table.slot_mapping.gpu.numpy()[: len(positions)] for table in self.v1.block_tables])
        self.v2.apply_staged_writes()
        by_v2 = self.v2.compute_slot_mappings(torch.from_numpy(batch.rows), starts, positions, len(positions))
        return by_v1, by_v2.numpy()

    def gathered(self, num_computed: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        """Return V2's tables `[NUM_ROWS, width]` of all rows, what the window leaves behind nulled."""
        torch = self._torch
        rows = torch.arange(NUM_ROWS, dtype=torch.int32)
        computed = torch.from_numpy(num_computed)
        return [table.numpy() for table in self.v2.gather_block_tables(rows, NUM_ROWS, num_computed_tokens=computed)]


def random_operation(ours: Ours, peers: Peers, rng: np.random.Generator) -> None:
    """Do one thing to a row of all three."""
    counts = ours.tables.num_blocks_per_row
    row, other = rng.choice(NUM_ROWS, 2, replace=False).tolist()
    verb = rng.choice(["append", "append", "append", "replace", "clear", "move", "swap"])
    if verb in ("append", "replace"):
        room = WIDTH - (counts[:, row].max() if verb == "append" else 0)
        ids = [rng.integers(1, 2**20, rng.integers(0, room + 1)).tolist() for _ in BLOCK_SIZES]
        (ours.tables.append_row if verb == "append" else ours.tables.add_row)(row, ids)
        (peers.v1.append_row if verb == "append" else peers.v1.add_row)(tuple(ids), row)
        peers.v2.append_block_ids(row, tuple(ids), overwrite=verb == "replace")
        return
    if verb == "clear":
        ours.tables.clear_row(row)
        peers.v1.clear_row(row)
        changed = [row]
    elif verb == "move":
        ours.tables.move_row(row, other)
        peers.v1.clear_row(other)
        peers.v1.move_row(row, other)
        changed = [row, other]
    else:
        ours.tables.swap_row(row, other)
        peers.v1.swap_row(row, other)
        changed = [row, other]
    # V2 moves nothing, its requests stay: the rows are written again.
    for row_idx in changed:
        ids = [table.row_block_ids(row_idx).tolist() for table in ours.tables.tables]
        peers.v2.append_block_ids(row_idx, tuple(ids), overwrite=True)
        # A write goes through at once: one launch may not write a row twice.
        peers.v2.apply_staged_writes()


def random_batch(ours: Ours, rng: np.random.Generator) -> Batch | None:
    """Draw rows with tokens in blocks that every group holds; None where no row has any."""
    sizes = np.array(BLOCK_SIZES)[:, None] * ours.ranks.num_ranks
    capacity = (ours.tables.num_blocks_per_row * sizes).min(axis=0)
    rows = rng.permutation(np.flatnonzero(capacity))[: rng.integers(1, NUM_ROWS + 1)]
    if not len(rows):
        return None
    query_lens = np.minimum(rng.integers(1, MAX_TOKENS // NUM_ROWS + 1, len(rows)), capacity[rows])
    num_computed = rng.integers(0, capacity[rows] - query_lens + 1)
    return Batch(rows.astype(np.int32), query_lens.astype(np.int32), num_computed.astype(np.int32))


def compare_history(modules: tuple, ranks: Ranks, seed: int, num_operations: int) -> int:
    """Run one history; return how many slots and table entries were compared.

    Raises: AssertionError where anything differs.
    """
    rng = np.random.default_rng(seed)
    ours, peers = Ours(ranks, use_triton=seed % 2 == 1), Peers(modules, ranks)
    num_compared = 0
    for _ in range(num_operations):
        random_operation(ours, peers, rng)
        batch = random_batch(ours, rng)
        if batch is None:
            continue
        expected = ours.slots(batch)
        for slots in peers.slots(batch):
            np.testing.assert_array_equal(slots, expected, f"{ranks}, history {seed}")
            num_compared += slots.size
    if ranks.num_ranks == 1:
        num_compared += _compare_window(ours, peers, rng)
    return num_compared


def _compare_window(ours: Ours, peers: Peers, rng: np.random.Generator) -> int:
    """Let rows of the last group advance; compare what is left of the window in both."""
    window_group = len(BLOCK_SIZES) - 1
    counts = ours.tables.num_blocks_per_row
    num_computed = rng.integers(0, counts[window_group] * BLOCK_SIZES[window_group] + 1).astype(np.int32)
    gathered = peers.gathered(num_computed)
    first_blocks = np.maximum(num_computed.astype(np.int64) - WINDOW + 1, 0) // BLOCK_SIZES[window_group]
    ours.tables.tables[window_group].drop_rows_head(np.arange(NUM_ROWS), first_blocks)
    ours.tables.commit()
    num_compared = 0
    for group, table in enumerate(gathered):
        for row, count in enumerate(counts[group]):
            np.testing.assert_array_equal(table[row, :count], ours.tables.block_table_cpu(group)[row, :count])
            num_compared += int(count)
    return num_compared


def accept_masks_of_bytes() -> None:
    """Let the interpreter load and store under a mask that `|` made: it holds that one as bytes of 0, 1."""
    from triton.runtime.interpreter import InterpreterBuilder

    for name in ("create_masked_load", "create_masked_store"):
        function = getattr(InterpreterBuilder, name)
        mask_idx = list(inspect.signature(function).parameters).index("mask")

        def with_bool(*args: object, function: Callable = function, mask_idx: int = mask_idx) -> object:
            args[mask_idx].data = args[mask_idx].data.astype(bool)
            return function(*args)

        setattr(InterpreterBuilder, name, with_bool)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, metavar="DIR", required=True, help="folder that make_peer_env.py made")
    parser.add_argument("--histories", type=int, default=1, help="random histories of each rank and interleave")
    parser.add_argument("--operations", type=int, default=8, help="operations of a history")
    arguments = parser.parse_args(argv)
    # Before triton is imported, by whatever.
    os.environ["TRITON_INTERPRET"] = "1"
    from vllm_tables import import_vllm

    accept_masks_of_bytes()
    try:
        modules = import_vllm(arguments.peer, has_kernels=True)
    except ImportError as error:
        print(f"--peer: got {arguments.peer}, vLLM does not import from it ({error})", file=sys.stderr)
        return 1
    seeds = itertools.count()
    total = 0
    for num_ranks, interleave in itertools.product((1, 2, 3, 4), INTERLEAVES):
        for rank, _ in itertools.product(range(num_ranks), range(arguments.histories)):
            ranks = Ranks(num_ranks, rank, interleave)
            try:
                total += compare_history(modules, ranks, next(seeds), arguments.operations)
            except AssertionError as error:
                print(error, file=sys.stderr)
                return 1
        print(f"{num_ranks} ranks, interleave {interleave}: equal, {total} values so far", file=sys.stderr)
    print(f"equal: {total} slots and table entries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
