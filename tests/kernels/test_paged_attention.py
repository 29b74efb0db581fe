"""Claims about attention over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import pytest
import torch

from hybridkv_kernels.paged_attention import (
    AttentionParams,
    PagedBatch,
    check_paged_attention,
    paged_attention,
    paged_attention_reference,
    prepare_paged_attention,
    recommended_num_splits,
)

# (absolute, relative) error of the kernel against the float64 reference.
TOLERANCES = {
    torch.float32: (2e-6, 2e-6),  # float32 sums of a few dozen terms of size 1, exp2 within 2 ulp
    torch.float16: (2e-3, 2e-3),  # weights, then the output, rounded to 11 bits
    torch.bfloat16: (2e-2, 2e-2),  # weights, then the output, rounded (interpreted: truncated) to 8 bits
}


@dataclass(frozen=True)
class Case:
    """Sizes of one attention call; `lens` are (query_len, seq_len) of each batch row."""

    lens: tuple[tuple[int, int], ...] = ((1, 9), (5, 5), (0, 0), (3, 11), (1, 1), (4, 8))
    num_kv_heads: int = 2
    group: int = 3
    key_dim: int = 16
    value_dim: int = 16
    block_size: int = 4
    width: int = 8
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    layout: Literal["NHD", "HND"] = "NHD"
    num_splits: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def params(self) -> AttentionParams:
        """Return the parameters that these sizes ask for."""
        return AttentionParams(
            scale=self.key_dim**-0.5,
            width=self.width,
            max_query_len=max([1, *(query_len for query_len, _ in self.lens)]),
            window=self.window,
            chunk=self.chunk,
            softcap=self.softcap,
            layout=self.layout,
            num_splits=self.num_splits,
        )


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, with the dense keys, values of every batch row for an independent oracle."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    batch: PagedBatch
    sinks: torch.Tensor | None
    dense: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def run(self, function: object, params: AttentionParams, value_dim: int) -> torch.Tensor:
        """Call a function of the op's signature on a NaN output, which is returned."""
        out = torch.full((*self.query.shape[:2], value_dim), float("nan"), device=self.query.device)
        out = out.to(self.query.dtype)
        args = (self.query, self.key_cache, self.value_cache, self.batch, params)
        function(*args, out=out, sinks=self.sinks)  # type: ignore[operator]
        return out


