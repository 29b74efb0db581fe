"""Claims about the slot mapping of all groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv_kernels.slot_mapping import (
    check_slot_mapping,
    compute_slot_mapping,
    compute_slot_mapping_numpy,
    compute_slot_mapping_reference,
)

POISON = 12345


@dataclass(frozen=True)
class Group:
    """One group's table: every column of every row, the live ordinals of every row."""

    block_size: int
    width: int
    row_stride: int
    columns: list[list[int]]
    live: list[tuple[int, int]]


@dataclass(frozen=True)
class Inputs:
    """The arguments of the op as numpy arrays."""

    words: np.ndarray
    group_meta: np.ndarray
    token_rows: np.ndarray
    positions: np.ndarray

    def run(self, function: Callable[..., None]) -> list[list[int]]:
        """Call a host function of the op's signature on a poisoned output, which is returned."""
        out = np.full((self.group_meta.shape[0], self.positions.shape[0]), POISON, np.int64)
        function(self.words, self.group_meta, self.token_rows, self.positions, out=out)
        return out.tolist()

    def run_triton(self, device: torch.device) -> list[list[int]]:
        """Call the launcher on a poisoned output, which is returned."""
        num_groups, num_tokens = self.group_meta.shape[0], self.positions.shape[0]
        # The row stride of `out` is wider than the row: words beyond a group's tokens must stay untouched.
        wide = torch.full((num_groups, num_tokens + 3), POISON, dtype=torch.int64, device=device)
        arrays = (self.words, self.group_meta, self.token_rows, self.positions)
        compute_slot_mapping(*(torch.from_numpy(array).to(device) for array in arrays), out=wide[:, :num_tokens])
        assert (wide[:, num_tokens:] == POISON).all()
        return wide[:, :num_tokens].tolist()


def pack(groups: list[Group], tokens: list[tuple[int, int]]) -> Inputs:
    """Lay tables, then live ranges of all groups into one flat buffer; `tokens` are (row, position)."""
    words: list[int] = [POISON]  # no offset is 0
    meta = []
    for group in groups:
        num_rows, table_offset = len(group.columns), len(words)
        for columns in group.columns:
            words += columns + [POISON] * (group.row_stride - group.width)
        first_offset = len(words)
        words += [first for first, _ in group.live] + [end for _, end in group.live]
        count_offset = first_offset + num_rows
        meta.append((table_offset, group.row_stride, group.width, group.block_size, first_offset, count_offset))
    return Inputs(
        words=np.array(words, np.int32),
        group_meta=np.array(meta, np.int64).reshape(-1, 6),
        token_rows=np.array([row for row, _ in tokens], np.int32),
        positions=np.array([position for _, position in tokens], np.int64),
    )


@st.composite
def inputs(draw: st.DrawFn) -> Inputs:
    """Draw groups of any mode with rows that wrapped, hold null blocks, or are empty."""
    num_rows = draw(st.integers(1, 4))
    groups, edges = [], [2**31, 2**40]
    for _ in range(draw(st.integers(1, 4))):
        width = draw(st.integers(1, 6))
        ids = st.lists(st.integers(0, 2**31 - 1), min_size=width, max_size=width)
        firsts = draw(st.lists(st.integers(-2, 20), min_size=num_rows, max_size=num_rows))
        live = [(first, first + draw(st.integers(0, width))) for first in firsts]
        columns = [draw(ids) for _ in range(num_rows)]
        block_size = draw(st.sampled_from([0, 1, 2, 3, 16, 24]))
        groups.append(Group(block_size, width, width + draw(st.integers(0, 2)), columns, live))
        # First token of the first live block, last token of the last one, the tokens just outside.
        edges += [max(block_size, 1) * ordinal - back for ordinals in live for ordinal in ordinals for back in (0, 1)]
    positions = st.integers(-3, 100) | st.sampled_from(edges)
    return pack(groups, draw(st.lists(st.tuples(st.integers(-1, num_rows - 1), positions), max_size=25)))


def example(num_tokens: int) -> Inputs:
    """Make four groups (full, wrapped ring, states, odd block size) with seeded contents."""
    rng = np.random.default_rng(num_tokens)
    groups = []
    for block_size, width in ((16, 64), (32, 5), (0, 1), (24, 7)):
        columns = rng.integers(0, 90, (3, width)).tolist()
        firsts = rng.integers(0, 1 if width == 64 else 30, 3).tolist()
        live = [(first, first + int(rng.integers(0, width + 1))) for first in firsts]
        groups.append(Group(block_size, width, width + 3, columns, live))
    tokens = zip(rng.integers(-1, 3, num_tokens).tolist(), rng.integers(-2, 1024, num_tokens).tolist(), strict=True)
    return pack(groups, list(tokens))


RING = Group(block_size=4, width=3, row_stride=4, columns=[[7, 8, 6], [5, 0, 9]], live=[(2, 5), (0, 2)])
RING_TOKENS = [(0, 7), (0, 8), (0, 13), (0, 19), (0, 20), (1, 3), (1, 4), (1, 8), (-1, 8), (0, -1)]
# Row 0 holds ordinals 2, 3, 4 in columns 2, 0, 1; row 1 holds ordinal 0 plus an unreserved ordinal 1.
RING_SLOTS = [-1, 24, 29, 35, -1, 23, -1, -1, -1, -1]


