"""Claims about the page index `runs` and the load plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv_kernels.block_runs import block_runs, block_runs_reference, block_runs_torch, check_block_runs
from hybridkv_kernels.group_rows import GroupRows
from hybridkv_kernels.load_plan import check_load_plan, load_plan, load_plan_reference, load_plan_torch
from tests.group_tables import POISON, Table, batches, int32, move, ring, with_meta

if TYPE_CHECKING:
    from triton.runtime.interpreter import TensorHandle

HOST = [block_runs_reference, block_runs_torch]
PLANS = [load_plan_reference, load_plan_torch]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(
    function: Callable[..., None],
    batch: GroupRows,
    max_runs: int,
    *,
    first_ordinals: Sequence[int] | None = None,
    ratio: int = 1,
) -> tuple[list[list[list[int]]], list[int]]:
    """Call a function of the op on poisoned outputs; return the runs with their counts."""
    batch = move(batch, DEVICE) if function is block_runs else batch
    device = batch.words.device
    runs = torch.full((batch.num_rows, max_runs, 2), POISON, dtype=torch.int32, device=device)
    counts = torch.full((batch.num_rows,), POISON, dtype=torch.int32, device=device)
    firsts = None if first_ordinals is None else int32(first_ordinals).to(device)
    function(batch, first_ordinals=firsts, ratio=ratio, runs=runs, counts=counts)
    return runs.tolist(), counts.tolist()


MIXED = Table(2, 8, [5, 0, 0], [[4, 5, 6, 2, 3, 9, 0, 1], [7], [2, 2, 1]])
"""Row 0 is a ring with a run over its seam and block 1 behind a null block; row 2 repeats a block, then goes back."""


@pytest.mark.parametrize("function", [*HOST, block_runs])
def test_runs_follow_ordinals_across_the_seam_of_a_ring(function: Callable[..., None]) -> None:
    """Runs are longest stretches of rising ids in the order of ordinals; null blocks end one, padding has none."""
    batch = MIXED.batch([0, -1, 1, 2], [26, 9, 2, 6])
    assert run(function, batch, 4) == (
        [
            [[4, 3], [2, 2], [9, 1], [1, 1]],
            [[0, 0]] * 4,
            [[7, 1], [0, 0], [0, 0], [0, 0]],
            [[2, 1], [2, 1], [1, 1], [0, 0]],
        ],
        [4, 0, 1, 3],
    )
    assert run(function, ring(), 1) == ([[[6, 3]], [[0, 0]], [[5, 1]]], [1, 0, 1])


@pytest.mark.parametrize("function", [*HOST, block_runs])
def test_a_walk_may_start_later_and_count_kernel_blocks(function: Callable[..., None]) -> None:
    """From a given ordinal on, in kernel blocks, only what is in use is listed."""
    batch = MIXED.batch([0, 1, 2], [17, 2, 5])
    assert run(function, batch, 2, first_ordinals=[6, 1, 0], ratio=3) == (
        [[[15, 6], [6, 3]], [[0, 0], [0, 0]], [[6, 3], [6, 3]]],
        [2, 0, 3],
    )


@pytest.mark.parametrize("function", [*HOST, block_runs])
def test_a_full_list_is_cut_but_counted(function: Callable[..., None]) -> None:
    """Beyond max_runs no run is written, and the count says how many there are."""
    batch = MIXED.batch([2, 0], [6, 26])
    assert run(function, batch, 1) == ([[[2, 1]], [[4, 3]]], [3, 4])
    assert run(function, batch, 0) == ([[], []], [3, 4])


@given(batches(is_sharded=True), st.data())
@settings(max_examples=150, deadline=None)
def test_torch_equals_reference(batch: GroupRows, data: st.DataObject) -> None:
    """The vectorised path gives the loop's runs for any rows, starts, ratios, capacities."""
    firsts = st.lists(st.integers(0, 12), min_size=batch.num_rows, max_size=batch.num_rows)
    options = {"first_ordinals": data.draw(st.none() | firsts), "ratio": data.draw(st.integers(1, 3))}
    max_runs = data.draw(st.integers(0, 6))
    assert run(block_runs_torch, batch, max_runs, **options) == run(block_runs_reference, batch, max_runs, **options)


