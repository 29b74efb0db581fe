"""Attention of packed queries over a paged cache in one launch.

The contract, its check, the loop reference are in `paged_attention_reference`, the kernels in
`_paged_attention_kernels`. This file has the launcher.

Tiles: one program serves BLOCK_M (query, head) pairs of one batch row that share a kv head, so grouped heads read each
key once. A program finds its batch row by binary search over `query_start_loc`: row b owns the tiles from
`query_start_loc[b] // BLOCK_Q + b` up to the next row's first, which is enough for its queries; surplus tiles return
at once. The idea is that of the unified Triton attention in vLLM.
Keys: tiles of BLOCK_N positions from the block of the first key that the tile sees to its last, each position through
its own table entry, so any block size works. No other block is read.
Splits: with num_splits > 1, that many programs share the keys of a tile, then a second kernel merges their results.

Invariants: I1..I4 of the contract. Scores, softmax, sums are float32; float32 inputs multiply in IEEE precision.
Grid: (T // BLOCK_Q + R, Hkv, num_splits), the merge (T, Hq): padded sizes only, never live lengths.
Limits: head sizes up to 256, up to 128 query heads per kv head. Tensors are on the current device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hybridkv_kernels._checks import expect, expect_last_dim_contiguous
from hybridkv_kernels._layout import as_nhd
from hybridkv_kernels._paged_attention_kernels import merge_splits_kernel, paged_attention_kernel
from hybridkv_kernels._triton import Launch, is_interpreted, next_power_of_2
from hybridkv_kernels.constants import NULL_BLOCK_ID
from hybridkv_kernels.paged_attention_reference import (
    MAX_SPLITS,
    AttentionParams,
    PagedBatch,
    check_paged_attention,
    check_shapes,
    paged_attention_reference,
)

__all__ = [
    "AttentionParams",
    "PagedBatch",
    "check_paged_attention",
    "paged_attention",
    "paged_attention_reference",
    "prepare_paged_attention",
    "recommended_num_splits",
]

_LOG2_E = math.log2(math.e)
_MAX_HEAD_DIM, _MAX_GROUP = 256, 128
_MASK_FULL, _MASK_WINDOW, _MASK_CHUNK = 0, 1, 2


@dataclass(frozen=True)
class _Tile:
    """Shape of one program: BLOCK_M (query, head) pairs by BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def _choose_tile(num_pairs: int, group: int, head_dim: int, item_bytes: int) -> _Tile:
    """Choose a tile for at most `num_pairs` pairs a row; `head_dim` is the wider of both, padded to a power of two."""
    # Chosen so that no variant listed in benchmarks/compile_kernels.py spills a register on any of its targets.
    largest_m = 32 if item_bytes == 4 or head_dim > 128 else 64
    # tl.dot needs 16 rows; a group is never cut, so that a kv head's tile reads each key once.
    block_m = max(16, next_power_of_2(group), min(largest_m, next_power_of_2(num_pairs)))
    if item_bytes == 4:
        return _Tile(block_m=block_m, block_n=16, num_warps=8, num_stages=1)
    block_n = 64 if head_dim <= 64 or (head_dim <= 128 and block_m == 16) else 32
    if block_m > largest_m:
        return _Tile(block_m=block_m, block_n=32, num_warps=8, num_stages=1)
    return _Tile(block_m=block_m, block_n=block_n, num_warps=4, num_stages=2)