@pytest.mark.parametrize("function", [compute_slot_mapping_reference, compute_slot_mapping_numpy])
def test_wrapped_ring_gives_exact_slots_on_the_host(function: Callable[..., None]) -> None:
    """A ring that wrapped maps live positions to their slots, dead, null or padding ones to PAD."""
    assert pack([RING], RING_TOKENS).run(function) == [RING_SLOTS]


def test_wrapped_ring_gives_exact_slots_in_the_kernel(device: torch.device) -> None:
    """The kernel agrees with the hand-made slots of a wrapped ring."""
    assert pack([RING], RING_TOKENS).run_triton(device) == [RING_SLOTS]


@given(inputs())
@settings(max_examples=200, deadline=None)
def test_numpy_equals_reference(drawn: Inputs) -> None:
    """The vectorised path gives the loop's slots for any tables, rows, positions."""
    assert drawn.run(compute_slot_mapping_numpy) == drawn.run(compute_slot_mapping_reference)


@given(inputs())
@settings(max_examples=8, deadline=None)
def test_kernel_equals_reference_on_drawn_inputs(drawn: Inputs) -> None:
    """The kernel gives the loop's slots for any tables, rows, positions."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert drawn.run_triton(device) == drawn.run(compute_slot_mapping_reference)


@pytest.mark.parametrize("num_tokens", [0, 1, 31, 256, 257])
def test_kernel_equals_reference_around_its_tile(num_tokens: int, device: torch.device) -> None:
    """Empty, single, odd, exact, one-past-a-tile batches give the loop's slots in every group."""
    case = example(num_tokens)
    assert case.run_triton(device) == case.run(compute_slot_mapping_reference)


@pytest.mark.parametrize("has_meta", [True, False])
def test_states_group_is_all_padding(has_meta: bool, device: torch.device) -> None:
    """A group in mode NONE has no slots, whether its row looks live or all its meta is zero."""
    case = pack([Group(0, 1, 1, [[5], [6]], [(0, 1), (0, 9)])], [(0, 0), (1, 3), (-1, 0)])
    case.group_meta[0] *= has_meta
    assert case.run(compute_slot_mapping_numpy) == [[-1, -1, -1]]
    assert case.run_triton(device) == [[-1, -1, -1]]


def test_slots_beyond_32_bits_are_exact(device: torch.device, checked_int32: None) -> None:
    """The largest block id times a large block size needs 64 bits, as does a far position of a ring."""
    top = 2**31 - 1
    ring = Group(512, 2, 2, [[top, 3]], [(2**31 - 3, 2**31 - 1)])
    position = (2**31 - 2) * 512 + 511
    case = pack([ring], [(0, position), (0, position - 512)])
    expected = [[top * 512 + 511, 3 * 512 + 511]]
    assert case.run(compute_slot_mapping_reference) == expected
    assert case.run(compute_slot_mapping_numpy) == expected
    assert case.run_triton(device) == expected


def test_no_groups_or_no_words_write_nothing(device: torch.device) -> None:
    """An empty model or an empty buffer is served without reading anything."""
    assert pack([], [(0, 1)]).run_triton(device) == []
    empty = replace(pack([RING], [(0, 1)]), words=np.empty(0, np.int32))
    assert empty.run(compute_slot_mapping_numpy) == [[-1]]


def _break_first_live(case: Inputs) -> None:
    case.words[case.group_meta[0, 4]] = -1


def _break_live_count(case: Inputs) -> None:
    case.words[case.group_meta[0, 5]] = 2 + 3 + 1


def _break_entry(case: Inputs) -> None:
    case.words[case.group_meta[0, 0]] = -5


def _break_table_offset(case: Inputs) -> None:
    case.group_meta[0, 0] = case.words.shape[0] - 2


def _break_width(case: Inputs) -> None:
    case.group_meta[0, 2] = 5


def _break_row(case: Inputs) -> None:
    case.token_rows[0] = -2


BREAKS = [_break_first_live, _break_live_count, _break_entry, _break_table_offset, _break_width, _break_row]


@pytest.mark.parametrize("break_it", BREAKS)
def test_check_refuses_each_broken_invariant(break_it: Callable[[Inputs], None]) -> None:
    """The check accepts the sound example, then refuses it once one invariant is broken."""
    case = pack([RING], RING_TOKENS)
    case.run(check_slot_mapping)
    break_it(case)
    with pytest.raises(ValueError, match="expected"):
        case.run(check_slot_mapping)


def test_launcher_refuses_wrong_dtype_or_shape() -> None:
    """The launcher names the argument whose dtype or shape is wrong."""
    case = pack([RING], RING_TOKENS)
    words, meta, rows, positions = (
        torch.from_numpy(array) for array in (case.words, case.group_meta, case.token_rows, case.positions)
    )
    out = torch.empty(1, len(RING_TOKENS), dtype=torch.int64)
    with pytest.raises(ValueError, match=r"words\.dtype"):
        compute_slot_mapping(words.long(), meta, rows, positions, out=out)
    with pytest.raises(ValueError, match=r"token_rows\.shape"):
        compute_slot_mapping(words, meta, rows[1:], positions, out=out)
    with pytest.raises(ValueError, match=r"out\.dtype"):
        compute_slot_mapping(words, meta, rows, positions, out=out.int())
