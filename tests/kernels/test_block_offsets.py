"""Claims about the page index `block_offsets` and the table of kernel blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv_kernels.block_offsets import (
    block_offsets,
    block_offsets_reference,
    block_offsets_torch,
    check_block_offsets,
)
from hybridkv_kernels.group_rows import GroupRows
from hybridkv_kernels.kernel_blocks import (
    check_kernel_block_table,
    kernel_block_table,
    kernel_block_table_reference,
    kernel_block_table_torch,
)
from tests.group_tables import POISON, Table, batches, int32, move, ring

HOST = [block_offsets_reference, block_offsets_torch]
TABLES = [kernel_block_table_reference, kernel_block_table_torch]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POOLS = ((4, 0, 1), (3, 2, 2))
"""K beside V in two layers, then three layers with K and V in separate pools."""


def run(
    function: Callable[..., None],
    batch: GroupRows,
    num_columns: int,
    *,
    pools: tuple[tuple[int, int, int], ...] = POOLS,
    ratio: int = 1,
    window_local: bool = False,
) -> list[list[list[list[int]]]]:
    """Call a function of the op on a poisoned, strided output, which is returned."""
    batch = move(batch, DEVICE) if function is block_offsets else batch
    shape = len(pools), batch.num_rows, 2, num_columns + 3
    wide = torch.full(shape, POISON, dtype=torch.int32, device=batch.words.device)
    out = wide[..., :num_columns]
    on_device = torch.tensor(pools, dtype=torch.int64, device=out.device).view(-1, 3)
    function(batch, on_device, ratio=ratio, window_local=window_local, out=out)
    assert (wide[..., num_columns:] == POISON).all()
    return out.tolist()


@pytest.mark.parametrize("function", [*HOST, block_offsets])
def test_a_wrapped_ring_gives_exact_offsets(function: Callable[..., None]) -> None:
    """Pools scale and shift the ids of ordinals; dead, null and padding columns are the null block's."""
    ids = [[0, 0, 6, 7, 8, 0], [0] * 6, [5, 0, 0, 0, 0, 0]]
    assert run(function, ring(), 6) == [
        [[[4 * i for i in row], [4 * i + 1 for i in row]] for row in ids],
        [[[3 * i + 2 for i in row]] * 2 for row in ids],
    ]


@pytest.mark.parametrize("function", [*HOST, block_offsets])
def test_window_local_rows_start_at_their_first_live_ordinal(function: Callable[..., None]) -> None:
    """With `window_local` column 0 is the first live ordinal, so a window needs no more columns than it has blocks."""
    found = run(function, ring(), 3, pools=((1, 0, 0),), window_local=True)
    assert [row[0] for row in found[0]] == [[6, 7, 8], [0, 0, 0], [5, 0, 0]]


