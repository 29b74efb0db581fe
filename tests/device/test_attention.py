"""Claims about attention backends: what they compute, what they never read, what they leave alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from hybridkv.arena import Arena
from hybridkv.attention import AttentionBackend, GroupBatch, LayerParams, TorchBackend, TritonBackend
from hybridkv.batch import BatchGeometry
from hybridkv.manager import CacheManager
from hybridkv.multi_group import MultiGroupBlockTable
from hybridkv.specs import CacheTensor, ChunkedAttention, Dtype, LayerCache, Lifecycle, SlidingWindow
from hybridkv_kernels.paged_attention import (
    AttentionParams,
    PagedBatch,
    check_paged_attention,
    paged_attention_reference,
)
from tests.models import FULL, kv_cache, limits, model, plan_slabs

# Absolute error against attention in float64; outputs are means of values of size 1.
TOLERANCES = {
    torch.float32: 3e-6,  # float32 sums of a few dozen terms, exp within 2 ulp
    torch.bfloat16: 3e-2,  # weights, then the output, rounded (interpreted: truncated) to 8 bits
}
LAYER = 1
MIXED = ((0, 1), (0, 7), (5, 1), (30, 1), (13, 8), (17, 1), (36, 1), (12, 2))
"""(computed, scheduled) tokens a row: first tokens, decodes of unlike lengths, first and later prefill chunks."""


@dataclass(frozen=True)
class Case:
    """One step of one layer, in the middle of a model with another layer before it and another group beside it."""

    lifecycle: Lifecycle = FULL
    work: tuple[tuple[int, int], ...] = MIXED
    num_kv_heads: int = 2
    group: int = 2
    key_dim: int = 8
    value_dim: int = 6
    block_size: int = 4
    softcap: float | None = None
    has_sinks: bool = False
    arena_layout: str = "slab"
    dtype: Dtype = "float32"
    cache_dtype: Dtype = "float32"
    num_padding: int = 3

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group


CASES = {
    "full": Case(),
    "window": Case(SlidingWindow(window=6)),
    "window_of_one": Case(SlidingWindow(window=1)),
    "window_longer_than_all": Case(SlidingWindow(window=100)),
    "chunk": Case(ChunkedAttention(chunk=6)),
    "chunk_of_blocks": Case(ChunkedAttention(chunk=8)),
    "multi_head": Case(group=1, num_kv_heads=3),
    "multi_query": Case(group=5, num_kv_heads=1),
    "softcap": Case(SlidingWindow(window=6), softcap=0.5),
    "sinks": Case(has_sinks=True),
    "softcap_and_sinks_and_chunk": Case(ChunkedAttention(chunk=6), softcap=2.0, has_sinks=True),
    "odd_blocks": Case(SlidingWindow(window=7), block_size=3),
    "blocks_of_one": Case(SlidingWindow(window=5), block_size=1),
    "decode_only": Case(work=((9, 1), (0, 1), (15, 1), (16, 1), (39, 1))),
    "prefill_only": Case(SlidingWindow(window=6), work=((0, 8),), num_padding=0),
    "bfloat16": Case(SlidingWindow(window=6), dtype="bfloat16", cache_dtype="bfloat16"),
    "bfloat16_cache": Case(has_sinks=True, cache_dtype="bfloat16"),
}


def first_visible(lifecycle: Lifecycle, position: int) -> int:
    """The first key that a query sees, by the definition of its mask."""
    if isinstance(lifecycle, SlidingWindow):
        return max(0, position - lifecycle.window + 1)
    if isinstance(lifecycle, ChunkedAttention):
        return position - position % lifecycle.chunk
    return 0


class Step:
    """The cache before a step, its batch and what attention over it must give.

    Every byte of the layer's caches is NaN but the null blocks' and those of the visible tokens.
    """

    def __init__(self, case: Case, kv_layout: str, device: torch.device) -> None:
        self.case, self.kv_layout, self.device = case, kv_layout, device
        self._generator = torch.Generator().manual_seed(5)
        self.dtype, cache_dtype = getattr(torch, case.dtype), getattr(torch, case.cache_dtype)
        cache = LayerCache(
            lifecycle=case.lifecycle,
            tensors=tuple(
                CacheTensor(name=name, shape=(case.num_kv_heads, dim), dtype=case.cache_dtype)
                for name, dim in (("k", case.key_dim), ("v", case.value_dim))
            ),
        )
        other = kv_cache(SlidingWindow(window=3), 1, 5)
        plan = plan_slabs(
            model(cache, cache, other),
            400,
            limits(max_num_seqs=len(case.work) + 1 + case.num_padding),
            block_size=case.block_size,
        )
        manager = CacheManager(plan)
        self.tables = MultiGroupBlockTable(manager.tables, 64, device)
        self.arena = Arena(plan, device=device, layout=case.arena_layout, kv_layout=kv_layout)
        self._reserve(manager)
        num_tokens = sum(count for _, count in case.work)
        tables_step = self.tables.step(
            [len(case.work) - idx for idx in range(len(case.work))],
            [count for _, count in case.work],
            [count for count, _ in case.work],
            num_reqs_padded=len(case.work) + case.num_padding,
            num_tokens_padded=num_tokens + case.num_padding,
        )
        self.geometry = tables_step.geometry
        self.batch = GroupBatch(
            lifecycle=case.lifecycle,
            block_size=case.block_size,
            geometry=self.geometry,
            block_table=self.tables.block_table(0),
            block_table_cpu=manager.tables[0].entries[:, : manager.tables[0].width],
            slot_mapping=tables_step.slot_mapping[0],
        )
        self.dense = [
            tuple(self.random(a + b, case.num_kv_heads, dim).to(cache_dtype) for dim in (case.key_dim, case.value_dim))
            for a, b in case.work
        ]
        self.blocks_per_slab = plan.groups[0].blocks_per_slab
        self._poison(manager)
        padding = torch.full((case.num_padding, case.num_heads, case.key_dim), float("nan"))
        queries = self.random(num_tokens, case.num_heads, case.key_dim)
        self.query = torch.cat([queries, padding]).to(self.dtype).to(device)
        self.key, self.value = (self._new_tokens(i) for i in (0, 1))
        sinks = self.random(case.num_heads).to(device) if case.has_sinks else None
        self.params = LayerParams(scale=case.key_dim**-0.5, softcap=case.softcap, sinks=sinks)

    def random(self, *shape: int) -> torch.Tensor:
        """Numbers of size 1 on the CPU."""
        return torch.randn(*shape, generator=self._generator)

    def _reserve(self, manager: CacheManager) -> None:
        """Bring every row to its computed length, then reserve its step; rows are unlike batch positions."""
        rows = [manager.admit(1).admitted_row for _ in range(len(self.case.work) + 1)][:0:-1]
        for row, (computed, scheduled) in zip(rows, self.case.work, strict=True):
            while manager.num_computed_tokens[row] < computed:
                count = min(5, computed - int(manager.num_computed_tokens[row]))
                manager.reserve([row], [count])
                manager.commit([row], [count])
            manager.reserve([row], [scheduled])
        manager.check()

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's key and value views."""
        return self.arena.view(LAYER, "k"), self.arena.view(LAYER, "v")

    def by_token(self, cache: torch.Tensor) -> torch.Tensor:
        """A cache as `[num_blocks, block_size, heads, dim]`."""
        return cache if self.kv_layout == "NHD" else cache.transpose(1, 2)

    def _poison(self, manager: CacheManager) -> None:
        table, size = manager.tables[0], self.case.block_size
        for i, cache in enumerate(self.caches):
            cache[self.blocks_per_slab :] = float("nan")
            for idx, (computed, _) in enumerate(self.case.work):
                row = int(self.geometry.rows_cpu[idx])
                held = torch.from_numpy(table.row_block_ids(row).astype(np.int64)).to(self.device)
                seen = torch.arange(first_visible(self.case.lifecycle, computed), computed, device=self.device)
                block_ids = held[seen // size - int(table.first_block_per_row[row])]
                self.by_token(cache)[block_ids, seen % size] = self.dense[idx][i].to(self.device)[seen]
        self.poisoned = [cache.clone() for cache in self.caches]

    def _new_tokens(self, i: int) -> torch.Tensor:
        parts = [self.dense[idx][i][computed:] for idx, (computed, _) in enumerate(self.case.work)]
        padding = torch.full((self.case.num_padding, *parts[0].shape[1:]), float("nan"))
        return torch.cat([*parts, padding.to(parts[0].dtype)]).to(self.dtype).to(self.device)

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """Attend with a backend, which writes the new tokens first."""
        assert backend.kv_layout == self.kv_layout
        return backend.prepare(self.batch).attend(self.query, self.key, self.value, self.caches, self.params)

    def expected(self) -> torch.Tensor:
        """Attention in float64 over each row's dense keys and values; zeros for padding."""
        case = self.case
        out = torch.zeros(self.query.shape[0], case.num_heads, case.value_dim, dtype=torch.float64)
        query = self.query.cpu().double() * self.params.scale
        sinks = None if self.params.sinks is None else self.params.sinks.cpu().double()[:, None]
        token = 0
        for idx, (computed, scheduled) in enumerate(case.work):
            keys, values = (dense.double().repeat_interleave(case.group, dim=1) for dense in self.dense[idx])
            for position in range(computed, computed + scheduled):
                seen = slice(first_visible(case.lifecycle, position), position + 1)
                scores = torch.einsum("hd,nhd->hn", query[token], keys[seen])
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                logits = scores if sinks is None else torch.cat([scores, sinks], dim=1)
                weights = torch.softmax(logits, dim=1)[:, : seen.stop - seen.start]
                out[token] = torch.einsum("hn,nhd->hd", weights, values[seen])
                token += 1
        return out

    def paged_reference(self) -> torch.Tensor:
        """The kernels' loop reference over what the caches hold now; zeros for padding."""
        width = self.batch.block_table.shape[1]
        longest = max(count for _, count in self.case.work)
        params = AttentionParams(
            scale=self.params.scale,
            width=width,
            max_query_len=longest,
            window=self.batch.window,
            chunk=self.batch.chunk,
            softcap=self.params.softcap,
            layout=self.kv_layout,
        )
        num_reqs = self.geometry.num_reqs
        rows, starts, lens = self.geometry.rows, self.geometry.query_start_loc, self.geometry.seq_lens
        live = PagedBatch(self.batch.block_table, rows[:num_reqs], starts[: num_reqs + 1], lens[:num_reqs])
        out = torch.zeros(*self.query.shape[:2], self.case.value_dim, dtype=torch.float64, device=self.device)
        args = self.query, *self.caches, live, params
        check_paged_attention(*args, out=out, sinks=self.params.sinks)
        paged_attention_reference(*args, out=out, sinks=self.params.sinks)
        return out.cpu()


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare every element, NaN never allowed."""
    assert got.shape == expected.shape
    assert not got.isnan().any()
    error = (got.cpu().double() - expected).abs().max().item()
    assert error <= TOLERANCES[got.dtype]


def assert_equal_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare every element, where NaN equals NaN."""
    assert torch.equal(got.nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0))


