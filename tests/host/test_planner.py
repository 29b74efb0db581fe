"""Claims about the plan: bytes of slabs and blocks, widths, limits, what fits."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import SpecError
from hybridkv.limits import BatchLimits
from hybridkv.manager import CacheManager, Verdict
from hybridkv.plan import CachePlan, SlotMappingMode
from hybridkv.planner import plan_cache
from hybridkv.specs import ChunkedAttention, LayerCache, Lifecycle, ModelSpec, SlidingWindow
from tests.host_paths import using
from tests.models import (
    FULL,
    chunked_and_full,
    encoder_decoder,
    gemma_3_270m,
    gemma_like,
    kv_cache,
    limits,
    mixed_dtypes,
    model,
    plan_slabs,
    state_and_attention,
    state_cache,
)

MIB = 2**20
SERVING = BatchLimits(max_num_seqs=8, max_model_len=32_768, max_num_batched_tokens=2048)


def check_bytes(plan: CachePlan, memory_bytes: int) -> None:
    """Assert the laws of bytes that every plan obeys."""
    assert plan.arena_bytes == plan.num_slabs * plan.slab_bytes <= memory_bytes
    assert memory_bytes - plan.arena_bytes < plan.slab_bytes <= 64 * MIB
    assert plan.num_usable_slabs == plan.num_slabs - 1 >= len(plan.groups)
    for group in plan.groups:
        assert group.blocks_per_slab * group.block_stride_bytes == plan.slab_bytes
        assert group.block_stride_bytes % 128 == 0
        assert group.payload_bytes_per_block <= group.block_stride_bytes
        assert group.num_blocks == plan.num_slabs * group.blocks_per_slab
        assert group.padding_fraction == 1 - group.payload_bytes_per_block / group.block_stride_bytes


def test_gemma_3_270m_plan() -> None:
    """15 window layers of 16 tokens take 480 KiB a block, 3 full ones 96 KiB: a slab is 1 or 5 blocks, no padding."""
    plan = plan_cache(gemma_3_270m(), 64 * MIB, SERVING)
    sliding, full = plan.groups
    token_bytes = 2 * 256 * 4
    assert (sliding.payload_bytes_per_block, full.payload_bytes_per_block) == (
        16 * 15 * token_bytes,
        16 * 3 * token_bytes,
    )
    assert (sliding.payload_bytes_per_block, full.payload_bytes_per_block) == (491_520, 98_304)
    assert plan.slab_bytes == 491_520
    assert (sliding.blocks_per_slab, full.blocks_per_slab) == (1, 5)
    assert (plan.num_slabs, sliding.num_blocks, full.num_blocks) == (136, 136, 680)
    assert (sliding.padding_fraction, full.padding_fraction) == (0, 0)
    assert (sliding.table_width, full.table_width) == (161, 2048)
    assert (sliding.mode, full.mode) == (SlotMappingMode.SLIDING_WINDOW, SlotMappingMode.FULL)
    check_bytes(plan, 64 * MIB)


@pytest.mark.parametrize("block_size", [1, 16, 24, 32])
@pytest.mark.parametrize(
    "spec",
    [gemma_3_270m(), gemma_like(2, 3), chunked_and_full(), state_and_attention(), encoder_decoder(), mixed_dtypes()],
    ids=["gemma_3_270m", "gemma_like", "chunked", "state", "cross", "mixed_dtypes"],
)
def test_bytes_add_up(spec: ModelSpec, block_size: int) -> None:
    """For every block size blocks tile their slab, are aligned to 128 bytes, hold their payload and fit the memory."""
    memory_bytes = 128 * MIB + 12_345
    plan = plan_cache(spec, memory_bytes, SERVING, block_size=block_size)
    check_bytes(plan, memory_bytes)
    assert all(group.block_size == (1 if group.group.is_state else block_size) for group in plan.groups)


@settings(max_examples=40, deadline=None)
@given(
    dims=st.lists(st.integers(1, 8000), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 16, 24]),
    extra_bytes=st.integers(0, 2**29),
)
def test_bytes_add_up_for_any_shapes(dims: list[int], block_size: int, extra_bytes: int) -> None:
    """The laws of bytes hold however badly the groups' block sizes divide each other."""
    caches = [kv_cache(SlidingWindow(window=8 + idx), 1, dim, "bfloat16") for idx, dim in enumerate(dims)]
    memory_bytes = 2**28 + extra_bytes
    plan = plan_cache(model(*caches), memory_bytes, SERVING, block_size=block_size)
    check_bytes(plan, memory_bytes)