@pytest.mark.parametrize("function", [*HOST, block_offsets])
def test_a_block_is_ratio_kernel_blocks(function: Callable[..., None]) -> None:
    """With ratio 2 a block gives two neighbouring kernel blocks, a null block two null ones."""
    found = run(function, ring(), 7, pools=((1, 0, 0),), ratio=2, window_local=True)
    assert [row[0] for row in found[0]] == [[12, 13, 14, 15, 16, 17, 0], [0] * 7, [10, 11, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("function", [*HOST, block_offsets])
def test_blocks_reserved_for_later_tokens_are_left_out(function: Callable[..., None]) -> None:
    """A block whose first token lies at or beyond seq_len is not given; one with a single token is."""
    batch = Table(4, 4, [0, 0], [[3, 4, 5], [6, 7, 8]]).batch([0, 1], [8, 9])
    assert [row[0] for row in run(function, batch, 4, pools=((1, 0, 0),))[0]] == [[3, 4, 0, 0], [6, 7, 8, 0]]


@given(batches(is_sharded=True), st.integers(0, 12), st.integers(1, 3), st.booleans())
@settings(max_examples=150, deadline=None)
def test_torch_equals_reference(batch: GroupRows, num_columns: int, ratio: int, window_local: bool) -> None:
    """The vectorised path gives the loop's offsets for any rows, ratios, starts."""
    pools = ((2, 0, 1), (1, 0, 0))
    found = [run(f, batch, num_columns, pools=pools, ratio=ratio, window_local=window_local) for f in HOST]
    assert found[0] == found[1]


@given(batches(is_sharded=True), st.integers(1, 3), st.booleans())
@settings(max_examples=10, deadline=None)
def test_kernel_equals_reference(batch: GroupRows, ratio: int, window_local: bool) -> None:
    """The kernel gives the loop's offsets for any rows, ratios, starts."""
    options = {"pools": ((2, 0, 1), (1, 0, 0)), "ratio": ratio, "window_local": window_local}
    assert run(block_offsets, batch, 11, **options) == run(block_offsets_reference, batch, 11, **options)


@pytest.mark.parametrize("num_columns", [0, 1, 255, 256, 257])
def test_kernel_equals_reference_around_its_tile(num_columns: int) -> None:
    """Empty, single, exact, one-past-a-tile rows are whole."""
    batch = Table(1, 300, [0], [list(range(9, 309))]).batch([0], [300])
    assert run(block_offsets, batch, num_columns) == run(block_offsets_reference, batch, num_columns)


@pytest.mark.parametrize("function", [*HOST, block_offsets])
def test_no_pools_write_nothing(function: Callable[..., None]) -> None:
    """A group without pools is served."""
    assert run(function, ring(), 3, pools=()) == []


def test_check_refuses_each_broken_invariant() -> None:
    """The check names a row that does not fit, an offset that int32 does not hold, a negative shift."""
    out = torch.empty(1, 3, 2, 5, dtype=torch.int32)
    pools = torch.tensor([[4, 0, 1]])
    check_block_offsets(ring(), pools, out=out)
    check_block_offsets(ring(), pools, ratio=1, window_local=True, out=out[..., :3])
    with pytest.raises(ValueError, match=r"row 0: columns: expected <= 4 \(W\), got 5"):
        check_block_offsets(ring(), pools, out=out[..., :4])
    with pytest.raises(ValueError, match=r"row 0: columns: expected <= 5 \(W\), got 6"):
        check_block_offsets(ring(), pools, ratio=2, window_local=True, out=out)
    with pytest.raises(ValueError, match=r"pools\[0\]: highest offset"):
        check_block_offsets(ring(), torch.tensor([[2**28, 0, 1]]), out=out)
    with pytest.raises(ValueError, match=r"pools\[0\]: expected no value below 0"):
        check_block_offsets(ring(), torch.tensor([[4, -1, 1]]), out=out)
    batch = ring()
    batch.rows[0] = -2
    with pytest.raises(ValueError, match="rows"):
        check_block_offsets(batch, pools, out=out)


@pytest.mark.parametrize("function", [block_offsets_torch, block_offsets])
def test_wrong_arguments_are_refused(function: Callable[..., None]) -> None:
    """Every path names the argument that is wrong."""
    pools, out = torch.tensor([[4, 0, 1]]), torch.empty(1, 3, 2, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"pools\.dtype"):
        function(ring(), pools.int(), out=out)
    with pytest.raises(ValueError, match=r"out\.shape"):
        function(ring(), pools, out=out[:, :2])
    with pytest.raises(ValueError, match="ratio: expected >= 1"):
        function(ring(), pools, ratio=0, out=out)


def expand(function: Callable[..., None], entries: list[list[int]], ratio: int, num_columns: int) -> list[list[int]]:
    """Expand strided entries into a poisoned, strided table, which is returned."""
    device = DEVICE if function is kernel_block_table else "cpu"
    padded = int32([[*row, POISON] for row in entries]).to(device)
    wide = torch.full((len(entries), num_columns + 2), POISON, dtype=torch.int32, device=device)
    function(padded[:, :-1], ratio, out=wide[:, :num_columns])
    assert (wide[:, num_columns:] == POISON).all()
    return wide[:, :num_columns].tolist()


@pytest.mark.parametrize("function", [*TABLES, kernel_block_table])
def test_kernel_blocks_are_neighbours(function: Callable[..., None]) -> None:
    """Block b becomes b * ratio + j; null blocks and columns beyond the last are null."""
    assert expand(function, [[5, 0], [2, 7]], 3, 8) == [[15, 16, 17, 0, 0, 0, 0, 0], [6, 7, 8, 21, 22, 23, 0, 0]]
    assert expand(function, [[5, 0]], 1, 2) == [[5, 0]]
    assert expand(function, [[2**30 - 1]], 2, 2) == [[2**31 - 2, 2**31 - 1]]


@given(st.lists(st.lists(st.integers(0, 2**29), min_size=3, max_size=3), min_size=1, max_size=3), st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_kernel_block_tables_equal_the_reference(entries: list[list[int]], ratio: int) -> None:
    """The vectorised path and the kernel give the loop's table."""
    expected = expand(kernel_block_table_reference, entries, ratio, 13)
    assert expand(kernel_block_table_torch, entries, ratio, 13) == expected
    assert expand(kernel_block_table, entries, ratio, 13) == expected


@pytest.mark.parametrize("num_columns", [255, 256, 257])
def test_kernel_block_tables_are_whole_around_the_tile(num_columns: int) -> None:
    """Exact and one-past-a-tile tables are whole."""
    entries = [list(range(1, 128))]
    expected = expand(kernel_block_table_reference, entries, 2, num_columns)
    assert expand(kernel_block_table, entries, 2, num_columns) == expected


def test_kernel_block_tables_refuse_what_does_not_fit() -> None:
    """Too few columns, a ratio of 0 or an id that int32 does not hold is named."""
    entries, out = int32([[5, 2**30]]), torch.empty(1, 4, dtype=torch.int32)
    for function in (kernel_block_table_torch, kernel_block_table):
        with pytest.raises(ValueError, match=r"out\.shape\[1\]: expected >= 6"):
            function(entries, 3, out=out)
        with pytest.raises(ValueError, match="ratio"):
            function(entries, 0, out=out)
    with pytest.raises(ValueError, match=r"entries: expected 0\.\.1073741823, got 1073741824"):
        check_kernel_block_table(entries, 2, out=out)
    with pytest.raises(ValueError, match="got -1"):
        check_kernel_block_table(int32([[-1]]), 2, out=out)
    check_kernel_block_table(entries - 1, 2, out=out)
