"""Page index `token_table`: the slot of every token of every row, as SGLang's `req_to_token` holds it.

Contract
    out[i, p] = slot(rows[i], p)     if token p is in use (`group_rows`), this rank owns it, its block is not null
              = fill                 otherwise: dead, unreserved, beyond seq_len, padding row, another rank's

    The slot formula is in `group_meta`. The default fill is 0: the slots of block 0 are the null block's, which may be
    read and is never written, so a kernel that loads a padded index stays inside the cache. The table by row number
    that SGLang keeps is this op with `rows = arange(num_rows)`; the `out_cache_loc` beside it is the slot mapping.

Shapes
    batch   GroupRows over [R] batch positions
    out     [R, L]  int32 or int64   any row stride; every element is written

Invariants
    P1..P3 of `group_rows`
    I1  seq_lens <= L; tokens from L on are left out
    I2  slots fit the dtype of `out`

Grid: (R, cdiv(L, BLOCK)).
"""

from __future__ import annotations

import torch

from hybridkv_kernels._checks import expect, expect_last_dim_contiguous, expect_one_device, expect_tensor
from hybridkv_kernels._triton import Launch, jit, tl
from hybridkv_kernels.constants import NULL_BLOCK_ID, PAD_SLOT_ID
from hybridkv_kernels.group_rows import (
    GroupRows,
    check_group_rows,
    gather_entries,
    load_entries,
    load_rows,
    used_ordinals,
)

__all__ = ["check_token_table", "prepare_token_table", "token_table", "token_table_reference", "token_table_torch"]

_BLOCK_TOKENS = 1024


def _check_shapes(batch: GroupRows, out: torch.Tensor) -> None:
    expect(out.dtype in (torch.int32, torch.int64), "out.dtype", "torch.int32 or torch.int64", out.dtype)
    expect_tensor("out", out, None, (batch.num_rows, None))
    expect_one_device((("words", batch.words), ("out", out)))


def check_token_table(batch: GroupRows, *, out: torch.Tensor) -> None:
    """Check the invariants; syncs, for tests and debugging.

    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(batch, out)
    check_group_rows(batch)
    words, meta, limit = batch.words.tolist(), batch.meta, torch.iinfo(out.dtype).max
    for row, seq_len in zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True):
        expect(row < 0 or seq_len <= out.shape[1], f"row {row}: seq_lens", f"<= {out.shape[1]} (L)", seq_len)
        for ordinal in meta.live_ordinals(words, row):
            last_slot = (meta.entry(words, row, ordinal) + 1) * meta.block_size - 1
            expect(last_slot <= limit, f"row {row}: slot for {out.dtype}", f"<= {limit}", last_slot)


def token_table_reference(batch: GroupRows, *, fill: int = 0, out: torch.Tensor) -> None:
    """Fill the table token by token.

    Shapes, dtypes: as in the module's contract.
    """
    words = batch.words.tolist()
    for index, (row, seq_len) in enumerate(zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True)):
        for position in range(out.shape[1]):
            slot = batch.meta.slot(words, row, position) if position < seq_len else PAD_SLOT_ID
            out[index, position] = fill if slot == PAD_SLOT_ID else slot


def token_table_torch(batch: GroupRows, *, fill: int = 0, out: torch.Tensor) -> None:
    """Fill the table with torch operations on any device; no sync.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype or device.
    """
    _check_shapes(batch, out)
    meta, num_tokens, used = batch.meta, out.shape[1], used_ordinals(batch)
    ordinals = torch.arange(-(-num_tokens // meta.span), device=out.device)
    entries = gather_entries(batch, used, ordinals[None, :])[:, :, None]  # [R, J, 1]
    # Owner and offset repeat from block to block, so nothing is divided per token of the table.
    position = torch.arange(meta.span, device=out.device)
    turn = position // (meta.interleave * meta.num_ranks)
    offset = turn * meta.interleave + position % meta.interleave
    is_owner = position // meta.interleave % meta.num_ranks == meta.rank
    slots = (entries * meta.block_size + offset).masked_fill_((entries == NULL_BLOCK_ID) | ~is_owner, fill)
    slots = slots.flatten(1)[:, :num_tokens]  # [R, J, span] -> [R, L]
    absent = torch.arange(num_tokens, device=out.device) >= used.seq_len[:, None]
    out.copy_(slots.masked_fill_(absent, fill))


@jit
def _token_table_kernel(
    words_ptr: tl.tensor,  # [num_words] int32
    rows_ptr: tl.tensor,  # [R] int32
    seq_lens_ptr: tl.tensor,  # [R] int32
    table_offset: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    first_offset: tl.tensor,
    count_offset: tl.tensor,
    span: tl.tensor,
    out_ptr: tl.tensor,  # [R, L] int32 or int64
    stride_out: tl.tensor,
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    block_size: tl.tensor,
    num_ranks: tl.tensor,
    rank: tl.tensor,
    interleave: tl.tensor,
    fill: tl.tensor,
    NULL_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, first, end, seq_len = load_rows(
        words_ptr, rows_ptr, seq_lens_ptr, first_offset, count_offset, span, index, index < num_rows
    )
    ordinal = position // span
    entry = load_entries(words_ptr, table_offset, row_stride, width, row, first, end, ordinal, NULL_BLOCK)
    owner = (position // interleave) % num_ranks
    offset = (position % span) // (interleave * num_ranks) * interleave + position % interleave
    in_use = (entry != NULL_BLOCK) & (position < seq_len) & (owner == rank)
    slot = tl.where(in_use, entry * block_size + offset, fill)
    out = out_ptr + index * stride_out + position
    tl.store(out, slot.to(out_ptr.dtype.element_ty), mask=position < num_tokens)


def prepare_token_table(batch: GroupRows, *, fill: int = 0, out: torch.Tensor) -> Launch:
    """Check shapes, dtypes, strides without a sync, then return the launch that `token_table` runs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(batch, out)
    expect_last_dim_contiguous("out", out)
    num_rows, num_tokens = out.shape
    meta = batch.meta
    return Launch(
        name="token_table",
        kernel=_token_table_kernel,
        grid=(num_rows, -(-num_tokens // _BLOCK_TOKENS), 1),
        args=(
            *batch.kernel_args,
            *(out, out.stride(0), num_rows, num_tokens),
            *(meta.block_size, meta.num_ranks, meta.rank, meta.interleave, fill),
        ),
        options={"NULL_BLOCK": NULL_BLOCK_ID, "BLOCK": _BLOCK_TOKENS, "num_warps": 4},
    )


def token_table(batch: GroupRows, *, fill: int = 0, out: torch.Tensor) -> None:
    """Write the slot of every token of every row with one kernel launch; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device; ImportError without triton.
    """
    prepare_token_table(batch, fill=fill, out=out).run()
