"""Contract, check, loop reference of attention over a paged cache.

Contract: one op for decode, chunked prefill or a mix of both; a packed batch of rows with any query length each.
    Query i of batch row b has position p = seq_lens[b] - query_len[b] + i, where query_len[b] =
    query_start_loc[b + 1] - query_start_loc[b]. It sees the keys k <= p with
        no window, no chunk    k >= 0
        window W               k >= p - W + 1
        chunk C                k >= p // C * C
    whose table entry is not the null block.
    s(k)   = scale * <q, K[k]>; with a softcap c: c * tanh(s / c)
    out    = sum_k exp(s(k)) V[k] / (sum_k exp(s(k)) + exp(sinks[h]) if sinks are given)
    A query that sees nothing gets zeros, never NaN. Query head h reads kv head h // (Hq // Hkv).
    Bytes of invisible keys never reach the result, whatever they hold.

Shapes
    query            [T, Hq, Dk]       float32, bfloat16 or float16; any strides, last dimension contiguous
    key_cache        NHD [num_blocks, block_size, Hkv, Dk], HND [num_blocks, Hkv, block_size, Dk]; any strides
    value_cache      NHD [num_blocks, block_size, Hkv, Dv], HND [num_blocks, Hkv, block_size, Dv]; any strides
    block_table      [max_rows, >= width] int32; row r is a ring: ordinal j is at column j % width
    rows             [R] int32         batch row -> table row
    query_start_loc  [R + 1] int32     token range of each batch row; empty for a padding row
    seq_lens         [R] int32         tokens in the cache, this step's included; 0 for a padding row
    sinks            [Hq] float        one extra logit a head, without a value
    out              [T, Hq, Dv]       tokens at or after query_start_loc[R] are not written

Invariants
    I1  query_start_loc[0] == 0, it never falls, query_start_loc[R] <= T, query_len <= max_query_len
    I2  query_len <= seq_len, or seq_len == 0 (that row gets zeros)
    I3  rows are in [0, max_rows); a padding row's entry is not read
    I4  every visible ordinal's entry is a block id in [1, num_blocks); the ordinals that one batch row sees fit a ring
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hybridkv_kernels._checks import expect, expect_one_device, expect_tensor
from hybridkv_kernels._layout import Layout, as_nhd
from hybridkv_kernels.constants import NULL_BLOCK_ID

MAX_SPLITS = 64
"""Most programs that may share one query tile's keys: the merge kernel holds all their results at once."""

_MAX_SPAN = 1 << 30
_QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AttentionParams:
    """What one layer's attention keeps constant over a captured graph.

    `width` is the ring modulus of the block table in blocks; `window`, `chunk` are in tokens, at most one is set;
    `max_query_len` is an upper bound in tokens that chooses the tile shape; `num_splits` programs share one query
    tile's keys (split-KV) with partial results in scratch memory of `num_splits * T * Hq * (Dv + 2)` floats.

    Raises: ValueError for a value out of range.
    """

    scale: float
    width: int
    max_query_len: int
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    layout: Layout = "NHD"
    num_splits: int = 1

    def __post_init__(self) -> None:
        """Refuse values that no kernel could serve."""
        expect(math.isfinite(self.scale), "scale", "a finite number", self.scale)
        expect(self.width >= 1, "width", ">= 1 block", self.width)
        expect(self.max_query_len >= 1, "max_query_len", ">= 1 token", self.max_query_len)
        expect(1 <= self.num_splits <= MAX_SPLITS, "num_splits", f"1..{MAX_SPLITS}", self.num_splits)
        expect(self.window is None or self.chunk is None, "window, chunk", "at most one", (self.window, self.chunk))
        for name, span in (("window", self.window), ("chunk", self.chunk)):
            expect(span is None or 1 <= span <= _MAX_SPAN, name, f"None or 1..{_MAX_SPAN} tokens", span)
        expect(self.softcap is None or self.softcap > 0, "softcap", "None or > 0", self.softcap)
        expect(self.layout in ("NHD", "HND"), "layout", "'NHD' or 'HND'", repr(self.layout))

    def first_visible(self, position: int) -> int:
        """Return the first key position that the query at `position` (>= 0) sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0


@dataclass(frozen=True)
class PagedBatch:
    """The geometry of one step in one group; shapes, dtypes as in the module's contract."""

    block_table: torch.Tensor
    rows: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Return R, the number of batch rows, padding rows included."""
        return self.rows.shape[0]


def check_shapes(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    *,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Check everything that needs no sync: shapes, dtypes, devices, head counts.

    Raises: ValueError naming the argument, what was expected, what was given.
    """
    key_nhd, value_nhd = as_nhd(key_cache, params.layout), as_nhd(value_cache, params.layout)
    num_blocks, block_size, num_kv_heads, key_dim = key_nhd.shape
    value_dim, num_rows = value_nhd.shape[3], batch.num_rows
    expect(query.dtype in _QUERY_DTYPES, "query.dtype", f"one of {_QUERY_DTYPES}", query.dtype)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        readable = f"one of {_QUERY_DTYPES}; float8 caches, which have scales, are not read"
        expect(cache.dtype in _QUERY_DTYPES, f"{name}.dtype", readable, cache.dtype)
    expect_tensor("query", query, None, (None, None, key_dim))
    num_tokens, num_heads = query.shape[0], query.shape[1]
    grouped = num_kv_heads > 0 and num_heads % num_kv_heads == 0 and num_heads > 0
    expect(grouped, "query.shape[1]", f"a positive multiple of {num_kv_heads} kv heads", num_heads)
    expect_tensor("value_cache (as NHD)", value_nhd, None, (num_blocks, block_size, num_kv_heads, None))
    expect_tensor("out", out, None, (num_tokens, num_heads, value_dim))
    expect_tensor("block_table", batch.block_table, torch.int32, (None, None))
    expect(batch.block_table.shape[1] >= params.width, "block_table.shape[1]", f">= width {params.width}", "less")
    expect_tensor("rows", batch.rows, torch.int32, (num_rows,))
    expect_tensor("query_start_loc", batch.query_start_loc, torch.int32, (num_rows + 1,))
    expect_tensor("seq_lens", batch.seq_lens, torch.int32, (num_rows,))
    named = [("query", query), ("key_cache", key_cache), ("value_cache", value_cache), ("out", out)]
    named += [("block_table", batch.block_table), ("rows", batch.rows)]
    named += [("query_start_loc", batch.query_start_loc), ("seq_lens", batch.seq_lens)]
    if sinks is not None:
        expect_tensor("sinks", sinks, None, (num_heads,))
        expect(sinks.dtype.is_floating_point, "sinks.dtype", "a float type", sinks.dtype)
        named.append(("sinks", sinks))
    expect_one_device(named)


