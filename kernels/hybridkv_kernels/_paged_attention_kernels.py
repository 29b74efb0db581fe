"""Triton kernels of paged attention.

Their contract is in `paged_attention_reference`, tiles plus grid are in `paged_attention`. MASK is 0 for causal
attention, 1 with a window, 2 with chunks; `span` is the window or chunk in tokens. Scores are kept in base 2.
"""

from __future__ import annotations

from hybridkv_kernels._row_tiles import find_row
from hybridkv_kernels._triton import jit, tl


@jit
def _first_visible(position: tl.tensor, span: tl.tensor, MASK: tl.constexpr) -> tl.tensor:
    """Return the first key that each query sees; positions are >= 0."""
    if MASK == 1:
        first = tl.maximum(position - span + 1, 0)
    elif MASK == 2:
        first = position // span * span
    else:
        first = position * 0
    return first


@jit
def _load_tile(
    cache_ptr: tl.tensor,
    offsets: tl.tensor,  # [BLOCK_N] int64
    key_ok: tl.tensor,  # [BLOCK_N] bool
    stride_dim: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """Load `[BLOCK_N, BLOCK_D]`; keys that are not visible read 0, so foreign bytes cannot spread NaN."""
    dims = tl.arange(0, BLOCK_D)
    pointers = cache_ptr + offsets[:, None] + (dims.to(tl.int64) * stride_dim)[None, :]
    if DIM == BLOCK_D:
        tile = tl.load(pointers, mask=key_ok[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=key_ok[:, None] & (dims < DIM)[None, :], other=0.0)
    return tile


@jit
def _dot(left: tl.tensor, right: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    """Multiply with float32 sums. UPCAST is for Triton 3.9's interpreter, which multiplies the raw bits of bfloat16."""
    if UPCAST:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@jit
def paged_attention_kernel(
    query_ptr: tl.tensor,  # [T, Hq, Dk]
    key_ptr: tl.tensor,  # [num_blocks, block_size, Hkv, Dk]
    value_ptr: tl.tensor,  # [num_blocks, block_size, Hkv, Dv]
    table_ptr: tl.tensor,  # [max_rows, >= width] int32
    rows_ptr: tl.tensor,  # [R] int32
    query_start_ptr: tl.tensor,  # [R + 1] int32
    seq_lens_ptr: tl.tensor,  # [R] int32
    sinks_ptr: tl.tensor,  # [Hq] or None
    out_ptr: tl.tensor,  # [T, Hq, Dv], or float32 [T, Hq, NUM_SPLITS, Dv] if NUM_SPLITS > 1
    stats_ptr: tl.tensor,  # None, or float32 [T, Hq, NUM_SPLITS, 2]: maximum, sum
    num_rows: tl.tensor,
    width: tl.tensor,
    span: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_k_block: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_k_dim: tl.tensor,
    stride_v_block: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_v_dim: tl.tensor,
    stride_table: tl.tensor,
    stride_o_token: tl.tensor,
    stride_o_head: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NULL_BLOCK: tl.constexpr,
    UPCAST_DOT: tl.constexpr,
    LOG2_E: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    row = find_row(query_start_ptr, tile, num_rows, BLOCK_Q)
    query_start = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - query_start
    first_query = (tile - (query_start // BLOCK_Q + row)) * BLOCK_Q
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    table_row = table_ptr + tl.load(rows_ptr + row).to(tl.int64) * stride_table

    pair = tl.arange(0, BLOCK_M)
    query_idx = first_query + pair // GROUP
    pair_ok = (pair < BLOCK_Q * GROUP) & (query_idx < query_len)
    position = seq_len - query_len + query_idx  # [BLOCK_M], negative only where seq_len is 0
    token = (query_start + query_idx).to(tl.int64)
    head = kv_head * GROUP + pair % GROUP
    dims_k = tl.arange(0, BLOCK_DK)
    query_offsets = token * stride_q_token + head * stride_q_head
    query_mask = pair_ok[:, None] & (dims_k < DK)[None, :]
    query = tl.load(query_ptr + query_offsets[:, None] + dims_k[None, :], mask=query_mask, other=0.0)

    # The keys of the whole tile: from its first query's first visible key to its last query.
    first_seen = _first_visible(tl.maximum(position, 0), span, MASK)  # [BLOCK_M]
    tile_first = _first_visible(tl.maximum(seq_len - query_len + first_query, 0), span, MASK)
    tile_end = seq_len - query_len + tl.minimum(first_query + BLOCK_Q, query_len)
    begin = tile_first // BLOCK_SIZE * BLOCK_SIZE
    end = tile_end
    if NUM_SPLITS > 1:
        num_tiles = tl.cdiv(tl.maximum(tile_end - begin, 0), BLOCK_N)
        split_keys = tl.cdiv(num_tiles, NUM_SPLITS) * BLOCK_N
        begin = begin + split * split_keys
        end = tl.minimum(begin + split_keys, tile_end)

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key_pos = start + tl.arange(0, BLOCK_N)
        in_range = (key_pos >= tile_first) & (key_pos < end)
        entry = tl.load(table_row + (key_pos // BLOCK_SIZE) % width, mask=in_range, other=NULL_BLOCK)
        key_ok = in_range & (entry > NULL_BLOCK)
        block_id = entry.to(tl.int64)
        offset = (key_pos % BLOCK_SIZE).to(tl.int64)
        key_offsets = block_id * stride_k_block + offset * stride_k_token + kv_head * stride_k_head
        keys = _load_tile(key_ptr, key_offsets, key_ok, stride_k_dim, DK, BLOCK_DK)
        scores = _dot(query, tl.trans(keys.to(query.dtype)), UPCAST_DOT)
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1) is exact at both infinities.
            doubled = scores * (2.0 * LOG2_E * scale / softcap)
            scores = (softcap * LOG2_E) * (1.0 - 2.0 / (tl.exp2(doubled) + 1.0))
        else:
            scores = scores * (scale * LOG2_E)
        visible = key_ok[None, :] & (key_pos[None, :] <= position[:, None])
        if MASK != 0:
            visible = visible & (key_pos[None, :] >= first_seen[:, None])
        scores = tl.where(visible, scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A query that has seen nothing yet keeps -inf; subtracting 0 instead avoids -inf - -inf.
        safe_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - safe_maximum[:, None])
        rescale = tl.exp2(maximum - safe_maximum)
        total = total * rescale + tl.sum(weights, 1)
        value_offsets = block_id * stride_v_block + offset * stride_v_token + kv_head * stride_v_head
        values = _load_tile(value_ptr, value_offsets, key_ok, stride_v_dim, DV, BLOCK_DV)
        acc = acc * rescale[:, None]
        acc += _dot(weights.to(query.dtype), values.to(query.dtype), UPCAST_DOT)
        maximum = new_maximum

    dims_v = tl.arange(0, BLOCK_DV)
    out_mask = pair_ok[:, None] & (dims_v < DV)[None, :]
    out_offsets = token * stride_o_token + head * stride_o_head
    if NUM_SPLITS > 1:
        part = out_offsets * NUM_SPLITS + split
        tl.store(out_ptr + part[:, None] * DV + dims_v[None, :], acc, mask=out_mask)
        tl.store(stats_ptr + part * 2, maximum, mask=pair_ok)
        tl.store(stats_ptr + part * 2 + 1, total, mask=pair_ok)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=pair_ok, other=0.0).to(tl.float32) * LOG2_E
            total += tl.exp2(sink - tl.where(maximum == float("-inf"), 0.0, maximum))
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + out_offsets[:, None] + dims_v[None, :], result.to(out_ptr.dtype.element_ty), mask=out_mask)


@jit
def merge_splits_kernel(
    partial_ptr: tl.tensor,  # [T, Hq, NUM_SPLITS, Dv] float32
    stats_ptr: tl.tensor,  # [T, Hq, NUM_SPLITS, 2] float32
    query_start_ptr: tl.tensor,  # [R + 1] int32
    sinks_ptr: tl.tensor,  # [Hq] or None
    out_ptr: tl.tensor,  # [T, Hq, Dv]
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    stride_o_token: tl.tensor,
    stride_o_head: tl.tensor,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    LOG2_E: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    if token >= tl.load(query_start_ptr + num_rows):
        return
    split = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, BLOCK_DV)
    split_ok = split < NUM_SPLITS
    part = (token * num_heads + head) * NUM_SPLITS + split
    maxima = tl.load(stats_ptr + part * 2, mask=split_ok, other=float("-inf"))
    totals = tl.load(stats_ptr + part * 2 + 1, mask=split_ok, other=0.0)
    maximum = tl.max(maxima, 0)
    safe_maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    rescale = tl.exp2(maxima - safe_maximum)
    total = tl.sum(totals * rescale, 0)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E - safe_maximum)
    mask = split_ok[:, None] & (dims < DV)[None, :]
    partial = tl.load(partial_ptr + part[:, None] * DV + dims[None, :], mask=mask, other=0.0)
    result = tl.sum(partial * rescale[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out_row = out_ptr + token * stride_o_token + head * stride_o_head
    tl.store(out_row + dims, result.to(out_ptr.dtype.element_ty), mask=dims < DV)
