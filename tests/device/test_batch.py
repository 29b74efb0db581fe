"""Claims about the geometry that all groups share in one step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.batch import BatchGeometry

TENSORS = {
    "rows": torch.int32,
    "query_start_loc": torch.int32,
    "seq_lens": torch.int32,
    "token_rows": torch.int32,
    "positions": torch.int64,
}


def test_the_batch_drawn_in_the_module() -> None:
    """Rows 3, 0 and 5 compute 3, 1 and 2 tokens after 7, 41 and 0: ranges, lengths, rows and positions."""
    batch = BatchGeometry.build([3, 0, 5], [3, 1, 2], [7, 41, 0])
    assert batch.rows_cpu.tolist() == [3, 0, 5]
    assert batch.query_start_loc_cpu.tolist() == [0, 3, 4, 6]
    assert batch.seq_lens_cpu.tolist() == [10, 42, 2]
    assert batch.num_computed_tokens_cpu.tolist() == [7, 41, 0]
    assert batch.token_rows_cpu.tolist() == [3, 3, 3, 0, 5, 5]
    assert batch.positions_cpu.tolist() == [7, 8, 9, 41, 0, 1]
    assert batch.zero_start.tolist() == [False, False, True]
    assert (batch.num_reqs, batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (3, 6, 3, 42)
    assert batch.last_token_indices.tolist() == [2, 3, 5]


def test_padding_has_no_row_no_length_and_no_tokens() -> None:
    """Padded requests have row -1, length 0, an empty range, no start; padded tokens have row -1 and position 0."""
    batch = BatchGeometry.build([1, 0], [2, 1], [4, 8], num_reqs_padded=4, num_tokens_padded=6)
    assert batch.zero_start.tolist() == [False] * 4
    assert batch.rows_cpu.tolist() == [1, 0, -1, -1]
    assert batch.query_start_loc_cpu.tolist() == [0, 2, 3, 3, 3]
    assert batch.seq_lens_cpu.tolist() == [6, 9, 0, 0]
    assert batch.num_computed_tokens_cpu.tolist() == [4, 8, 0, 0]
    assert batch.token_rows_cpu.tolist() == [1, 1, 0, -1, -1, -1]
    assert batch.positions_cpu.tolist() == [4, 5, 8, 0, 0, 0]
    assert (batch.num_reqs, batch.num_tokens) == (2, 3)
    assert batch.last_token_indices.tolist() == [1, 2]


def test_an_empty_batch_is_all_padding() -> None:
    """A step without rows has no tokens; padded, it is padding throughout."""
    batch = BatchGeometry.build([], [], [])
    assert (batch.num_reqs, batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (0, 0, 0, 0)
    assert batch.query_start_loc_cpu.tolist() == [0]
    batch = BatchGeometry.build([], [], [], num_reqs_padded=2, num_tokens_padded=2)
    assert batch.query_start_loc_cpu.tolist() == [0, 0, 0]
    assert (batch.rows_cpu.tolist(), batch.token_rows_cpu.tolist()) == ([-1, -1], [-1, -1])
    assert batch.zero_start.tolist() == [False, False]


@pytest.mark.parametrize("padded", [(0, 0), (3, 8)])
def test_device_tensors_equal_the_host_arrays(padded: tuple[int, int], device: torch.device) -> None:
    """Each array that kernels read is on the device with the documented type and the values that the host keeps."""
    batch = BatchGeometry.build(
        [2, 0], [1, 4], [5, 0], device=device, num_reqs_padded=padded[0], num_tokens_padded=padded[1]
    )
    for name, dtype in TENSORS.items():
        tensor, host = getattr(batch, name), getattr(batch, f"{name}_cpu")
        assert (tensor.device.type, tensor.dtype) == (device.type, dtype)
        assert np.array_equal(tensor.cpu().numpy(), host)
        assert host is getattr(batch, f"{name}_cpu")
    assert (batch.zero_start.device.type, batch.zero_start.dtype) == (device.type, torch.bool)
    assert np.array_equal(batch.zero_start.cpu(), (batch.num_computed_tokens_cpu == 0) & (batch.rows_cpu >= 0))


@settings(max_examples=60, deadline=None)
@given(
    work=st.lists(st.tuples(st.integers(1, 9) | st.integers(100, 300), st.integers(0, 2**30)), max_size=6),
    more_reqs=st.integers(0, 3),
    more_tokens=st.integers(0, 5),
)
def test_every_token_has_the_row_and_position_of_its_range(
    work: list[tuple[int, int]], more_reqs: int, more_tokens: int
) -> None:
    """Token i of a request is at position computed + i of its row, for any lengths and any padding."""
    rows = list(range(len(work)))[::-1]
    scheduled, computed = [count for count, _ in work], [count for _, count in work]
    size_r, size_t = len(work) + more_reqs, sum(scheduled) + more_tokens
    batch = BatchGeometry.build(rows, scheduled, computed, num_reqs_padded=size_r, num_tokens_padded=size_t)
    tokens = [(rows[idx], computed[idx] + i) for idx in range(len(work)) for i in range(scheduled[idx])]
    tokens += [(-1, 0)] * more_tokens
    assert list(zip(batch.token_rows_cpu.tolist(), batch.positions_cpu.tolist(), strict=True)) == tokens
    assert np.diff(batch.query_start_loc_cpu).tolist() == scheduled + [0] * more_reqs
    assert batch.seq_lens_cpu.tolist() == [a + b for a, b in work] + [0] * more_reqs
    assert batch.zero_start.tolist() == [count == 0 for count in computed] + [False] * more_reqs


@pytest.mark.parametrize(
    ("args", "padded", "message"),
    [
        (([0, 1], [1], [0, 0]), (0, 0), "got shapes"),
        (([0], [1], [0, 0]), (0, 0), "got shapes"),
        (([[0]], [[1]], [[0]]), (0, 0), "expected a flat list"),
        (([0], [1.9], [0]), (0, 0), "float64"),
        (([0, 0], [1, 1], [0, 5]), (0, 0), "distinct rows"),
        (([2**32], [1], [0]), (0, 0), "fit int32"),
        (([0], [0], [0]), (0, 0), "at least one token a row"),
        (([0, 1, 2], [1, 0, 2], [0, 0, 0]), (0, 0), "at least one token a row"),
        (([0, 1, 2], [1, 1, -1], [0, 0, 5]), (0, 0), "at least one token a row"),
        (([2, 0, 2], [1, 1, 1], [0, 0, 5]), (0, 0), "distinct rows"),
        (([0], [1], [-1]), (0, 0), "negative row or length"),
        (([-1], [1], [0]), (0, 0), "negative row or length"),
        (([0, 1], [1, 1], [0, 0]), (1, 0), "got 1 rows and 0 tokens for 2 rows and 2 tokens"),
        (([0, 1], [2, 1], [0, 0]), (2, 2), "got 2 rows and 2 tokens for 2 rows and 3 tokens"),
        (([0], [1], [2**31 - 1]), (0, 0), "2147483648 tokens"),
        (([0], [2], [2**63 - 1]), (0, 0), "9223372036854775807 tokens"),
        (([0, 1], [2**30, 2**30], [0, 0]), (0, 0), "a batch of 2147483648 tokens"),
        (([0, 1], [1, 1], [0, 2**63 - 1]), (0, 0), "expected"),
        (([0, 1], [2**63 - 1] * 2, [1, 1]), (0, 0), "got 9223372036854775807, expected at most 2147483647 a row"),
        (([0], [2**31], [0]), (0, 0), "num_scheduled_tokens: got 2147483648"),
        (([0, 1, 2], [1, -(2**63), 2 - 2**63], [0, 0, 0]), (0, 0), "at least one token a row"),
        (([0], [1], [0]), (-3, 0), "got -3 rows and 0 tokens for 1 rows"),
        (([], [], []), (0, -1), "got 0 rows and -1 tokens for 0 rows"),
    ],
)
def test_bad_batches_are_refused(args: tuple[list[int], ...], padded: tuple[int, int], message: str) -> None:
    """Unequal shapes, rows without tokens, negative numbers, lengths past int32 and too small padded sizes raise."""
    with pytest.raises(ValueError, match=message):
        BatchGeometry.build(*args, num_reqs_padded=padded[0], num_tokens_padded=padded[1])