def assert_only_new_tokens_written(step: Step) -> None:
    """Each new token's keys and values are in its slot, every other slot is as before, the null blocks zero."""
    slots = step.batch.slot_mapping[: step.geometry.num_tokens]
    assert (slots >= step.case.block_size).all()
    for new, cache, before in zip((step.key, step.value), step.caches, step.poisoned, strict=True):
        expected = step.by_token(before.clone())
        expected[slots // step.case.block_size, slots % step.case.block_size] = new[: len(slots)].to(cache.dtype)
        assert_equal_bits(step.by_token(cache), expected)
        assert not cache[: step.blocks_per_slab].any()


@pytest.mark.parametrize("name", CASES)
def test_torch_attends_to_what_is_visible(name: str, device: torch.device) -> None:
    """Decodes and prefill chunks in one batch equal attention over the dense tokens, whatever else the blocks hold."""
    step = Step(CASES[name], "NHD", device)
    out = step.run(TorchBackend())
    assert out.dtype == step.dtype
    assert_close(out, step.expected())
    assert_close(out, step.paged_reference())
    assert_only_new_tokens_written(step)


@pytest.mark.parametrize("name", CASES)
def test_slab_and_contiguous_memory_give_the_same_bits(name: str, device: torch.device) -> None:
    """Where the bytes lie changes no bit of the output."""
    slab, contiguous = (
        Step(replace(CASES[name], arena_layout=layout), "NHD", device).run(TorchBackend())
        for layout in ("slab", "contiguous")
    )
    assert torch.equal(slab, contiguous)


FEW = ((0, 5), (30, 1), (13, 6), (17, 1))
TRITON_CASES = ["full", "window", "chunk", "softcap_and_sinks_and_chunk", "odd_blocks", "multi_query", "bfloat16"]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", TRITON_CASES)
def test_triton_equals_torch(name: str, kv_layout: str, device: torch.device) -> None:
    """The kernel's output, over either layout, is that of the torch backend and of dense attention."""
    case = replace(CASES[name], work=FEW)
    step = Step(case, kv_layout, device)
    out = step.run(TritonBackend(kv_layout))
    assert_close(out, step.expected())
    assert_close(out, Step(case, "NHD", device).run(TorchBackend()).cpu().double())
    assert_only_new_tokens_written(step)


@pytest.mark.parametrize("backend", [TorchBackend(), TritonBackend("NHD")], ids=["torch", "triton"])
def test_padding_tokens_give_zeros(backend: AttentionBackend, device: torch.device) -> None:
    """Padding queries of NaN give zeros and change no other token's output."""
    padded, exact = (Step(replace(CASES["window"], work=FEW, num_padding=count), "NHD", device) for count in (3, 0))
    out = padded.run(backend)
    assert not out[-3:].any()
    assert torch.equal(out[:-3], exact.run(backend))


@pytest.mark.parametrize("backend", [TorchBackend(), TritonBackend("NHD")], ids=["torch", "triton"])
def test_a_layer_without_keys_reads_another_layers_cache(backend: AttentionBackend, device: torch.device) -> None:
    """With no new keys nothing is written, and the cache that the owner wrote is attended to."""
    step = Step(replace(CASES["window"], work=FEW), "NHD", device)
    prepared = backend.prepare(step.batch)
    first = prepared.attend(step.query, step.key, step.value, step.caches, step.params)
    before = [cache.clone() for cache in step.caches]
    second = prepared.attend(step.query, None, None, step.caches, step.params)
    assert torch.equal(first, second)
    for old, cache in zip(before, step.caches, strict=True):
        assert_equal_bits(cache, old)


@pytest.mark.parametrize("backend", [TorchBackend(), TritonBackend("NHD")], ids=["torch", "triton"])
def test_an_empty_batch_gives_zeros(backend: AttentionBackend, device: torch.device) -> None:
    """A step of padding alone writes nothing and returns zeros."""
    step = Step(CASES["full"], "NHD", device)
    geometry = BatchGeometry.build([], [], [], device=device, num_reqs_padded=2, num_tokens_padded=3)
    slots = torch.full((3,), -1, dtype=torch.int64, device=device)
    prepared = backend.prepare(replace(step.batch, geometry=geometry, slot_mapping=slots))
    out = prepared.attend(step.query[-3:], step.key[-3:], step.value[-3:], step.caches, step.params)
    assert out.shape == (3, 4, 6)
    assert not out.any()
    for before, cache in zip(step.poisoned, step.caches, strict=True):
        assert_equal_bits(cache, before)


def test_rows_are_tiled_once_with_little_padding(device: torch.device) -> None:
    """Each row is in one tile, and rows that decode are padded to less than twice their own blocks."""
    step = Step(Case(work=((1, 1), (2, 1), (0, 3), (8, 1), (12, 1), (30, 1), (38, 1), (4, 6))), "NHD", device)
    tiles = TorchBackend().prepare(step.batch).tiles
    assert [(tile.num_rows, len(tile.block_ids)) for tile in tiles] == [(2, 2), (2, 8), (1, 8), (1, 10), (1, 1), (1, 3)]


def test_the_ring_wraps_in_these_cases(device: torch.device) -> None:
    """The window cases hold ordinals beyond the table's width, so that the modulus is tested."""
    step = Step(CASES["window"], "NHD", device)
    assert step.batch.block_table.shape[1] == 4
    assert int(step.tables.tables[0].num_blocks_per_row.max()) == 10


@pytest.mark.parametrize(
    ("lifecycle", "window", "chunk"),
    [(FULL, None, None), (SlidingWindow(window=6), 6, None), (ChunkedAttention(chunk=6), None, 6)],
)
def test_a_batch_knows_its_masks(
    lifecycle: Lifecycle, window: int | None, chunk: int | None, device: torch.device
) -> None:
    """`window`, `chunk` and `first_visible` follow the group's lifecycle."""
    batch = Step(Case(lifecycle), "NHD", device).batch
    assert (batch.window, batch.chunk) == (window, chunk)
    positions = np.arange(30)
    assert batch.first_visible(positions).tolist() == [first_visible(lifecycle, position) for position in range(30)]
