"""Claims about the step: the numpy path and the kernel equal the loop over tokens, whatever happened before."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.block_table import BlockTable
from hybridkv.multi_group import ExtraTokens, MultiGroupBlockTable
from hybridkv.page_index import PageIndexRequest, csr_table, local_table
from hybridkv.plan import SlotMappingMode
from hybridkv.staging import pack, staging_words
from hybridkv.step_batch import StepBatch
from hybridkv.table_arrays import TableShape
from hybridkv_kernels import _step_kernel
from hybridkv_kernels._triton import jit, tl
from hybridkv_kernels.step_reference import StepArrays, step_reference
from hybridkv_kernels.step_tables import StepOutputs, check_step
from tests.host_paths import PATHS, using

FULL, RING, NONE = SlotMappingMode.FULL, SlotMappingMode.SLIDING_WINDOW, SlotMappingMode.NONE
NUM_ROWS, MAX_TOKENS, POISON = 4, 24, 12345
SHARES = [(1, 0, 1), (3, 2, 2)]
Work: TypeAlias = list[tuple[int, int, int]]


def shapes(num_ranks: int = 1, rank: int = 0, interleave: int = 1) -> list[TableShape]:
    """A full group (blocks of 4, 6 wide), a ring (blocks of 2, 3 wide), states, a second full group, states."""
    return [
        TableShape(6, 4, FULL, num_ranks, rank, interleave),
        TableShape(3, 2, RING, num_ranks, rank, interleave),
        TableShape(2, 1, NONE),
        TableShape(6, 4, FULL, num_ranks, rank, interleave),
        TableShape(1, 1, NONE),
    ]


def make(
    use_triton: bool, device: torch.device | str = "cpu", *share: int, max_pages: int | None = None
) -> MultiGroupBlockTable:
    """Tables of `shapes` that write every page index, of CSR so many pages."""
    tables = BlockTable.of_groups(NUM_ROWS, shapes(*share))
    indices = {group: PageIndexRequest(True, True, pad_seq_len=group, max_pages=max_pages) for group in range(2)}
    made = MultiGroupBlockTable(tables, MAX_TOKENS, device, page_indices=indices, use_triton=use_triton)
    made._index._tight.clear()  # or batches with more pages would not get as far as the path
    return made


def poisoned(outputs: StepOutputs) -> StepOutputs:
    """Fill outputs with what no step writes."""
    for _, tensor in outputs.named():
        tensor.fill_(POISON if tensor.dtype != torch.bool else True)
    return outputs


class Reference:
    """Tables whose steps are computed by the reference from the packed staging buffer."""

    def __init__(self, *share: int, max_pages: int | None = None) -> None:
        self.tables = make(False, "cpu", *share, max_pages=max_pages)
        self.words = torch.zeros_like(self.tables.words)

    def step(self, work: Work, size_r: int, size_t: int, extra: list[int] | None) -> StepArrays:
        """Return every output of a step over (row, scheduled, computed)."""
        arrays, index = self.tables.arrays, self.tables._index
        batch = StepBatch.of(*(np.array([w[i] for w in work], dtype=np.int64) for i in range(3)))
        staging = np.zeros(staging_words(arrays, NUM_ROWS, MAX_TOKENS), dtype=np.int32)
        pack(arrays, arrays.take_dirty(), batch, staging)
        metas = torch.tensor([meta.as_row() for meta in arrays.group_metas])
        index_metas = torch.tensor([meta.as_row() for meta in index.metas])
        outputs = poisoned(self.tables._allocate().narrowed(size_r, size_t))
        check_step(self.words, metas, index_metas, torch.from_numpy(staging), out=outputs, num_rows=NUM_ROWS)
        step_reference(
            self.words.numpy(),
            metas.numpy(),
            index_metas.numpy(),
            staging,
            None if extra is None else np.array(extra, dtype=np.int32),
            out=outputs.arrays(),
        )
        return outputs.arrays()


def run(tables: MultiGroupBlockTable, work: Work, size_r: int, size_t: int, extra: list[int] | None) -> StepArrays:
    """Return every output of a step, from poisoned buffers."""
    poisoned(tables._outputs_of(size_r, size_t))
    columns = [np.array([w[i] for w in work], dtype=np.int32) for i in range(3)]
    on_device = None
    if extra is not None:
        on_device = ExtraTokens(torch.tensor(extra, dtype=torch.int32, device=tables.device), max(extra))
    tables.step(*columns, num_reqs_padded=size_r, num_tokens_padded=size_t, extra=on_device)
    return tables._outputs_of(size_r, size_t).arrays()


def assert_equal(got: StepArrays, expected: StepArrays) -> None:
    """Every output is equal, and what a step does not write is untouched."""
    for field in fields(StepArrays):
        left, right = getattr(got, field.name), getattr(expected, field.name)
        assert np.array_equal(left, right), f"{field.name}: {left.tolist()} != {right.tolist()}"


def random_operation(rng: np.random.Generator, all_tables: list[MultiGroupBlockTable]) -> None:
    """Do one row operation, the same in all tables; one that is refused is refused by all."""
    one = all_tables[0]
    row, other = rng.integers(0, NUM_ROWS, 2).tolist()
    kind = rng.choice(["append", "append", "append", "add", "clear", "move", "swap", "drop", "many"])
    widths = [table.width for table in one.tables]
    ids = [rng.integers(1, 500, rng.integers(0, width + 1)).tolist() for width in widths]
    starts = rng.integers(0, 3, len(widths)).tolist()
    counts = rng.integers(0, 2, (len(widths), 2))
    many = rng.integers(1, 500, counts.sum()).astype(np.int32)
    live = zip(one.first_block_per_row[:, row], one.num_blocks_per_row[:, row], strict=True)
    heads = [int(rng.integers(first, count + 1)) for first, count in live]
    refused = set()
    for tables in all_tables:
        try:
            match kind:
                case "append":
                    tables.append_row(row, ids)
                case "add":
                    tables.add_row(row, ids, starts)
                case "clear":
                    tables.clear_row(row)
                case "move":
                    tables.move_row(row, other)
                case "swap":
                    tables.swap_row(row, other)
                case "drop":
                    tables.drop_row_head(row, heads)
                case "many":
                    tables.append_rows(np.array([row, (row + 1) % NUM_ROWS]), counts, many)
            refused.add("")
        except ValueError as error:
            refused.add(str(error))
    assert len(refused) == 1


def random_step(rng: np.random.Generator) -> tuple[Work, int, int, list[int] | None]:
    """Draw a batch: (row, scheduled, computed), padded sizes, tokens that only the device knows of."""
    num_reqs = int(rng.integers(0, NUM_ROWS + 1))
    most = int(rng.choice([1, 6]))
    rows = rng.permutation(NUM_ROWS)[:num_reqs].tolist()
    work = [(row, int(rng.integers(1, most + 1)), int(rng.integers(0, 16))) for row in rows]
    size_r = int(rng.integers(num_reqs, NUM_ROWS + 1))
    size_t = int(rng.integers(sum(w[1] for w in work), MAX_TOKENS + 1))
    extra = rng.integers(0, 3, NUM_ROWS).tolist() if rng.random() < 0.4 else None
    return work, size_r, size_t, extra


def compare(tables: MultiGroupBlockTable, reference: Reference, rng: np.random.Generator, steps: int) -> None:
    """Compare a path with the reference over a random history of row operations and steps."""
    for _ in range(steps):
        for _ in range(int(rng.integers(0, 5))):
            random_operation(rng, [reference.tables, tables])
        step = random_step(rng)
        expected = reference.step(*step)
        assert np.array_equal(reference.words.numpy(), reference.tables.arrays.words)
        assert_equal(run(tables, *step), expected)
        assert torch.equal(tables.words.cpu(), reference.words)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@settings(max_examples=80, deadline=None)
@given(
    path=st.sampled_from(PATHS),
    seed=st.integers(0, 2**32),
    rank=st.integers(0, 3),
    interleave=st.sampled_from([1, 2]),
    max_pages=st.sampled_from([None, 1, 3]),
)
def test_the_host_equals_the_loop(
    path: str, num_ranks: int, seed: int, rank: int, interleave: int, max_pages: int | None
) -> None:
    """After any history, on any rank, both host paths give every output that the loop gives, as far as it has room."""
    share = num_ranks, rank % num_ranks, interleave
    with using(path):
        tables = make(False, "cpu", *share, max_pages=max_pages)
    reference = Reference(*share, max_pages=max_pages)
    with pytest.MonkeyPatch.context() as patch:
        # Chunks of 3 tokens are then mapped block by block.
        patch.setattr("hybridkv_kernels.step_numpy._CHUNK_TOKENS", 3 if seed % 2 else 64)
        compare(tables, reference, np.random.default_rng(seed), 4)


def test_the_helper_does_a_step_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a batch, its slots, states, page indices nor its padding take numpy's code, and it refuses nothing."""
    with using("native"):
        tables = make(False, "cpu", *SHARES[1])

    def fail(*_args: object) -> None:
        raise AssertionError("numpy did it")

    for name in ("step_batch.StepBatch.write_tokens", "step_batch.int_array", "step_path._fill"):
        monkeypatch.setattr(f"hybridkv.{name}", fail)
    monkeypatch.setattr("hybridkv_kernels.step_numpy.NumpyStep._map", fail)
    run(tables, [(1, 3, 7), (0, 1, 2)], 3, 6, None)
    run(tables, [(1, 1, 7), (0, 1, 2)], 2, 2, [2, 1, 0, 0])
    tables.commit()