def test_block_sizes_by_group() -> None:
    """A mapping gives each group its own block size; its entry for a group of states is not needed."""
    plan = plan_cache(gemma_like(), MIB, SERVING, block_size={0: 16, 1: 32})
    assert [group.block_size for group in plan.groups] == [16, 32]
    plan = plan_cache(state_and_attention(), MIB, SERVING, block_size={1: 8})
    assert [group.block_size for group in plan.groups] == [1, 8]


def test_an_lcm_beyond_64_mib_falls_back_to_little_padding() -> None:
    """Blocks of 7919 and 7907 units of 128 bytes have an lcm of 7.5 GiB: a slab below 64 MiB wastes at most 0.5 %."""
    spec = model(kv_cache(SlidingWindow(window=8), 1, 7919 * 16), kv_cache(FULL, 1, 7907 * 16))
    plan = plan_cache(spec, 2**30, SERVING, block_size=1)
    check_bytes(plan, 2**30)
    assert [group.payload_bytes_per_block for group in plan.groups] == [7919 * 128, 7907 * 128]
    assert max(group.padding_fraction for group in plan.groups) <= 0.005


@pytest.mark.parametrize(
    ("payloads", "per_slab", "most_padding"),
    [
        ((24_577, 16_384), [2, 3], 0.001),
        ((7919, 7907), [1, 1], 0.002),
        ((8209, 7963), [29, 30], 0.005),
        ((16_292, 11_864), [8, 11], 0.005),
        ((1611, 1806, 1713), [108, 96, 101], 0.01),
        ((1612, 286, 1977), [143, 810, 117], 0.005),
        ((4001, 6007, 9001), [9, 6, 4], 0.01),
    ],
)
def test_a_slab_holds_several_blocks_where_that_pads_less(
    payloads: tuple[int, ...], per_slab: list[int], most_padding: float
) -> None:
    """The smallest number of blocks that wastes little is taken: 2 of 24577 units beside 3 of 16384, and so on."""
    caches = [kv_cache(SlidingWindow(window=8 + idx), 1, units * 16) for idx, units in enumerate(payloads)]
    plan = plan_cache(model(*caches), 2**30, SERVING, block_size=1)
    check_bytes(plan, 2**30)
    assert [group.blocks_per_slab for group in plan.groups] == per_slab
    assert max(group.padding_fraction for group in plan.groups) <= most_padding