@given(batches(is_sharded=True), st.booleans())
@settings(max_examples=10, deadline=None)
def test_kernel_equals_reference(batch: GroupRows, starts_later: bool) -> None:
    """The kernel gives the loop's runs for any rows, starts."""
    options = {"first_ordinals": [3] * batch.num_rows if starts_later else None, "ratio": 2}
    assert run(block_runs, batch, 5, **options) == run(block_runs_reference, batch, 5, **options)


@pytest.mark.parametrize("num_blocks", [511, 512, 513, 1025])
def test_runs_go_on_over_the_kernels_tiles(num_blocks: int) -> None:
    """A run that spans tiles of the kernel is one run, one that starts on a tile's edge its own."""
    whole, split = list(range(3, 3 + num_blocks)), [*range(2000, 2512), *range(7, num_blocks - 505)][:num_blocks]
    batch = Table(1, num_blocks, [0, 0], [whole, split]).batch([0, 1], [num_blocks] * 2)
    assert run(block_runs, batch, 3) == run(block_runs_reference, batch, 3)
    assert run(block_runs, batch, 3)[0][0] == [[3, num_blocks], [0, 0], [0, 0]]


def test_many_runs_go_on_over_the_kernels_tiles() -> None:
    """Runs of one block each are numbered on from tile to tile; unused room beyond one tile is zero."""
    batch = Table(1, 520, [0], [[2 * k + 1 for k in range(520)]]).batch([0], [520])
    assert run(block_runs, batch, 519) == run(block_runs_reference, batch, 519)
    assert run(block_runs, ring(), 600) == run(block_runs_reference, ring(), 600)