def strided_cache(case: Case, num_blocks: int, dim: int, device: torch.device) -> torch.Tensor:
    """Make a NaN-filled cache as a view with gaps between blocks, heads."""
    middle = (case.block_size, case.num_kv_heads) if case.layout == "NHD" else (case.num_kv_heads, case.block_size)
    arena = torch.full((num_blocks, 2, *middle, dim + 1), float("nan"), device=device)
    return arena.to(case.dtype)[:, 1, :, :, :dim]


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Write only what the batch may see: every other byte of both caches is NaN, the null block included.

    Table rows are a permutation of batch rows; columns that hold no visible ordinal name a block of NaNs.
    """
    generator = torch.Generator().manual_seed(7)
    num_rows, foreign = len(case.lens), 1
    num_blocks = 2 + num_rows * case.width
    key_cache = strided_cache(case, num_blocks, case.key_dim, device)
    value_cache = strided_cache(case, num_blocks, case.value_dim, device)
    # A wider stride than the width: the columns beyond it are no part of the ring.
    table = torch.full((num_rows + 1, case.width + 2), foreign, dtype=torch.int32)
    rows = torch.randperm(num_rows, generator=generator)
    block_ids = iter((torch.randperm(num_blocks - 2, generator=generator) + 2).tolist())
    dense = []
    for idx, (query_len, seq_len) in enumerate(case.lens):
        first = case.params.first_visible(seq_len - query_len) if query_len else seq_len
        keys = torch.randn(seq_len, case.num_kv_heads, case.key_dim, generator=generator).to(case.dtype)
        values = torch.randn(seq_len, case.num_kv_heads, case.value_dim, generator=generator).to(case.dtype)
        dense.append((keys, values))
        for ordinal in range(first // case.block_size, -(-seq_len // case.block_size) if query_len else 0):
            table[rows[idx], ordinal % case.width] = next(block_ids)
        for position in range(first, seq_len):
            block_id = table[rows[idx], position // case.block_size % case.width]
            for cache, source in ((key_cache, keys), (value_cache, values)):
                nhd = cache if case.layout == "NHD" else cache.permute(0, 2, 1, 3)
                nhd[block_id, position % case.block_size] = source[position].to(device)
    starts = torch.tensor([0, *(query_len for query_len, _ in case.lens)]).cumsum(0).int()
    num_tokens, num_heads = int(starts[-1]) + 2, case.num_kv_heads * case.group  # 2 tokens of padding
    fused = torch.randn(num_tokens, num_heads, case.key_dim + 5, generator=generator).to(device, case.dtype)
    seq_lens = torch.tensor([seq_len for _, seq_len in case.lens], dtype=torch.int32)
    batch = PagedBatch(table.to(device), rows.int().to(device), starts.to(device), seq_lens.to(device))
    sinks = torch.randn(num_heads, generator=generator).to(device) if case.has_sinks else None
    return Inputs(fused[..., : case.key_dim], key_cache, value_cache, batch, sinks, dense)


def compare(case: Case, device: torch.device) -> None:
    """Run kernel beside reference on poisoned outputs; padding tokens must keep their poison in both."""
    given = make_inputs(case, device)
    expected = given.run(paged_attention_reference, case.params, case.value_dim)
    given.run(check_paged_attention, case.params, case.value_dim)
    got = given.run(paged_attention, case.params, case.value_dim)
    assert expected[:-2].isfinite().all()
    assert expected[-2:].isnan().all()
    atol, rtol = TOLERANCES[case.dtype]
    torch.testing.assert_close(got, expected, atol=atol, rtol=rtol, equal_nan=True)


WRAPPED = ((1, 40), (3, 37), (0, 0), (6, 30), (1, 33))
CASES = {
    "full": Case(),
    "full HND": Case(layout="HND"),
    "one kv head": Case(num_kv_heads=1, group=5),
    "no groups": Case(num_kv_heads=3, group=1),
    "group wider than a tile": Case(lens=((1, 5), (2, 3)), num_kv_heads=1, group=70),
    "window in a wrapped ring": Case(lens=WRAPPED, width=4, window=6),
    "window of one": Case(lens=WRAPPED, width=3, window=1),
    "window wider than the sequence": Case(window=100),
    "chunk in a wrapped ring": Case(lens=WRAPPED, width=4, chunk=7),
    "chunk equal to the block": Case(lens=WRAPPED, width=4, chunk=4, layout="HND"),
    "softcap": Case(softcap=0.5),
    "sinks": Case(has_sinks=True),
    "window, softcap, sinks": Case(lens=WRAPPED, width=4, window=5, softcap=2.0, has_sinks=True),
    "head size 24": Case(key_dim=24, value_dim=24),
    "head sizes 48/8": Case(key_dim=48, value_dim=8),
    "head sizes 8/20": Case(key_dim=8, value_dim=20),
    "block size 1": Case(lens=((1, 7), (4, 5)), block_size=1),
    "block size 3": Case(block_size=3),
    "one past a tile of keys": Case(lens=((1, 17), (2, 33), (17, 17)), block_size=16, group=2),
    "splits": Case(lens=((1, 70), (2, 33), (0, 0), (1, 1)), block_size=16, num_splits=3),
    "splits, window, sinks": Case(lens=WRAPPED, width=8, window=25, has_sinks=True, num_splits=2),
    "splits, softcap, odd head size": Case(num_splits=5, softcap=3.0, key_dim=12, value_dim=20),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float16": Case(dtype=torch.float16, lens=((1, 70), (2, 33)), block_size=16, window=40),
    "bfloat16 splits": Case(dtype=torch.bfloat16, num_splits=2, has_sinks=True),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_reference(name: str, device: torch.device, checked_int32: None) -> None:
    """Kernel and reference agree while every byte that the batch may not see is NaN."""
    compare(CASES[name], device)


def dense_oracle(case: Case, given: Inputs) -> torch.Tensor:
    """Compute attention with torch's own operator under an explicit mask, from keys that were never paged."""
    outputs = []
    for idx, (query_len, seq_len) in enumerate(case.lens):
        begin = int(given.batch.query_start_loc[idx])
        query = given.query[begin : begin + query_len].double().cpu()  # [q, Hq, Dk]
        keys, values = (tensor.double().repeat_interleave(case.group, dim=1) for tensor in given.dense[idx])
        position = torch.arange(seq_len - query_len, seq_len)[:, None]
        key_pos = torch.arange(seq_len)[None, :]
        visible = key_pos <= position
        if case.window is not None:
            visible &= position - key_pos < case.window
        if case.chunk is not None:
            visible &= position // case.chunk == key_pos // case.chunk
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=visible
        )
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("name", ["full", "full HND", "window in a wrapped ring", "chunk in a wrapped ring"])
def test_reference_equals_dense_attention(name: str, device: torch.device) -> None:
    """The reference gives what torch's attention gives on contiguous keys under the mask of the contract."""
    case = CASES[name]
    given = make_inputs(case, device)
    got = given.run(paged_attention_reference, case.params, case.value_dim)[:-2]
    torch.testing.assert_close(got.double().cpu(), dense_oracle(case, given), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("function", [paged_attention_reference, paged_attention])
def test_sink_takes_its_share_of_the_weight(function: object, device: torch.device) -> None:
    """A query that sees one key of score 0 beside a sink of logit 0 gives half of that value."""
    case = Case(lens=((1, 1),), has_sinks=True)
    given = make_inputs(case, device)
    given.query.zero_()
    assert given.sinks is not None
    given.sinks.zero_()
    got = given.run(function, case.params, case.value_dim)
    expected = given.dense[0][1][0].repeat_interleave(case.group, dim=0).to(device) / 2
    torch.testing.assert_close(got[0], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("sink", [None, 0.5, float("-inf")])
@pytest.mark.parametrize("function", [paged_attention_reference, paged_attention])
def test_query_that_sees_nothing_gives_zeros(
    function: object, sink: float | None, num_splits: int, device: torch.device
) -> None:
    """A row of length 0, like one whose table names only the null block, gives zeros in place of NaN."""
    case = Case(lens=((2, 2), (1, 6)), has_sinks=sink is not None, num_splits=num_splits)
    given = make_inputs(case, device)
    if given.sinks is not None and sink is not None:
        given.sinks.fill_(sink)
    given.batch.seq_lens[0] = 0
    given.batch.block_table[given.batch.rows[1].long()] = 0
    assert (given.run(function, case.params, case.value_dim)[:3] == 0).all()


def test_empty_batch_writes_nothing(device: torch.device) -> None:
    """No rows, or rows without a query, leave every output token as it was."""
    for lens in ((), ((0, 0),), ((0, 0), (0, 0), (0, 0))):
        for num_splits in (1, 2):
            case = Case(lens=lens, num_splits=num_splits)
            given = make_inputs(case, device)
            assert given.run(paged_attention, case.params, case.value_dim).isnan().all()


def test_no_tokens_launch_nothing(device: torch.device) -> None:
    """A step of zero tokens returns an empty output."""
    case = Case(lens=((0, 0),))
    given = make_inputs(case, device)
    empty = Inputs(given.query[:0], given.key_cache, given.value_cache, given.batch, None)
    assert empty.run(paged_attention, case.params, case.value_dim).shape == (0, 6, 16)


def test_padding_rows_may_surround_live_rows(device: torch.device) -> None:
    """Rows without a query before, between, after live rows change no output."""
    compare(Case(lens=((0, 0), (0, 0), (2, 9), (0, 0), (1, 4), (0, 0), (0, 0))), device)


def test_tile_writes_only_its_own_queries(device: torch.device) -> None:
    """A tile whose pairs do not divide by the group leaves the first query of the next tile alone."""
    case = Case(lens=((8, 8),), num_kv_heads=1, group=5)
    given = make_inputs(case, device)
    out = torch.full((*given.query.shape[:2], case.value_dim), float("nan"), device=device)
    args = (given.query, given.key_cache, given.value_cache, given.batch, case.params)
    (launch,) = prepare_paged_attention(*args, out=out)
    replace(launch, grid=(1, 1, 1)).run()
    block_q = int(launch.options["BLOCK_Q"])
    assert launch.options["BLOCK_M"] % case.group != 0
    assert 0 < block_q < 8
    assert out[:block_q].isfinite().all()
    assert out[block_q:].isnan().all()


def test_cache_beyond_32_bit_offsets_is_read(device: torch.device, checked_int32: None) -> None:
    """A block whose offset passes 2**31 elements is read where it is, not where 32 bits would wrap."""
    stride, block_id, dim = 2**28 + 16, 9, 16
    # Only the pages that are touched become resident: the arena is 4.5 GiB of address space.
    arena = torch.empty(block_id * stride + 64, dtype=torch.float16, device=device)
    cache = arena.as_strided((block_id + 1, 2, 1, dim), (stride, dim, dim, 1))
    cache[block_id] = 1.5
    ints = [torch.tensor(values, dtype=torch.int32, device=device) for values in ([[block_id]], [0], [0, 1], [2])]
    query = torch.ones(1, 1, dim, dtype=torch.float16, device=device)
    out = torch.full_like(query, float("nan"))
    paged_attention(query, cache, cache, PagedBatch(*ints), AttentionParams(0.25, 1, 1), out=out)
    assert (out == 1.5).all()


def test_large_scores_neither_overflow_nor_vanish(device: torch.device) -> None:
    """Scores of several thousand still give a softmax, since the maximum is subtracted first."""
    case = Case(softcap=None)
    given = make_inputs(case, device)
    given.query.mul_(3000.0)
    expected = given.run(paged_attention_reference, case.params, case.value_dim)
    got = given.run(paged_attention, case.params, case.value_dim)
    # Scores of 10**4 carry a float32 error of 10**-3, which is the relative error of a weight.
    torch.testing.assert_close(got, expected, atol=5e-3, rtol=5e-3, equal_nan=True)


def test_recommended_num_splits_fills_idle_processors() -> None:
    """Few tiles over long contexts are split, many tiles or short contexts are not."""
    assert recommended_num_splits(num_tiles=8, max_seq_tokens=65536, num_processors=132) == 16
    assert recommended_num_splits(num_tiles=8, max_seq_tokens=1024, num_processors=132) == 2
    assert recommended_num_splits(num_tiles=500, max_seq_tokens=65536, num_processors=132) == 1
    assert recommended_num_splits(num_tiles=0, max_seq_tokens=0, num_processors=132) == 1
    assert recommended_num_splits(num_tiles=1, max_seq_tokens=10**7, num_processors=132) == 64
