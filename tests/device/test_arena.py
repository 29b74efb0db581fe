"""Claims about the bytes behind a plan: who sees which, in both layouts."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch

from hybridkv.arena import Arena
from hybridkv.block_pool import BlockPool
from hybridkv.grouping import TensorPlacement
from hybridkv.plan import CachePlan
from tests.models import chunked_and_full, encoder_decoder, gemma_like, mixed_dtypes, plan_slabs, state_and_attention

SPECS = {
    "gemma_like": gemma_like(3, 1),
    "three_and_two": gemma_like(2, 3, num_heads=2),
    "chunked": chunked_and_full(),
    "cross": encoder_decoder(),
    "mixed_dtypes": mixed_dtypes(),
    "state": state_and_attention(),
}
LAYOUTS = [("slab", "NHD"), ("slab", "HND"), ("contiguous", "NHD"), ("contiguous", "HND")]


def lend_everything(plan: CachePlan) -> list[list[int]]:
    """Lend every usable slab, groups in turn, and return each group's block ids."""
    pool, lent = BlockPool(plan), [[] for _ in plan.groups]
    for turn in range(plan.num_usable_slabs):
        wanted = [0] * len(plan.groups)
        group = turn % len(plan.groups)
        wanted[group] = plan.groups[group].blocks_per_slab
        lent[group] += (pool.take(np.array(wanted)) - pool.offsets[group]).tolist()
    assert pool.num_free_slabs == 0
    return lent


def stamp(idx: int, placement: TensorPlacement) -> torch.Tensor:
    """Bytes of the idx-th tensor of all blocks: unlike those of any other, and none is 0."""
    return (torch.arange(placement.num_bytes) * (2 * idx + 1)).remainder(251).add(1).to(torch.uint8).roll(idx)


def block_bytes(arena: Arena, placement: TensorPlacement, block_id: int) -> torch.Tensor:
    """The bytes of a tensor's entries in one block, a view."""
    return arena.view(placement.layer, placement.name, placement.cache_idx)[block_id].view(-1).view(torch.uint8)


@pytest.mark.parametrize(("layout", "kv_layout"), LAYOUTS)
@pytest.mark.parametrize("name", SPECS)
def test_no_two_tensors_of_lent_blocks_share_a_byte(name: str, layout: str, kv_layout: str) -> None:
    """Every tensor of every lent block keeps its own stamp after all are written, and the null blocks stay zero."""
    plan = plan_slabs(SPECS[name], 7, block_size=3)
    arena = Arena(plan, layout=layout, kv_layout=kv_layout)
    lent = lend_everything(plan)
    everything = [
        (group_id, placement, block_id)
        for group_id, group in enumerate(plan.groups)
        for placement in group.tensors
        # A block of a split state holds one part, so sequences take its blocks in turns.
        for block_id in lent[group_id][placement.part :: group.num_parts]
    ]
    assert len(everything) >= 14
    for idx, (_, placement, block_id) in enumerate(everything):
        block_bytes(arena, placement, block_id).copy_(stamp(idx, placement))
    for idx, (_, placement, block_id) in enumerate(everything):
        assert torch.equal(block_bytes(arena, placement, block_id), stamp(idx, placement))
    for group in plan.groups:
        for placement in group.tensors:
            for block_id in range(group.blocks_per_slab):
                assert not block_bytes(arena, placement, block_id).any()


@pytest.mark.parametrize("name", SPECS)
def test_a_slab_views_bytes_are_those_of_the_plan(name: str) -> None:
    """Block b of a group starts at byte b * stride, tensor t of it `offset_bytes` further, inside the arena."""
    plan = plan_slabs(SPECS[name], 7, block_size=3)
    arena = Arena(plan)
    base = arena.view(*first_tensor(plan)).untyped_storage().data_ptr()
    for group in plan.groups:
        for placement in group.tensors:
            view = arena.view(placement.layer, placement.name, placement.cache_idx)
            assert view.untyped_storage().data_ptr() == base
            assert view.untyped_storage().nbytes() == plan.arena_bytes
            for block_id in (0, 1, group.num_blocks - 1):
                start = view[block_id].data_ptr() - base
                assert start == block_id * group.block_stride_bytes + placement.offset_bytes
                assert start + placement.num_bytes <= plan.arena_bytes


def first_tensor(plan: CachePlan) -> tuple[int, str, int]:
    """Layer, name and cache index of some tensor."""
    placement = plan.groups[0].tensors[0]
    return placement.layer, placement.name, placement.cache_idx


