"""Claims about grouping layers and placing their tensors in a block."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import SpecError
from hybridkv.grouping import group_layers
from hybridkv.specs import CacheTensor, FullAttention, LayerCache, LayerSpec, ModelSpec, SlidingWindow
from tests.models import FULL, gemma_3_270m, kv_cache, mixed_dtypes, model, state_and_attention
from tests.strategies import model_specs


def test_one_group_a_lifecycle() -> None:
    """Gemma 3 270M's 18 layers make two groups, in the order in which their lifecycles appear."""
    sliding, full = group_layers(gemma_3_270m())
    assert (sliding.group_id, full.group_id) == (0, 1)
    assert (sliding.lifecycle, full.lifecycle) == (SlidingWindow(window=512), FullAttention())
    assert [cache.layer for cache in full.caches] == [5, 11, 17]
    assert sliding.num_layers == 15


def test_windows_of_different_sizes_are_different_groups() -> None:
    """Only equal lifecycles share a block table: windows of 8 and 9 do not."""
    spec = model(
        kv_cache(SlidingWindow(window=8)), kv_cache(SlidingWindow(window=9)), kv_cache(SlidingWindow(window=8))
    )
    assert [[cache.layer for cache in group.caches] for group in group_layers(spec)] == [[0, 2], [1]]


def test_layers_of_unlike_shapes_share_a_group() -> None:
    """Grouping follows the lifecycle, not the tensors' shapes or dtypes."""
    (group,) = group_layers(model(kv_cache(FULL, 2, 8), kv_cache(FULL, 1, 64, "float16")))
    assert group.num_layers == 2


def test_a_layer_with_a_state_and_attention_is_in_two_groups() -> None:
    """Each cache of a layer goes to its own lifecycle's group; a layer without caches goes to none."""
    states, attention = group_layers(state_and_attention())
    assert [(cache.layer, cache.cache_idx) for cache in states.caches] == [(0, 0), (1, 0)]
    assert [(cache.layer, cache.cache_idx) for cache in attention.caches] == [(0, 1)]
    assert (states.is_state, attention.is_state) == (True, False)


def test_two_caches_of_one_layer_count_as_one_layer() -> None:
    """`num_layers` counts layers, not caches."""
    (group,) = group_layers(model([kv_cache(FULL), kv_cache(FULL)]))
    assert (group.num_layers, len(group.caches)) == (1, 2)


def test_a_shared_cache_owns_no_bytes() -> None:
    """A layer that reads another layer's cache adds nothing to the group."""
    layers = (
        LayerSpec(layer=0, caches=(kv_cache(FULL),)),
        LayerSpec(layer=1, caches=(LayerCache(lifecycle=FULL, shares_kv_with=0),)),
    )
    (group,) = group_layers(ModelSpec(name="shared", model_type="test", layers=layers))
    assert [cache.layer for cache in group.caches] == [0]


def test_tensors_follow_each_other_aligned_to_their_elements() -> None:
    """A block of 3 tokens: int8 keys end at byte 9, so float32 values start at 12; bfloat16 scales follow at 192."""
    full, window = group_layers(mixed_dtypes())
    assert [(t.layer, t.name, t.offset_bytes, t.num_bytes) for t in full.place_tensors(3)] == [
        (0, "k", 0, 9),
        (0, "v", 12, 180),
        (0, "scale", 192, 6),
        (2, "k", 198, 9),
        (2, "v", 208, 180),
        (2, "scale", 388, 6),
    ]
    assert [(t.name, t.offset_bytes, t.num_bytes) for t in window.place_tensors(2)] == [("k", 0, 24), ("v", 24, 24)]


def test_a_state_block_holds_one_entry_whatever_the_block_size() -> None:
    """Per-sequence tensors take their bytes once a block."""
    states, _ = group_layers(state_and_attention())
    assert [(t.layer, t.name, t.offset_bytes, t.num_entries) for t in states.place_tensors(1)] == [
        (0, "conv", 0, 1),
        (0, "ssm", 36, 1),
        (1, "conv", 164, 1),
        (1, "ssm", 200, 1),
    ]
    assert states.place_tensors(16) == states.place_tensors(1)


def test_a_compressed_tensor_keeps_an_entry_for_several_tokens() -> None:
    """With 4 tokens an entry a block of 8 holds 2 entries, and a block of 6 is refused with the layer and the fix."""
    compressed = CacheTensor(name="latent", shape=(16,), dtype="bfloat16", tokens_per_entry=4)
    (group,) = group_layers(model(LayerCache(lifecycle=FULL, tensors=(compressed,))))
    (placement,) = group.place_tensors(8)
    assert (placement.num_entries, placement.num_bytes) == (2, 64)
    with pytest.raises(SpecError, match=r"block_size: got 6, layer 0's 'latent' .* 4 tokens; use a multiple"):
        group.place_tensors(6)


@settings(max_examples=60)
@given(spec=model_specs(), block_size=st.sampled_from([128, 1024]))
def test_every_owned_cache_is_placed_once_and_apart(spec: ModelSpec, block_size: int) -> None:
    """Each cache that owns bytes is in the one group of its lifecycle, and no two tensors of a block overlap."""
    groups = group_layers(spec)
    assert len({group.lifecycle for group in groups}) == len(groups)
    assert [group.group_id for group in groups] == list(range(len(groups)))
    placed = sorted((cache.layer, cache.cache_idx) for group in groups for cache in group.caches)
    assert placed == [(layer, cache_idx) for layer, cache_idx, _ in spec.owned_caches()]
    for group in groups:
        assert all(cache.cache.lifecycle == group.lifecycle for cache in group.caches)
        divisors = [tensor.tokens_per_entry for cache in group.caches for tensor in cache.cache.tensors]
        if any(block_size % divisor for divisor in divisors):
            continue
        end = 0
        for placement in group.place_tensors(block_size):
            assert placement.offset_bytes >= end
            end = placement.offset_bytes + placement.num_bytes