def recommended_num_splits(num_tiles: int, max_seq_tokens: int, num_processors: int) -> int:
    """Return how many programs should share one tile's keys so that `num_processors` are busy.

    `num_tiles` is query tiles times kv heads (in a decode step: rows times kv heads), `max_seq_tokens` an upper bound.
    Each split gets at least 512 tokens. All three are host integers, so the answer is as constant as they are.
    """
    idle_factor = num_processors // max(num_tiles, 1)
    return max(1, min(idle_factor, max_seq_tokens // 512, MAX_SPLITS))


def prepare_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    *,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> tuple[Launch, ...]:
    """Check shapes, dtypes, strides without a sync, then return the launches that `paged_attention` runs in order.

    With `num_splits` > 1 this allocates the scratch of the partial results on the device.

    Shapes, dtypes: as in the contract of `paged_attention_reference`.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    check_shapes(query, key_cache, value_cache, batch, params, out=out, sinks=sinks)
    expect_last_dim_contiguous("query", query)
    expect_last_dim_contiguous("out", out)
    expect_last_dim_contiguous("block_table", batch.block_table)
    for name, tensor in (
        ("rows", batch.rows),
        ("query_start_loc", batch.query_start_loc),
        ("seq_lens", batch.seq_lens),
    ):
        expect_last_dim_contiguous(name, tensor)
    if sinks is not None:
        expect_last_dim_contiguous("sinks", sinks)
    if params.num_splits == 1:
        return (_attention_launch(query, key_cache, value_cache, batch, params, out=out, stats=None, sinks=sinks),)
    num_tokens, num_heads, value_dim = out.shape
    num_parts = num_tokens * num_heads * params.num_splits
    partial = torch.empty(num_parts * value_dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(num_parts * 2, dtype=torch.float32, device=query.device)
    return (
        _attention_launch(query, key_cache, value_cache, batch, params, out=partial, stats=stats, sinks=None),
        _merge_launch(partial, stats, batch, params.num_splits, out=out, sinks=sinks),
    )


def _attention_launch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    *,
    out: torch.Tensor,
    stats: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> Launch:
    key_nhd, value_nhd = as_nhd(key_cache, params.layout), as_nhd(value_cache, params.layout)
    num_tokens, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = value_nhd.shape[2:]
    group = num_heads // num_kv_heads
    block_dk, block_dv = max(16, next_power_of_2(key_dim)), max(16, next_power_of_2(value_dim))
    widest = max(block_dk, block_dv)
    expect(widest <= _MAX_HEAD_DIM, "head size", f"<= {_MAX_HEAD_DIM} (wider tiles fit no GPU)", (key_dim, value_dim))
    expect(group <= _MAX_GROUP, "query heads per kv head", f"<= {_MAX_GROUP}", group)
    tile = _choose_tile(params.max_query_len * group, group, widest, query.element_size())
    block_q = tile.block_m // group
    mask = _MASK_WINDOW if params.window is not None else _MASK_CHUNK if params.chunk is not None else _MASK_FULL
    # Partial results are packed [T, Hq, num_splits]; the kernel scales these strides by num_splits.
    out_strides = out.stride()[:2] if stats is None else (num_heads, 1)
    return Launch(
        name="paged_attention",
        kernel=paged_attention_kernel,
        grid=(num_tokens // block_q + batch.num_rows if num_tokens else 0, num_kv_heads, params.num_splits),
        args=(
            *(query, key_nhd, value_nhd, batch.block_table, batch.rows, batch.query_start_loc, batch.seq_lens),
            *(sinks, out, stats, batch.num_rows, params.width, params.window or params.chunk or 1),
            *(params.scale, params.softcap or 1.0),
            *(*query.stride()[:2], *key_nhd.stride(), *value_nhd.stride(), batch.block_table.stride(0), *out_strides),
        ),
        options={
            **{"BLOCK_SIZE": key_nhd.shape[1], "GROUP": group, "DK": key_dim, "DV": value_dim},
            **{"BLOCK_DK": block_dk, "BLOCK_DV": block_dv, "BLOCK_M": tile.block_m, "BLOCK_Q": block_q},
            **{"BLOCK_N": tile.block_n, "MASK": mask, "HAS_SOFTCAP": params.softcap is not None},
            **{"HAS_SINKS": sinks is not None, "NUM_SPLITS": params.num_splits, "NULL_BLOCK": NULL_BLOCK_ID},
            **{"UPCAST_DOT": is_interpreted(paged_attention_kernel), "LOG2_E": _LOG2_E},
            **{"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        },
    )


def _merge_launch(
    partial: torch.Tensor,
    stats: torch.Tensor,
    batch: PagedBatch,
    num_splits: int,
    *,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
) -> Launch:
    num_tokens, num_heads, value_dim = out.shape
    block_dv, block_splits = next_power_of_2(value_dim), next_power_of_2(num_splits)
    return Launch(
        name="merge_splits",
        kernel=merge_splits_kernel,
        grid=(num_tokens, num_heads, 1 if batch.num_rows else 0),
        args=(partial, stats, batch.query_start_loc, sinks, out, batch.num_rows, num_heads, *out.stride()[:2]),
        options={
            **{"DV": value_dim, "BLOCK_DV": block_dv, "HAS_SINKS": sinks is not None, "NUM_SPLITS": num_splits},
            **{"BLOCK_SPLITS": block_splits, "LOG2_E": _LOG2_E},
            "num_warps": 8 if block_splits * block_dv > 4096 else 4,
        },
    )


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    *,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute one layer's attention for decode rows with prefill chunks in one batch; no sync, capturable.

    Shapes, dtypes: as in the contract of `paged_attention_reference`.
    Raises: ValueError for a wrong shape, dtype, stride or device; ImportError without triton.
    """
    for launch in prepare_paged_attention(query, key_cache, value_cache, batch, params, out=out, sinks=sinks):
        launch.run()
