"""Claims about the page index `cells` and the mask of the cells that a query sees."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv_kernels.cell_visibility import (
    CellMask,
    MaskKind,
    cell_visibility,
    cell_visibility_reference,
    cell_visibility_torch,
    check_cell_visibility,
)
from hybridkv_kernels.cells import Cells, cells, cells_reference, cells_torch, check_cells
from hybridkv_kernels.group_rows import GroupRows
from tests.group_tables import POISON, Table, batches, int32, move, ring, with_meta

HOST = [cells_reference, cells_torch]
MASKS = [cell_visibility_reference, cell_visibility_torch]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(function: Callable[..., None], batch: GroupRows, capacity: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Call a function of the op on poisoned outputs; return the cells (id, position, row) with indptr."""
    batch = move(batch, DEVICE) if function is cells else batch
    out = Cells.empty(capacity, batch.num_rows, batch.words.device)
    for tensor in (out.ids, out.positions, out.rows, out.indptr):
        tensor.fill_(POISON)
    function(batch, out=out)
    return list(zip(out.ids.tolist(), out.positions.tolist(), out.rows.tolist(), strict=True)), out.indptr.tolist()


RING_CELLS = [
    *((16 + position, position, 0) for position in range(8, 18)),
    *((20 + position, position, 1) for position in range(4)),
    *[(0, -1, -1)] * 2,
]


@pytest.mark.parametrize("function", [*HOST, cells])
def test_a_wrapped_ring_gives_exact_cells(function: Callable[..., None]) -> None:
    """Cells follow positions, row by row; null blocks and room to spare give empty ones, padding rows none."""
    assert run(function, ring(), 18) == ([*RING_CELLS, (0, -1, -1), (0, -1, -1)], [0, 10, 10, 16])


@pytest.mark.parametrize("function", [*HOST, cells])
def test_a_full_list_is_cut_but_counted(function: Callable[..., None]) -> None:
    """Beyond the capacity no cell is written, and indptr says how many there are."""
    assert run(function, ring(), 7) == (RING_CELLS[:7], [0, 10, 10, 16])
    assert run(function, ring(), 0) == ([], [0, 10, 10, 16])


@given(batches(), st.integers(0, 60))
@settings(max_examples=150, deadline=None)
def test_torch_equals_reference(batch: GroupRows, capacity: int) -> None:
    """The vectorised path gives the loop's cells for any rows, capacities."""
    assert run(cells_torch, batch, capacity) == run(cells_reference, batch, capacity)


@given(batches())
@settings(max_examples=10, deadline=None)
def test_kernel_equals_reference(batch: GroupRows) -> None:
    """The kernels give the loop's cells for any rows."""
    assert run(cells, batch, 50) == run(cells_reference, batch, 50)


@pytest.mark.parametrize("capacity", [255, 256, 257])
def test_kernel_equals_reference_around_its_tile(capacity: int) -> None:
    """Exact and one-past-a-tile lists are whole."""
    batch = Table(4, 40, [0, 2], [list(range(3, 40)), list(range(50, 80))]).batch([1, 0], [128, 140])
    assert run(cells, batch, capacity) == run(cells_reference, batch, capacity)


def test_many_rows_are_counted_over_tiles() -> None:
    """Rows beyond one tile of the counting kernel start where the earlier tiles end."""
    batch = Table(2, 1, [0], [[5]]).batch([0, -1] * 513, [1, 9] * 513)
    assert run(cells, batch, 520) == run(cells_reference, batch, 520)


@pytest.mark.parametrize("function", [*HOST, cells])
def test_cell_ids_beyond_32_bits_are_exact(function: Callable[..., None], checked_int32: None) -> None:
    """A large block id times a large block size needs 64 bits."""
    batch = Table(512, 1, [0], [[2**31 - 1]]).batch([0], [1])
    assert run(function, batch, 1) == ([((2**31 - 1) * 512, 0, 0)], [0, 1])


def test_wrong_arguments_are_refused() -> None:
    """Sharded groups, wrong shapes and dtypes are named; the check refuses a list that is too short."""
    out = Cells.empty(16, 3)
    check_cells(ring(), out=out)
    with pytest.raises(ValueError, match=r"cells: expected <= 15 \(the capacity\), got 16"):
        check_cells(ring(), out=Cells.empty(15, 3))
    batch = ring()
    batch.rows[0] = -2
    with pytest.raises(ValueError, match="rows"):
        check_cells(batch, out=out)
    for function in (cells_torch, cells):
        with pytest.raises(ValueError, match="num_ranks: expected 1"):
            function(with_meta(ring(), num_ranks=2), out=out)
        with pytest.raises(ValueError, match=r"indptr\.shape"):
            function(ring(), out=Cells.empty(16, 2))
    with pytest.raises(ValueError, match=r"ids\.dtype"):
        Cells(out.rows, out.positions, out.rows, out.indptr)