@pytest.mark.parametrize("layout", ["slab", "contiguous"])
def test_shapes_follow_the_kv_layout(layout: str) -> None:
    """NHD puts tokens before heads, HND heads before tokens; tensors of one dimension have tokens first in both."""
    plan = plan_slabs(gemma_like(3, 1, num_heads=2), 5, block_size=3)
    nhd, hnd = (Arena(plan, layout=layout, kv_layout=kv_layout) for kv_layout in ("NHD", "HND"))
    assert nhd.view(0, "k").shape == (plan.groups[0].num_blocks, 3, 2, 8)
    assert hnd.view(0, "k").shape == (plan.groups[0].num_blocks, 2, 3, 8)
    assert nhd.view(3, "v").shape == (plan.groups[1].num_blocks, 3, 2, 8)
    plan = plan_slabs(mixed_dtypes(), 5, block_size=3)
    nhd, hnd = (Arena(plan, layout=layout, kv_layout=kv_layout) for kv_layout in ("NHD", "HND"))
    assert nhd.view(0, "scale").shape == hnd.view(0, "scale").shape == (plan.groups[0].num_blocks, 3, 1)
    assert hnd.view(0, "v").shape == (plan.groups[0].num_blocks, 3, 3, 5)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("layout", ["slab", "contiguous"])
def test_states_are_one_entry_a_block_in_their_own_dtypes(layout: str, kv_layout: str) -> None:
    """A state's tensors keep the spec's shapes and dtypes in every layout."""
    plan = plan_slabs(state_and_attention(), 6)
    arena = Arena(plan, layout=layout, kv_layout=kv_layout)
    num_blocks = plan.groups[0].num_blocks
    for layer in (0, 1):
        conv, ssm = arena.view(layer, "conv"), arena.view(layer, "ssm")
        assert (conv.shape, conv.dtype) == ((num_blocks, 6, 3), torch.bfloat16)
        assert (ssm.shape, ssm.dtype) == ((num_blocks, 2, 4, 4), torch.float32)
    assert arena.view(0, "k", 1).dtype == torch.float32


def test_mixed_dtypes_keep_their_types() -> None:
    """One group may hold int8 keys, float32 values and bfloat16 scales beside each other."""
    arena = Arena(plan_slabs(mixed_dtypes(), 5, block_size=3))
    assert [arena.view(2, name).dtype for name in ("k", "v", "scale")] == [torch.int8, torch.float32, torch.bfloat16]
    assert arena.view(1, "k").dtype == torch.float16


@pytest.mark.parametrize("name", ["gemma_like", "mixed_dtypes"])
def test_a_slot_is_the_same_token_in_all_layouts(name: str) -> None:
    """What is written at slot s of a layer reads back at block s // B, offset s % B, whatever the bytes' order."""
    plan = plan_slabs(SPECS[name], 5, block_size=3)
    arenas = [Arena(plan, layout=layout, kv_layout=kv_layout) for layout, kv_layout in LAYOUTS]
    for group in plan.groups:
        for placement in group.tensors:
            num_slots, first_slot = group.num_blocks * 3, group.blocks_per_slab * 3
            tokens = torch.arange(num_slots * prod(placement.shape)).remainder(101).view(num_slots, *placement.shape)
            read = []
            for arena in arenas:
                view = arena.view(placement.layer, placement.name)
                is_hnd = arena.kv_layout == "HND" and len(placement.shape) == 2
                by_token = view.transpose(1, 2) if is_hnd else view
                for slot in range(first_slot, num_slots):
                    by_token[slot // 3, slot % 3] = tokens[slot].to(view.dtype)
                read.append(by_token.clone())
            assert all(torch.equal(read[0], other) for other in read[1:])
            flat = read[0].reshape(num_slots, *placement.shape)
            assert torch.equal(flat[first_slot:], tokens[first_slot:].to(flat.dtype))
            assert not flat[:first_slot].any()


@pytest.mark.parametrize(("layout", "kv_layout"), LAYOUTS)
def test_memory_starts_as_zero(layout: str, kv_layout: str, device: torch.device) -> None:
    """Every tensor of every block reads zero at first and is on the arena's device."""
    plan = plan_slabs(state_and_attention(), 5)
    arena = Arena(plan, device=device, layout=layout, kv_layout=kv_layout)
    for group in plan.groups:
        for placement in group.tensors:
            view = arena.view(placement.layer, placement.name, placement.cache_idx)
            assert view.device.type == device.type
            assert not view.any()


def test_a_layer_that_owns_nothing_has_no_view() -> None:
    """A wrong layer, name or cache raises a `ValueError` that lists what the layer owns."""
    arena = Arena(plan_slabs(state_and_attention(), 5))
    for layer, name, cache_idx, owned in [
        (2, "k", 0, "[]"),
        (0, "q", 0, "['conv', 'k', 'ssm', 'v']"),
        (0, "k", 0, "k"),
    ]:
        with pytest.raises(ValueError, match=f"layer {layer}, cache {cache_idx}: got tensor '{name}'") as raised:
            arena.view(layer, name, cache_idx)
        assert owned in str(raised.value)


@pytest.mark.parametrize(("layout", "kv_layout"), [("ring", "NHD"), ("slab", "NDH"), ("slab", "nhd")])
def test_unknown_layouts_are_refused(layout: str, kv_layout: str) -> None:
    """Only slab and contiguous, NHD and HND exist."""
    with pytest.raises(ValueError, match="expected slab or contiguous and NHD or HND"):
        Arena(plan_slabs(gemma_like(), 5), layout=layout, kv_layout=kv_layout)