def test_an_lcm_that_cannot_be_padded_well_still_gives_a_slab_within_64_mib() -> None:
    """Two blocks of 34 and 33 MiB leave no slab that wastes little: the one that wastes least is the larger block."""
    spec = model(kv_cache(SlidingWindow(window=8), 1, 34 * MIB // 8), kv_cache(FULL, 1, 33 * MIB // 8))
    plan = plan_cache(spec, 2**30, SERVING, block_size=1)
    check_bytes(plan, 2**30)
    assert plan.slab_bytes == 34 * MIB
    assert [group.blocks_per_slab for group in plan.groups] == [1, 1]


def test_modes_follow_lifecycles() -> None:
    """Windows and chunks map as rings, states not at all, everything else in full."""
    spec = model(kv_cache(ChunkedAttention(chunk=8)), kv_cache(SlidingWindow(window=8)), kv_cache(FULL), state_cache())
    assert [group.mode.value for group in plan_cache(spec, MIB, SERVING).groups] == [
        "sliding_window",
        "sliding_window",
        "full",
        "none",
    ]


def test_table_widths() -> None:
    """Widths: a ring of the window and the step, the whole of a full row, the source of a cross row, 1 for a state."""
    batch = BatchLimits(4, 1000, 8)
    widths = {
        "window": plan_cache(gemma_like(window=8), MIB, batch, block_size=4).groups[0].table_width,
        "full": plan_cache(gemma_like(window=8), MIB, batch, block_size=4).groups[1].table_width,
        "chunk": plan_cache(chunked_and_full(8), MIB, batch, block_size=4).groups[0].table_width,
        "cross": plan_cache(encoder_decoder(10), MIB, batch, block_size=4).groups[0].table_width,
        "state": plan_cache(state_and_attention(), MIB, batch, block_size=4).groups[0].table_width,
    }
    assert widths == {"window": 5, "full": 250, "chunk": 4, "cross": 3, "state": 1}


def test_unsettled_tokens_widen_a_ring() -> None:
    """Tokens in flight beside the step's own stay in the ring: 8 more make it 2 blocks of 4 wider."""
    wide = BatchLimits(4, 1000, 8, max_unsettled_tokens=8)
    assert plan_cache(gemma_like(window=8), MIB, wide, block_size=4).groups[0].table_width == 7


def test_a_ring_is_no_wider_than_the_model_is_long() -> None:
    """A window longer than the sequence takes the sequence's blocks, and no step is longer than the sequence."""
    assert plan_cache(gemma_like(window=500), MIB, BatchLimits(4, 10, 8), block_size=4).groups[0].table_width == 3
    assert BatchLimits(1, 10, 4096, 3).max_in_flight == 13
    assert BatchLimits(1, 4096, 10, 3).max_in_flight == 13


def test_too_little_memory_says_how_much_is_needed() -> None:
    """Less than a slab for each group and one of null blocks is refused with the bytes that would do."""
    plan = plan_slabs(gemma_like(), 2)
    assert plan.num_slabs == 3
    with pytest.raises(SpecError, match=r"memory: got 2303 bytes, expected at least 2304 \(2.25 KiB: 3 slabs of 768 B"):
        plan_cache(gemma_like(), 3 * plan.slab_bytes - 1, limits(), block_size=4)


@pytest.mark.parametrize("block_size", [0, -16, True, 16.0, "16", {0: 16}, {0: 16, 1: 0}])
def test_bad_block_sizes_are_refused(block_size: object) -> None:
    """A block size that is no positive integer, or is missing, raises a `SpecError` that names the group."""
    with pytest.raises(SpecError, match=r"block_size: got .* for group [01], expected at least 1"):
        plan_cache(gemma_like(), MIB, SERVING, block_size=block_size)  # type: ignore[arg-type]


def test_block_ids_beyond_int32_are_refused() -> None:
    """2^31 blocks do not fit int32 table entries; the message gives the memory that would."""
    spec = model(kv_cache(FULL, 1, 1, "int8"))
    most = 128 * (2**31 - 1)
    assert plan_cache(spec, most, SERVING, block_size=1).groups[0].num_blocks == 2**31 - 1
    with pytest.raises(SpecError, match=r"group 0 \(full_attention\) would have 2147483648 blocks"):
        plan_cache(spec, most + 128, SERVING, block_size=1)


def test_a_block_beyond_64_mib_is_refused() -> None:
    """A block larger than the slab limit raises, and one that just fits does not."""
    spec = model(kv_cache(FULL, 1, 2**20), kv_cache(SlidingWindow(window=8), 1, 3))
    assert plan_cache(spec, 2**30, SERVING, block_size=8).slab_bytes == 64 * MIB
    with pytest.raises(SpecError, match=r"blocks of 72.00 MiB, slabs hold at most 64.00 MiB; use a block_size of 8"):
        plan_cache(spec, 2**30, SERVING, block_size=9)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_model_len", "max_num_batched_tokens", "max_unsettled_tokens"])
@pytest.mark.parametrize("value", [-1, 2**31, True, 4.0, "4", None])
def test_bad_limits_are_refused_by_name(name: str, value: object) -> None:
    """A limit that is no integer, is negative or passes int32 raises a `SpecError` that names it."""
    values: dict[str, object] = {"max_num_seqs": 1, "max_model_len": 1, "max_num_batched_tokens": 1, name: value}
    with pytest.raises(SpecError, match=f"{name}: got {value!r}"):
        BatchLimits(**values)  # type: ignore[arg-type]


def test_least_limits() -> None:
    """One row, one token, one token a step is a valid batch; zero of them is not, but zero unsettled tokens are."""
    assert BatchLimits(1, 1, 1, 0).max_in_flight == 1
    for zeroed in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(SpecError):
            BatchLimits(*zeroed)


def fits(plan: CachePlan, num_tokens: int) -> bool:
    """Run one sequence of `num_tokens` tokens through the real pool: at every length, the largest step it may take."""
    with using("numpy"):  # the compiled helper's handle has no copy
        manager = CacheManager(plan)
    row = manager.admit(1).admitted_row
    for computed in range(num_tokens):
        largest = copy.deepcopy(manager)
        step = min(plan.limits.max_num_batched_tokens, num_tokens - computed)
        if largest.reserve([row], [step]).verdicts[0] != Verdict.OK:
            return False
        if manager.reserve([row], [1]).verdicts[0] != Verdict.OK:
            return False
        manager.commit([row], [1])
    manager.check()
    return True


@pytest.mark.parametrize(
    ("spec", "num_slabs", "longest"),
    [
        (model(kv_cache(FULL)), 5, 20),
        (gemma_like(3, 1, window=6), 7, 36),
        (gemma_like(1, 3, window=6), 6, 16),
        (gemma_like(2, 3, window=6), 6, 32),
        (chunked_and_full(7), 10, 24),
        (model(state_cache(), kv_cache(FULL)), 6, 20),
        (encoder_decoder(10), 7, 16),
        (gemma_like(3, 1, window=6), 40, 40),
    ],
)
def test_longest_sequence_is_what_the_pool_can_hold(spec: ModelSpec, num_slabs: int, longest: int) -> None:
    """A sequence of `longest_sequence` tokens runs alone under every schedule, one of a token more does not."""
    plan = plan_slabs(spec, num_slabs, limits(max_num_seqs=1, max_model_len=40, max_num_batched_tokens=5))
    assert plan.longest_sequence() == longest
    assert fits(plan, longest)
    if longest < 40:
        assert not fits(plan, longest + 1)
        assert plan.slabs_for(longest) <= num_slabs < plan.slabs_for(longest + 1)


def _caches() -> st.SearchStrategy[LayerCache]:
    lifecycle: st.SearchStrategy[Lifecycle] = st.one_of(
        st.just(FULL),
        st.builds(SlidingWindow, window=st.integers(1, 12)),
        st.builds(ChunkedAttention, chunk=st.integers(1, 12)),
    )
    return st.builds(kv_cache, lifecycle, st.integers(1, 3), st.just(8))


@settings(max_examples=25, deadline=None)
@given(caches=st.lists(_caches(), min_size=1, max_size=3), spare=st.integers(0, 8), block_size=st.integers(1, 5))
def test_longest_sequence_always_runs_alone(caches: list[LayerCache], spare: int, block_size: int) -> None:
    """Whatever the groups and the memory, `longest_sequence` tokens run alone under every schedule."""
    spec = model(*caches)
    num_groups = len({cache.lifecycle for cache in caches})
    batch = limits(max_num_seqs=1, max_model_len=30, max_num_batched_tokens=4)
    plan = plan_slabs(spec, num_groups + spare, batch, block_size)
    longest = plan.longest_sequence()
    assert longest == max((n for n in range(1, 31) if plan.slabs_for(n) <= plan.num_usable_slabs), default=0)
    assert longest == 0 or fits(plan, longest)
