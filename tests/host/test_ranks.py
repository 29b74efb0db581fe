"""Claims about plans of several ranks: one scheduler's block ids mean a block on each of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import SpecError
from hybridkv.limits import BatchLimits, KernelConstraints
from hybridkv.options import CacheOptions, apply_options
from hybridkv.plan import CachePlan
from hybridkv.planner import plan_cache
from hybridkv.ranks import plan_ranks, split_layers
from hybridkv.specs import LayerCache, SlidingWindow
from tests.models import FULL, gemma_like, kv_cache, model, state_cache

LIMITS = BatchLimits(8, 4096, 64)
MIB = 2**20


def check_agreement(plans: tuple[CachePlan, ...], memories: list[int]) -> None:
    """Assert what the ranks must agree on, and that each rank's bytes hold its own caches."""
    first = plans[0]
    for plan, memory_bytes in zip(plans, memories, strict=True):
        assert plan.num_slabs == first.num_slabs
        assert plan.arena_bytes <= memory_bytes == plan.memory_bytes
        for group, own in zip(first.groups, plan.groups, strict=True):
            assert own.group.lifecycle == group.group.lifecycle
            agreed = ("block_size", "num_parts", "blocks_per_slab", "num_blocks", "table_width", "mode")
            assert [getattr(own, name) for name in agreed] == [getattr(group, name) for name in agreed]
            assert own.blocks_per_slab * own.block_stride_bytes == plan.slab_bytes
            assert own.block_stride_bytes % 128 == 0
            assert own.payload_bytes_per_block <= own.block_stride_bytes
            for tensor in own.tensors:
                assert tensor.offset_bytes + tensor.num_bytes <= own.payload_bytes_per_block
                assert tensor.part < own.num_parts
    assert any(plan.arena_bytes + plan.slab_bytes > plan.memory_bytes for plan in plans), "a slab more would fit"


def test_tensor_parallel_ranks_agree_on_the_smallest_memory() -> None:
    """Alike ranks with 3, 2 and 4 MiB all get the slabs of the one with 2 MiB, planned as it would be alone."""
    spec = gemma_like(3, 1, window=64)
    memories = [3 * MIB, 2 * MIB, 4 * MIB]
    plans = plan_ranks([spec] * 3, memories, LIMITS, block_size=16)
    check_agreement(plans, memories)
    alone = plan_cache(spec, 2 * MIB, LIMITS, block_size=16)
    assert plans[1] == alone
    assert all(plan.groups == alone.groups for plan in plans)


def test_stages_of_equal_mixes_pad_nothing() -> None:
    """Two stages of three window layers and one full layer each take slabs without padding."""
    window, full = kv_cache(SlidingWindow(window=64)), kv_cache(FULL)
    spec = model(*[window, window, window, full] * 2)
    stages = split_layers(spec, 2)
    plans = plan_ranks(stages, [MIB, MIB], LIMITS, block_size=16)
    check_agreement(plans, [MIB, MIB])
    assert [group.padding_fraction for plan in plans for group in plan.groups] == [0] * 4
    assert [group.group.num_layers for plan in plans for group in plan.groups] == [3, 1, 3, 1]
    assert {tensor.layer for group in plans[1].groups for tensor in group.tensors} == {4, 5, 6, 7}


def test_a_stage_without_a_lifecycle_has_an_empty_group() -> None:
    """Window layers first, full layers last: each stage keeps a group that holds nothing, and the ids still agree."""
    spec = model(*[kv_cache(SlidingWindow(window=64))] * 2, *[kv_cache(FULL)] * 2)
    plans = plan_ranks(split_layers(spec, 2), [MIB, MIB], LIMITS, block_size=16)
    check_agreement(plans, [MIB, MIB])
    assert [[group.group.num_layers for group in plan.groups] for plan in plans] == [[2, 0], [0, 2]]
    assert plans[0].groups[1].payload_bytes_per_block == 0