def see(
    function: Callable[..., None],
    queries: list[tuple[int, int]],
    listed: list[tuple[int, int, int]],
    mask: CellMask,
    dtype: torch.dtype = torch.bool,
) -> list[list[float]]:
    """Call a mask function for queries (row, position) on a poisoned, strided output, which is returned."""
    device = DEVICE if function is cell_visibility else "cpu"
    held = Cells.empty(len(listed), 0, device)
    for tensor, values in zip((held.ids, held.positions, held.rows), zip(*listed, strict=True), strict=True):
        tensor.copy_(torch.tensor(values))
    token_rows = int32([row for row, _ in queries]).to(device)
    positions = torch.tensor([position for _, position in queries], dtype=torch.int64, device=device)
    wide = torch.full((len(queries), len(listed) + 2), 1, dtype=dtype, device=device)
    out = wide[:, : len(listed)]
    check_cell_visibility(token_rows, positions, held, out=out)
    function(token_rows, positions, held, mask=mask, out=out)
    assert (wide[:, len(listed) :] == 1).all()
    return out.tolist()


FULL, WINDOW, CHUNK = (
    CellMask(MaskKind.FULL),
    CellMask(MaskKind.SLIDING_WINDOW, 3),
    CellMask(MaskKind.CHUNKED, 4),
)


@pytest.mark.parametrize("function", [*MASKS, cell_visibility])
@pytest.mark.parametrize(("mask", "first"), [(FULL, 8), (WINDOW, 11), (CHUNK, 12)])
def test_a_query_sees_its_rows_earlier_cells(function: Callable[..., None], mask: CellMask, first: int) -> None:
    """A query sees itself and what its mask allows before it, of its own row; padding sees nothing."""
    found = see(function, [(0, 13), (1, 0), (-1, 13)], RING_CELLS, mask)
    assert [c[1] for c, seen in zip(RING_CELLS, found[0], strict=True) if seen] == list(range(first, 14))
    assert [c for c, seen in zip(RING_CELLS, found[1], strict=True) if seen] == [(20, 0, 1)]
    assert not any(found[2])


@pytest.mark.parametrize("function", [*MASKS, cell_visibility])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_float_mask_is_added_to_the_scores(function: Callable[..., None], dtype: torch.dtype) -> None:
    """A float mask holds 0 where a cell is visible, minus infinity elsewhere."""
    inf = float("-inf")
    found = see(function, [(0, 9), (-1, -1)], RING_CELLS[:3], FULL, dtype)
    assert found == [[0.0, 0.0, inf], [inf] * 3]


@given(
    st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 12)), min_size=1, max_size=4),
    st.lists(st.tuples(st.just(0), st.integers(-1, 12), st.integers(-1, 2)), min_size=1, max_size=9),
    st.sampled_from(MaskKind),
    st.integers(1, 5),
)
@settings(max_examples=40, deadline=None)
def test_masks_equal_the_reference(
    queries: list[tuple[int, int]], listed: list[tuple[int, int, int]], kind: MaskKind, size: int
) -> None:
    """The vectorised path and the kernel give the loop's mask."""
    mask = CellMask(kind, size)
    expected = see(cell_visibility_reference, queries, listed, mask)
    assert see(cell_visibility_torch, queries, listed, mask) == expected
    assert see(cell_visibility, queries, listed, mask) == expected


@pytest.mark.parametrize("num_cells", [1023, 1024, 1025])
def test_masks_are_whole_around_the_tile(num_cells: int) -> None:
    """Exact and one-past-a-tile rows of the mask are whole."""
    listed = [(c, c, 0) for c in range(num_cells)]
    queries = [(0, 1023)]
    assert see(cell_visibility, queries, listed, WINDOW) == see(cell_visibility_reference, queries, listed, WINDOW)


def test_wrong_masks_are_refused() -> None:
    """A window below 1, a wrong dtype, a query before its sequence are named."""
    with pytest.raises(ValueError, match=r"mask\.size"):
        CellMask(MaskKind.SLIDING_WINDOW, 0)
    rows, positions, held = int32([0]), torch.tensor([3]), Cells.empty(2, 1)
    for function in (cell_visibility_torch, cell_visibility):
        with pytest.raises(ValueError, match=r"out\.dtype"):
            function(rows, positions, held, mask=FULL, out=torch.empty(1, 2, dtype=torch.int32))
        with pytest.raises(ValueError, match=r"token_rows\.shape"):
            function(rows[:0], positions, held, mask=FULL, out=torch.empty(1, 2))
    with pytest.raises(ValueError, match=r"positions\[0\]"):
        check_cell_visibility(rows, positions - 4, held, out=torch.empty(1, 2))
