"""Claims about what paged attention refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from hybridkv_kernels.paged_attention import AttentionParams, PagedBatch, check_paged_attention, paged_attention

PARAMS = AttentionParams(scale=1.0, width=4, max_query_len=2)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_arguments() -> dict[str, torch.Tensor]:
    """Make two rows (2 of 6 tokens, 1 of 3 tokens) of block size 2 over a pool of 6 blocks."""
    return {
        "query": torch.zeros(3, 4, 16),
        "key_cache": torch.zeros(6, 2, 2, 16),
        "value_cache": torch.zeros(6, 2, 2, 8),
        "block_table": torch.tensor([[1, 2, 0, 0], [3, 4, 5, 0]], dtype=torch.int32),
        "rows": int32(1, 0),
        "query_start_loc": int32(0, 2, 3),
        "seq_lens": int32(6, 3),
        "out": torch.zeros(3, 4, 8),
    }


def call(function: object, tensors: Mapping[str, torch.Tensor], params: AttentionParams = PARAMS) -> None:
    batch = PagedBatch(*(tensors[name] for name in ("block_table", "rows", "query_start_loc", "seq_lens")))
    caches = (tensors["key_cache"], tensors["value_cache"])
    function(tensors["query"], *caches, batch, params, out=tensors["out"])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("query_start_loc", int32(1, 2, 3), r"query_start_loc\[0\]"),
        ("query_start_loc", int32(0, 2, 4), r"query_start_loc\[-1\]"),
        ("query_start_loc", int32(0, 3, 3), r"query_len\[0\]"),
        ("query_start_loc", int32(0, 2, 1), r"query_len\[1\]"),
        ("seq_lens", int32(1, 3), r"seq_lens\[0\]"),
        ("seq_lens", int32(9, 3), "visible ordinals"),
        ("seq_lens", int32(7, 3), "block id of ordinal 3"),
        ("rows", int32(1, 2), r"rows\[1\]"),
        ("block_table", int32(1, 6, 0, 0, 3, 4, 5, 0).view(2, 4), "block id of ordinal 1"),
    ],
)
def test_check_refuses_each_broken_invariant(name: str, value: torch.Tensor, message: str) -> None:
    """The check accepts the sound example, then refuses it once one invariant is broken."""
    tensors = make_arguments()
    call(check_paged_attention, tensors)
    with pytest.raises(ValueError, match=message):
        call(check_paged_attention, {**tensors, name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("query", torch.zeros(3, 3, 16), r"query\.shape\[1\]"),
        ("query", torch.zeros(3, 4, 8), r"query\.shape"),
        ("query", torch.zeros(3, 4, 16, dtype=torch.float64), r"query\.dtype"),
        ("query", torch.zeros(3, 16, 4).mT, r"query\.stride"),
        ("out", torch.zeros(3, 4, 16), r"out\.shape"),
        ("value_cache", torch.zeros(6, 3, 2, 8), "value_cache"),
        ("key_cache", torch.zeros(6, 2, 16), r"cache\.dim"),
        ("block_table", torch.zeros(2, 3, dtype=torch.int32), "block_table"),
        ("block_table", torch.zeros(4, 2, dtype=torch.int32).T, r"block_table\.stride"),
        ("seq_lens", torch.zeros(2, dtype=torch.int64), r"seq_lens\.dtype"),
        ("rows", int32(0), r"query_start_loc\.shape"),
    ],
)
def test_launcher_refuses_what_the_kernel_cannot_address(name: str, value: torch.Tensor, message: str) -> None:
    """Wrong shapes, dtypes, strides name their argument before anything is launched."""
    with pytest.raises(ValueError, match=message):
        call(paged_attention, {**make_arguments(), name: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale", float("nan")),
        ("width", 0),
        ("max_query_len", 0),
        ("window", 0),
        ("chunk", -1),
        ("softcap", 0.0),
        ("layout", "DHN"),
        ("num_splits", 0),
        ("num_splits", 65),
    ],
)
def test_params_refuse_values_out_of_range(field: str, value: object) -> None:
    """No parameter that a kernel could not serve makes a params object."""
    with pytest.raises(ValueError, match=field):
        replace(PARAMS, **{field: value})  # type: ignore[arg-type]


def test_window_with_chunk_is_refused() -> None:
    """A layer is windowed or chunked, not both."""
    with pytest.raises(ValueError, match="window, chunk"):
        replace(PARAMS, window=3, chunk=3)


def test_head_sizes_beyond_the_widest_tile_are_refused() -> None:
    """A head size of 257 names its limit in place of failing in the compiler."""
    tensors = make_arguments()
    tensors |= {"query": torch.zeros(3, 4, 257), "key_cache": torch.zeros(6, 2, 2, 257)}
    with pytest.raises(ValueError, match="head size: expected <= 256"):
        call(paged_attention, tensors)