@settings(max_examples=60, deadline=None)
@given(
    layers=st.lists(st.sampled_from(["full", "window", "state"]), min_size=2, max_size=12),
    num_stages=st.integers(1, 4),
    memories=st.lists(st.integers(MIB, 4 * MIB), min_size=4, max_size=4),
)
def test_ranks_agree_whatever_their_layers(layers: list[str], num_stages: int, memories: list[int]) -> None:
    """Any stages of any layers agree on groups, parts, blocks a slab and slabs, or are refused in one line."""
    caches: dict[str, LayerCache] = {
        "full": kv_cache(FULL, 2),
        "window": kv_cache(SlidingWindow(window=64), 3),
        "state": state_cache(),
    }
    spec = model(*[caches[name] for name in layers])
    if num_stages > len(layers):
        with pytest.raises(SpecError, match="num_stages"):
            split_layers(spec, num_stages)
        return
    plans = plan_ranks(split_layers(spec, num_stages), memories[:num_stages], LIMITS, block_size=16)
    check_agreement(plans, memories[:num_stages])


def test_stages_keep_layer_numbers_and_lose_nothing() -> None:
    """Every cache of the model is in exactly one stage, under its own layer's number."""
    spec = gemma_like(5, 2)
    stages = split_layers(spec, 3)
    assert [[layer.layer for layer in stage.layers] for stage in stages] == [list(range(7))] * 3
    owned = [layer for stage in stages for layer, _, _ in stage.owned_caches()]
    assert owned == [layer for layer, _, _ in spec.owned_caches()]


def test_bad_stages_are_refused() -> None:
    """A cut through shared caches, an empty stage or no stage at all raises a `SpecError` that says where."""
    own, shares = kv_cache(FULL), LayerCache(lifecycle=FULL, shares_kv_with=0)
    with pytest.raises(SpecError, match="layer 1 of stage 1 shares the cache of layer 0"):
        split_layers(model(own, shares), 2)
    with pytest.raises(SpecError, match="stage 1 has no cache"):
        split_layers(model(own, []), 2)
    for num_stages in (0, 3):
        with pytest.raises(SpecError, match=f"num_stages: got {num_stages}, expected an integer from 1 to 2"):
            split_layers(model(own, own), num_stages)
    with pytest.raises(SpecError, match="memory_bytes: got 1 for 2 ranks"):
        plan_ranks([gemma_like()] * 2, [MIB], LIMITS)


def test_ranks_with_too_little_memory_are_refused() -> None:
    """The rank whose memory holds no sequence is refused, with the bytes it would take."""
    with pytest.raises(SpecError, match=r"memory of rank 1: got .* expected at least"):
        plan_ranks([gemma_like()] * 2, [MIB, 1000], LIMITS, block_size=16)


def test_kernel_constraints_hold_on_every_rank() -> None:
    """Block sizes that kernels do not take are refused, and alignment is kept on every rank."""
    kernels = KernelConstraints(block_size_multiple=16, alignment_bytes=512)
    with pytest.raises(SpecError, match="use 32"):
        plan_ranks([gemma_like()] * 2, [MIB, MIB], LIMITS, block_size=24, kernels=kernels)
    plans = plan_ranks([gemma_like()] * 2, [MIB, MIB], LIMITS, block_size=16, kernels=kernels)
    assert all(group.block_stride_bytes % 512 == 0 for plan in plans for group in plan.groups)


def test_ranks_of_unlike_mixes_meet_in_the_middle() -> None:
    """Five windows beside one full layer, then two beside two: neither rank pads more than it must."""
    window, full = kv_cache(SlidingWindow(window=64)), kv_cache(FULL)
    stages = split_layers(model(*[window] * 5, full, *[window, full] * 3), 2)
    plans = plan_ranks(stages, [MIB, MIB], LIMITS, block_size=16)
    check_agreement(plans, [MIB, MIB])
    worst = max(group.padding_fraction for plan in plans for group in plan.groups)
    # Shares of 5:1 and 3:3 have ratios 5 and 1; the middle, sqrt(5), leaves 1 - 1/sqrt(5) of a slab.
    assert worst <= 0.58
    assert worst >= 1 - 5**-0.5 - 1e-9


def test_draft_layers_are_in_the_last_stage() -> None:
    """Layers that options added are cut into stages like the model's own."""
    spec = apply_options(gemma_like(3, 1), CacheOptions(draft_layers=2))
    owned = [layer for stage in split_layers(spec, 3) for layer, _, _ in stage.owned_caches()]
    assert owned == list(range(6))