@pytest.mark.parametrize(
    ("share", "block", "max_pages"),
    [(SHARES[0], 256, 3), (SHARES[1], 256, None), (SHARES[0], 2, None), (SHARES[1], 2, 3)],
)
def test_the_kernel_equals_the_loop(
    share: tuple[int, ...], block: int, max_pages: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives every output that the loop gives, in one tile of tokens, columns, batch positions or several."""
    monkeypatch.setattr("hybridkv_kernels.step_tables._BLOCK", block)
    tables, reference = make(True, device, *share, max_pages=max_pages), Reference(*share, max_pages=max_pages)
    compare(tables, reference, np.random.default_rng(share[0]), 4)


@pytest.mark.parametrize("kind", ["loop", "numpy", "kernel"])
def test_pages_that_do_not_fit_are_left_out(kind: str, device: torch.device) -> None:
    """With room for 3 of 5 pages the first 3 are written and nothing behind them; `indptr` counts all."""
    tables = make(kind == "kernel", device if kind == "kernel" else "cpu", max_pages=3)
    reference = Reference(max_pages=3)
    step = [(0, 1, 7), (1, 1, 11)], 2, 2, None
    for each in (tables, reference.tables):
        each.append_rows([0, 1], np.array([[2, 3], [0, 0], [0, 0], [0, 0], [0, 0]]), np.arange(1, 6, dtype=np.int32))
    index = (reference.step(*step) if kind == "loop" else run(tables, *step)).index
    meta = tables._index.metas[0]
    assert index[meta.indices_at :][:4].tolist() == [1, 2, 3, POISON]
    assert index[meta.indptr_at :][:3].tolist() == [0, 2, 5]


@pytest.mark.parametrize("use_triton", [False, True], ids=["numpy", "triton"])
def test_pages_are_the_blocks_that_rows_hold(use_triton: bool, device: torch.device) -> None:
    """Tokens without a block have no page: the row's last block is full, and a row without blocks has none."""
    tables = make(use_triton, device if use_triton else "cpu")
    tables.append_rows([0, 1], np.array([[2, 3], [0, 0], [0, 0], [0, 0], [0, 0]]), np.arange(1, 6, dtype=np.int32))
    step = tables.step([0, 1, 2], [1, 1, 1], [12, 8, 3])
    csr, (indptr, last_page_len) = step.csr(0), step.csr_cpu(0)
    assert csr.indptr.tolist() == indptr.tolist() == [0, 2, 5, 5]
    assert csr.last_page_len.tolist() == last_page_len.tolist() == [4, 1, 0]
    assert csr.indices[:5].tolist() == [1, 2, 3, 4, 5]


@jit
def skip_record(
    words_ptr: object, meta: object, staging_ptr: object, group: object, number: object, BLOCK: tl.constexpr
) -> None:
    """Stand for the program that applies a record, and apply none."""


def test_no_program_reads_what_another_writes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no record is applied the outputs are those after the step; the records may arrive last."""
    if device.type != "cpu":
        pytest.skip("a compiled kernel keeps the functions that it was compiled with")
    tables, reference, rng = make(True, device), Reference(), np.random.default_rng(1)
    for _ in range(4):
        for _ in range(int(rng.integers(1, 5))):
            random_operation(rng, [reference.tables, tables])
        step = random_step(rng)
        expected = reference.step(*step)
        with monkeypatch.context() as patch:
            patch.setattr(_step_kernel, "_apply_record", skip_record)
            assert_equal(run(tables, *step), expected)
        tables._path.launch(tables._outputs_of(*step[1:3]), None)
        assert torch.equal(tables.words, reference.words)


@pytest.mark.parametrize("sizes", [(0, 0), (1, 2), (2, 4), (3, 1), (1, 9)])
def test_a_launch_of_smaller_sizes_stays_inside_them(sizes: tuple[int, int], device: torch.device) -> None:
    """A launch of fewer batch positions or tokens than were staged last writes nothing beyond its outputs."""
    tables = make(True, device)
    counts = np.array([[2, 2, 2], [2, 2, 2], [2, 2, 2], [2, 2, 2], [1, 1, 1]])
    tables.append_rows([0, 1, 2], counts, np.arange(1, 28, dtype=np.int32))
    tables.stage([0, 1, 2], [2, 3, 1], [0, 1, 4])
    poisoned(tables._buffers)
    outputs = tables._outputs_of(*sizes)
    tables._path.launch(outputs, None)
    # What it may write is wiped out; then nothing else is in the buffers.
    poisoned(replace(outputs, index=outputs.index[:0]))
    for meta in tables._index.metas[:2]:
        local, csr = local_table(outputs.index, meta, sizes[0]), csr_table(outputs.index, meta, sizes[0])
        csr.indices[: int(csr.indptr[-1])].fill_(POISON)
        for tensor in (*vars(local).values(), csr.indptr, csr.last_page_len):
            tensor.fill_(POISON)
    for name, tensor in tables._buffers.named():
        assert (tensor == (POISON if tensor.dtype != torch.bool else True)).all(), name