def check_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    *,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Check shapes plus the invariants I1..I4; syncs, for tests and debugging.

    Raises: ValueError naming the argument, what was expected, what was given.
    """
    check_shapes(query, key_cache, value_cache, batch, params, out=out, sinks=sinks)
    num_blocks, block_size = as_nhd(key_cache, params.layout).shape[:2]
    starts = batch.query_start_loc.tolist()
    expect(starts[0] == 0, "query_start_loc[0]", 0, starts[0])
    expect(starts[-1] <= query.shape[0], "query_start_loc[-1]", f"<= {query.shape[0]} tokens", starts[-1])
    table = batch.block_table.cpu()
    for idx, (row, seq_len) in enumerate(zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True)):
        query_len = starts[idx + 1] - starts[idx]
        in_bounds = 0 <= query_len <= params.max_query_len
        expect(in_bounds, f"query_len[{idx}]", f"0..max_query_len {params.max_query_len}", query_len)
        expect(seq_len == 0 or query_len <= seq_len, f"seq_lens[{idx}]", f"0 or >= query_len {query_len}", seq_len)
        if query_len == 0 or seq_len == 0:
            continue
        expect(0 <= row < table.shape[0], f"rows[{idx}]", f"0..{table.shape[0] - 1}", row)
        first = params.first_visible(seq_len - query_len) // block_size
        last = (seq_len - 1) // block_size
        expect(last - first < params.width, f"row {idx}: visible ordinals", f"<= width {params.width}", (first, last))
        for ordinal in range(first, last + 1):
            block_id = int(table[row, ordinal % params.width])
            in_pool = NULL_BLOCK_ID < block_id < num_blocks
            expect(in_pool, f"row {idx}: block id of ordinal {ordinal}", f"1..{num_blocks - 1}", block_id)


def paged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    *,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute attention query by query in float64.

    Shapes, dtypes: as in the module's contract; `out` is overwritten for the tokens of the batch.
    """
    key_nhd, value_nhd = as_nhd(key_cache, params.layout), as_nhd(value_cache, params.layout)
    starts = batch.query_start_loc.tolist()
    for idx, (row, seq_len) in enumerate(zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True)):
        for token in range(starts[idx], starts[idx + 1]):
            position = seq_len - (starts[idx + 1] - token)
            keys, values = _gather_visible(key_nhd, value_nhd, batch.block_table[row], params, position)
            for head in range(query.shape[1]):
                kv_head = head // (query.shape[1] // key_nhd.shape[2])
                scores = keys[:, kv_head] @ query[token, head].double() * params.scale  # [n]
                if params.softcap is not None:
                    scores = params.softcap * torch.tanh(scores / params.softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].double().reshape(1)])  # [n + 1]
                if scores.numel() == 0:
                    out[token, head] = 0
                    continue
                weights = torch.softmax(scores, dim=0)[: keys.shape[0]]  # [n]
                out[token, head] = (weights @ values[:, kv_head]).to(out.dtype)


def _gather_visible(
    key_nhd: torch.Tensor, value_nhd: torch.Tensor, table_row: torch.Tensor, params: AttentionParams, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Collect the keys `[n, Hkv, Dk]` with values `[n, Hkv, Dv]` that one query sees, as float64."""
    block_size = key_nhd.shape[1]
    visible = range(params.first_visible(position), position + 1) if position >= 0 else range(0)
    places = [(int(table_row[key // block_size % params.width]), key % block_size) for key in visible]
    live = [(block_id, offset) for block_id, offset in places if block_id > NULL_BLOCK_ID]
    block_ids = torch.tensor([block_id for block_id, _ in live], dtype=torch.long, device=key_nhd.device)
    offsets = torch.tensor([offset for _, offset in live], dtype=torch.long, device=key_nhd.device)
    return key_nhd[block_ids, offsets].double(), value_nhd[block_ids, offsets].double()