def test_check_refuses_each_broken_invariant() -> None:
    """The check names a row with too many runs, an id that int32 does not hold, a start below 0."""
    batch = MIXED.batch([2, 0], [6, 26])
    runs, counts = torch.empty(2, 4, 2, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    check_block_runs(batch, runs=runs, counts=counts)
    with pytest.raises(ValueError, match=r"row 0: runs: expected <= 3 \(max_runs\), got 4"):
        check_block_runs(batch, runs=runs[:, :3].contiguous(), counts=counts)
    with pytest.raises(ValueError, match="row 2: end of the highest run"):
        check_block_runs(batch, ratio=2**30, runs=runs, counts=counts)
    with pytest.raises(ValueError, match="first_ordinals"):
        check_block_runs(batch, first_ordinals=int32([0, -1]), runs=runs, counts=counts)
    batch.rows[0] = -2
    with pytest.raises(ValueError, match="rows"):
        check_block_runs(batch, runs=runs, counts=counts)


@pytest.mark.parametrize("function", [block_runs_torch, block_runs])
def test_wrong_arguments_are_refused(function: Callable[..., None]) -> None:
    """Every path names the argument that is wrong."""
    runs, counts = torch.empty(3, 4, 2, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"runs\.shape"):
        function(ring(), runs=runs[:2], counts=counts)
    with pytest.raises(ValueError, match=r"counts\.dtype"):
        function(ring(), runs=runs, counts=counts.long())
    with pytest.raises(ValueError, match=r"runs\.stride"):
        function(ring(), runs=runs[:, :2], counts=counts)
    with pytest.raises(ValueError, match=r"first_ordinals\.shape"):
        function(ring(), first_ordinals=int32([1]), runs=runs, counts=counts)
    with pytest.raises(ValueError, match="ratio"):
        function(ring(), ratio=0, runs=runs, counts=counts)


def plan(
    function: Callable[..., None], batch: GroupRows, ranges: Sequence[tuple[int, int]], max_segments: int
) -> tuple[list[list[list[int]]], list[int]]:
    """Call a plan function on poisoned outputs; return the segments with their counts."""
    batch = move(batch, DEVICE) if function is load_plan else batch
    device = batch.words.device
    segments = torch.full((batch.num_rows, max_segments, 4), POISON, dtype=torch.int32, device=device)
    counts = torch.full((batch.num_rows,), POISON, dtype=torch.int32, device=device)
    function(batch, int32(ranges).view(-1, 2).to(device), segments=segments, counts=counts)
    return segments.tolist(), counts.tolist()


UNUSED = [-1, 0, 0, 0]


@pytest.mark.parametrize("function", [*PLANS, load_plan])
def test_a_plan_copies_what_is_live_and_zeroes_the_rest(function: Callable[..., None]) -> None:
    """Dead heads, null blocks and tokens beyond seq_len are zeros; runs of blocks are one copy."""
    assert plan(function, ring(), [(6, 20), (1, 9), (2, 7)], 4) == (
        [
            [[-1, 0, 2, 0], [6, 0, 10, 2], [-1, 0, 2, 12], UNUSED],
            [UNUSED] * 4,
            [[5, 2, 4, 0], [-1, 0, 2, 2], [-1, 0, 1, 4], UNUSED],
        ],
        [3, 0, 3],
    )


@pytest.mark.parametrize("function", [*PLANS, load_plan])
def test_a_plan_cuts_blocks_at_both_ends_of_the_range(function: Callable[..., None]) -> None:
    """A range inside one block, from inside one block into another, or empty takes its own tokens only."""
    batch = Table(4, 3, [0], [[7, 3, 4]]).batch([0, 0, 0], [12, 12, 12])
    assert plan(function, batch, [(5, 7), (3, 11), (4, 4)], 2) == (
        [[[3, 1, 3, 0], UNUSED], [[7, 3, 4, 0], [3, 0, 7, 1]], [UNUSED] * 2],
        [1, 2, 0],
    )


@pytest.mark.parametrize("function", [*PLANS, load_plan])
def test_a_range_without_live_tokens_is_one_segment_of_zeros(function: Callable[..., None]) -> None:
    """Before the first live token, after the last one, or where seq_len ends before them, one segment is all."""
    batch = Table(4, 3, [2], [[6, 7]]).batch([0, 0, 0], [14, 14, 5])
    expected = [[[-1, 0, 6, 0]], [[-1, 0, 10, 0]], [[-1, 0, 11, 0]]], [1, 1, 1]
    assert plan(function, batch, [(1, 7), (15, 25), (1, 12)], 1) == expected


@pytest.mark.parametrize("function", [*PLANS, load_plan])
def test_a_null_block_is_no_neighbour_of_block_1(function: Callable[..., None]) -> None:
    """Zeros for a null block end where the next block starts, whatever its id."""
    batch = Table(4, 3, [0], [[7, 0, 1]]).batch([0], [12])
    assert plan(function, batch, [(0, 12)], 3) == ([[[7, 0, 4, 0], [-1, 0, 4, 4], [1, 0, 4, 8]]], [3])


@pytest.mark.parametrize("function", [*PLANS, load_plan])
def test_a_full_plan_is_cut_but_counted(function: Callable[..., None]) -> None:
    """Beyond max_segments nothing is written, and the count says how many there are."""
    ranges = [(6, 20), (0, 0), (2, 7)]
    for max_segments in (2, 1, 0):
        found, counts = plan(function, ring(), ranges, max_segments)
        assert counts == [3, 0, 3]
        assert found[0] == [[-1, 0, 2, 0], [6, 0, 10, 2]][:max_segments]


@st.composite
def planned(draw: st.DrawFn) -> tuple[GroupRows, list[tuple[int, int]]]:
    """Draw a batch with a range for every row."""
    batch = draw(batches())
    begins = [draw(st.integers(0, 40)) for _ in range(batch.num_rows)]
    return batch, [(a, a + draw(st.integers(0, 40))) for a in begins]


@given(planned(), st.integers(0, 12))
@settings(max_examples=250, deadline=None)
def test_torch_plans_equal_the_reference(drawn: tuple[GroupRows, list[tuple[int, int]]], max_segments: int) -> None:
    """The vectorised path gives the loop's plan for any rows, ranges, capacities."""
    assert plan(load_plan_torch, *drawn, max_segments) == plan(load_plan_reference, *drawn, max_segments)


@given(planned())
@settings(max_examples=15, deadline=None)
def test_kernel_plans_equal_the_reference(drawn: tuple[GroupRows, list[tuple[int, int]]]) -> None:
    """The kernel gives the loop's plan for any rows, ranges."""
    assert plan(load_plan, *drawn, 7) == plan(load_plan_reference, *drawn, 7)


@given(planned())
@settings(max_examples=100, deadline=None)
def test_a_plan_loads_every_token_of_its_range(drawn: tuple[GroupRows, list[tuple[int, int]]]) -> None:
    """Carried out, a plan fills the buffer without gap or overlap with the slots of the range, or with zeros."""
    batch, ranges = drawn
    size, words = batch.meta.block_size, batch.words.tolist()
    segments, counts = plan(load_plan_torch, batch, ranges, 50)
    rows = zip(batch.rows.tolist(), batch.seq_lens.tolist(), ranges, segments, counts, strict=True)
    for row, seq_len, (a, b), row_segments, count in rows:
        loaded: list[int] = []
        for source, begin, end, destination in row_segments[:count]:
            assert destination == len(loaded)
            loaded += [-1 if source < 0 else source * size + token for token in range(begin, end)]
        assert loaded == [
            batch.meta.slot(words, row, position) if position < seq_len else -1
            for position in (range(a, b) if row >= 0 else ())
        ]


@pytest.mark.parametrize("num_blocks", [512, 513, 1025])
def test_plans_go_on_over_the_kernels_tiles(num_blocks: int) -> None:
    """A copy that spans tiles of the kernel is one segment, as are zeros that do."""
    ids = [[9999, *range(3, 2 + num_blocks)], [9], [2 * k + 1 for k in range(num_blocks)]]
    batch = Table(2, num_blocks, [0, num_blocks + 5, 0], ids).batch([0, 1, 2], [9999] * 3)
    ranges = [(1, 2 * num_blocks + 3), (1, 2 * num_blocks + 11), (0, 2 * num_blocks)]
    assert plan(load_plan, batch, ranges, num_blocks + 3) == plan(load_plan_reference, batch, ranges, num_blocks + 3)


def test_plans_refuse_what_they_cannot_hold() -> None:
    """The check names a plan that is too short, a range that runs backwards; sharded groups are refused."""
    ranges = int32([6, 20, 1, 0, 2, 7]).view(3, 2)
    segments, counts = torch.empty(3, 3, 4, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
    check_load_plan(ring(), ranges, segments=segments, counts=counts)
    with pytest.raises(ValueError, match=r"row 0: segments: expected <= 2 \(max_segments\), got 3"):
        check_load_plan(ring(), ranges, segments=segments[:, :2].contiguous(), counts=counts)
    with pytest.raises(ValueError, match=r"row 1: range: expected 0 <= a <= b, got \(8, 7\)"):
        check_load_plan(ring(), ranges + int32([0, 0, 0, 0, 6, 0]).view(3, 2), segments=segments, counts=counts)
    batch = ring()
    batch.rows[0] = -2
    with pytest.raises(ValueError, match="rows"):
        check_load_plan(batch, ranges, segments=segments, counts=counts)
    for function in (load_plan_torch, load_plan):
        with pytest.raises(ValueError, match="num_ranks: expected 1"):
            function(with_meta(ring(), num_ranks=2), ranges, segments=segments, counts=counts)
        with pytest.raises(ValueError, match=r"ranges\.shape"):
            function(ring(), ranges[:2], segments=segments, counts=counts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at the addresses that the interpreter loads from")
def test_the_neighbour_before_ordinal_0_has_no_address_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No load, masked or not, is from the word before a row's first column."""
    from triton.runtime.interpreter import interpreter_builder

    addresses, load = [], interpreter_builder.create_masked_load

    def recorded(ptrs: TensorHandle, *args: object) -> TensorHandle:
        addresses.extend(ptrs.data.reshape(-1).tolist())
        return load(ptrs, *args)

    monkeypatch.setattr(interpreter_builder, "create_masked_load", recorded)
    batch = Table(4, 3, [0], [[6, 7, 8]]).batch([0], [12])
    assert run(block_runs, batch, 1) == ([[[6, 3]]], [1])
    plan(load_plan, batch, [(0, 12)], 2)
    first_column = batch.words.data_ptr() + batch.meta.table_offset * batch.words.element_size()
    assert first_column in addresses
    assert first_column - batch.words.element_size() not in addresses
