"""Claims about the page index `token_table`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv_kernels.group_meta import GroupMeta
from hybridkv_kernels.group_rows import GroupRows
from hybridkv_kernels.token_table import check_token_table, token_table, token_table_reference, token_table_torch
from tests.group_tables import POISON, Table, batches, move, ring, with_meta

HOST = [token_table_reference, token_table_torch]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(
    function: Callable[..., None], batch: GroupRows, num_tokens: int, *, dtype: torch.dtype = torch.int32, fill: int = 0
) -> list[list[int]]:
    """Call a function of the op on a poisoned, strided output, which is returned."""
    batch = move(batch, DEVICE) if function is token_table else batch
    wide = torch.full((batch.num_rows, num_tokens + 3), POISON, dtype=dtype, device=batch.words.device)
    function(batch, fill=fill, out=wide[:, :num_tokens])
    assert (wide[:, num_tokens:] == POISON).all()
    return wide[:, :num_tokens].tolist()


@pytest.mark.parametrize("function", [*HOST, token_table])
def test_a_wrapped_ring_gives_exact_slots(function: Callable[..., None]) -> None:
    """Live tokens have their slots, in position order; dead, absent, null or padding ones the fill."""
    expected = [[0] * 8 + list(range(24, 34)) + [0, 0], [0] * 20, [20, 21, 22, 23] + [0] * 16]
    assert run(function, ring(), 20) == expected
    assert run(function, ring(), 20, dtype=torch.int64, fill=-7)[2] == [20, 21, 22, 23] + [-7] * 16


@given(batches(is_sharded=True), st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_torch_equals_reference(batch: GroupRows, num_tokens: int) -> None:
    """The vectorised path gives the loop's table for any rows, on any rank."""
    assert run(token_table_torch, batch, num_tokens) == run(token_table_reference, batch, num_tokens)


@given(batches(is_sharded=True))
@settings(max_examples=10, deadline=None)
def test_kernel_equals_reference(batch: GroupRows) -> None:
    """The kernel gives the loop's table for any rows, on any rank."""
    assert run(token_table, batch, 37, fill=-1) == run(token_table_reference, batch, 37, fill=-1)


@pytest.mark.parametrize("num_tokens", [0, 1, 1023, 1024, 1025])
def test_kernel_equals_reference_around_its_tile(num_tokens: int) -> None:
    """Empty, single, exact, one-past-a-tile tables are whole."""
    batch = Table(16, 66, [0, 3], [list(range(9, 75)), list(range(40, 99))]).batch([1, 0], [1000, 1056])
    assert run(token_table, batch, num_tokens) == run(token_table_reference, batch, num_tokens)


@pytest.mark.parametrize("function", [*HOST, token_table])
def test_ranks_hold_every_token_once(function: Callable[..., None]) -> None:
    """Over the ranks of a sharded group each token of a row has a slot on exactly one of them."""
    found = []
    for rank in range(3):
        table = Table(4, 2, [1], [[5, 9]], num_ranks=3, rank=rank, interleave=2)
        found.append(run(function, table.batch([0], [31]), 36, fill=-1)[0])
    assert [sum(slots[p] >= 0 for slots in found) for p in range(36)] == [0] * 12 + [1] * 19 + [0] * 5
    assert [slots[12:24] for slots in found] == [
        [20, 21, -1, -1, -1, -1, 22, 23, -1, -1, -1, -1],
        [-1, -1, 20, 21, -1, -1, -1, -1, 22, 23, -1, -1],
        [-1, -1, -1, -1, 20, 21, -1, -1, -1, -1, 22, 23],
    ]


@pytest.mark.parametrize("function", [*HOST, token_table])
def test_slots_beyond_32_bits_are_exact(function: Callable[..., None], checked_int32: None) -> None:
    """A large block id times a large block size needs an int64 table, and gets one."""
    batch = Table(512, 1, [0], [[2**31 - 1]]).batch([0], [2])
    assert run(function, batch, 3, dtype=torch.int64) == [[(2**31 - 1) * 512, (2**31 - 1) * 512 + 1, 0]]


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda batch: batch.rows.__setitem__(0, -2), "rows: expected >= -1"),
        (lambda batch: batch.rows.__setitem__(0, 9), r"row 9: end of the entries in words"),
        (lambda batch: batch.seq_lens.__setitem__(0, -1), "row 0: seq_lens"),
        (lambda batch: batch.seq_lens.__setitem__(0, 21), r"row 0: seq_lens: expected <= 20"),
        (lambda batch: batch.words.__setitem__(batch.meta.first_offset, -1), "row 0: live ordinals"),
        (lambda batch: batch.words.__setitem__(batch.meta.count_offset, 6), "row 0: live ordinals"),
        (lambda batch: batch.words.__setitem__(batch.meta.table_offset, -3), "row 0: live block ids"),
        (lambda batch: batch.words.__setitem__(batch.meta.table_offset, 2**29), "row 0: slot for torch.int32"),
    ],
)
def test_check_refuses_each_broken_invariant(break_it: Callable[[GroupRows], None], message: str) -> None:
    """The check accepts the sound example, then names the invariant that is broken."""
    batch, out = ring(), torch.empty(3, 20, dtype=torch.int32)
    check_token_table(batch, out=out)
    break_it(batch)
    with pytest.raises(ValueError, match=message):
        check_token_table(batch, out=out)


@pytest.mark.parametrize("function", [token_table_torch, token_table])
def test_wrong_arguments_are_refused(function: Callable[..., None]) -> None:
    """Every path names the argument whose dtype, shape or stride is wrong."""
    batch = ring()
    with pytest.raises(ValueError, match=r"out\.dtype"):
        function(batch, out=torch.empty(3, 20))
    with pytest.raises(ValueError, match=r"out\.shape"):
        function(batch, out=torch.empty(2, 20, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"seq_lens\.shape"):
        GroupRows(batch.words, batch.meta, batch.rows, batch.seq_lens[1:])
    with pytest.raises(ValueError, match=r"words\.dtype"):
        GroupRows(batch.words.long(), batch.meta, batch.rows, batch.seq_lens)
    with pytest.raises(ValueError, match="a group of states has no tokens"):
        with_meta(batch, block_size=0)
    if function is token_table:
        with pytest.raises(ValueError, match=r"out\.stride"):
            function(batch, out=torch.empty(20, 3, dtype=torch.int32).T)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((-1, 4, 3, 4, 8, 9), "table_offset"),
        ((0, 4, 5, 4, 8, 9), "width"),
        ((0, 4, 0, 4, 8, 9), "width"),
        ((0, 4, 3, 4, 8, 9, 0), "num_ranks"),
        ((0, 4, 3, 4, 8, 9, 2, 2), r"rank: expected 0\.\.1"),
        ((0, 4, 3, 4, 8, 9, 2, 1, 3), "interleave: expected a divisor of block size 4"),
    ],
)
def test_a_meta_row_that_no_table_has_is_refused(values: tuple[int, ...], message: str) -> None:
    """A meta row names the value that cannot be; a sound one survives its columns."""
    with pytest.raises(ValueError, match=message):
        GroupMeta(*values)
    meta = GroupMeta(1, 4, 3, 4, 8, 9, 2, 1, 2)
    assert meta.as_row() == (1, 4, 3, 4, 8, 9, 2, 1, 2)
    assert GroupMeta.from_row(meta.as_row()) == meta
    with pytest.raises(ValueError, match=r"group_meta\.shape\[1\]: expected 9"):
        GroupMeta.from_row((1, 2, 3))
