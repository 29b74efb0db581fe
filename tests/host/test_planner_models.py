"""Claims about the plans of real models, and about the constraints and loads a plan is made for."""

import pytest

from hybridkv.capacity import max_concurrency
from hybridkv.errors import SpecError
from hybridkv.limits import BatchLimits, KernelConstraints, Load
from hybridkv.planner import describe_cache, plan_cache, planned_waste
from hybridkv.specs import CacheTensor, ChunkedAttention, LayerCache, ModelSpec, SlidingWindow, known_models
from tests.models import FULL, gemma_like, kv_cache, model, state_cache

GIB, MIB = 2**30, 2**20
SERVING = BatchLimits(256, 131_072, 2048)


@pytest.mark.parametrize("name", known_models())
def test_padding_of_real_models(name: str) -> None:
    """At 16 tokens a block no group pads more than 0.5 % of a slab of at most 64 MiB, attention-only models nothing."""
    plan = plan_cache(ModelSpec.load(name), 80 * GIB, SERVING, block_size=16)
    assert plan.slab_bytes <= 64 * MIB
    has_state = any(group.group.is_state for group in plan.groups)
    for group in plan.groups:
        assert group.block_stride_bytes * group.blocks_per_slab == plan.slab_bytes
        assert group.block_stride_bytes % 128 == 0
        assert group.padding_fraction <= (0.005 if has_state else 0)
        bytes_of_parts = [0] * group.num_parts
        for tensor in group.tensors:
            bytes_of_parts[tensor.part] += tensor.num_bytes
        assert max(bytes_of_parts) <= group.payload_bytes_per_block <= group.block_stride_bytes
        layers_of_parts = [{t.layer for t in group.tensors if t.part == part} for part in range(group.num_parts)]
        assert sum(map(len, layers_of_parts)) == group.group.num_layers
        assert len(set(map(len, layers_of_parts))) == 1, "parts are not equal"


@pytest.mark.parametrize("name", known_models())
def test_the_planner_picks_a_block_size_that_wastes_no_more_than_16_tokens(name: str) -> None:
    """Left to choose, it never plans more waste than with 16 tokens a block, at the lengths it is asked about."""
    spec, load = ModelSpec.load(name), Load((8192, 32_768))
    chosen = plan_cache(spec, 40 * GIB, SERVING, load=load)
    fixed = plan_cache(spec, 40 * GIB, SERVING, block_size=16, load=load)
    assert planned_waste(chosen, load) <= planned_waste(fixed, load)
    sizes = {group.block_size for group in chosen.groups if not group.group.is_state}
    assert len(sizes) <= 1, "prefixes of all groups should end together"


def test_a_state_is_split_where_that_makes_the_slab_small() -> None:
    """Bamba's 29 states of 4.05 MiB become 29 blocks of a layer each, three a slab beside 65 blocks of tokens."""
    plan = plan_cache(ModelSpec.load("Bamba-9B-v1"), 80 * GIB, SERVING, block_size=16)
    state, full = plan.groups
    assert (state.num_parts, state.blocks_per_slab, full.blocks_per_slab) == (29, 3, 65)
    assert state.table_width == 29
    assert sorted(tensor.part for tensor in state.tensors if tensor.name == "ssm") == list(range(29))
    assert state.max_blocks(1, 1) == 29


def test_the_load_decides_the_block_size() -> None:
    """Where tables cost more than tails, long contexts get larger blocks than short ones."""
    spec = model(kv_cache(FULL, 1, 8, "int8"))
    limits = BatchLimits(256, 1_000_000, 2048)
    short = plan_cache(spec, GIB, BatchLimits(256, 1024, 1024), load=Load((100,)))
    long = plan_cache(spec, GIB, limits, load=Load((1_000_000,), max_num_seqs=2))
    assert short.groups[0].block_size == 16
    assert long.groups[0].block_size > 16


def test_kernel_constraints_shape_the_plan() -> None:
    """Multiples, powers of two and alignment hold for what the planner chooses as for what it is given."""
    spec = model(kv_cache(SlidingWindow(window=64), 3), kv_cache(FULL, 1), state_cache())
    kernels = KernelConstraints(block_size_multiple=24, alignment_bytes=512)
    plan = plan_cache(spec, 64 * MIB, SERVING, kernels=kernels)
    assert all(group.block_size % 24 == 0 for group in plan.groups if not group.group.is_state)
    assert all(group.block_stride_bytes % 512 == 0 for group in plan.groups)
    power = KernelConstraints(block_size_multiple=32, block_size_power_of_two=True)
    assert plan_cache(spec, 64 * MIB, SERVING, kernels=power).groups[0].block_size in (32, 64, 128, 256, 512)
    with pytest.raises(SpecError, match="got 48 for group 0, kernels take a multiple of 32 that is a power of two"):
        plan_cache(spec, 64 * MIB, SERVING, block_size=48, kernels=power)


def test_compressed_entries_fill_whole_blocks() -> None:
    """A tensor with an entry for 12 tokens makes the planner take multiples of 12; 16 is refused with the reason."""
    compressed = CacheTensor(name="k", shape=(1, 8), dtype="float32", tokens_per_entry=12)
    spec = model(LayerCache(lifecycle=FULL, tensors=(compressed,)))
    assert plan_cache(spec, MIB, SERVING).groups[0].block_size % 12 == 0
    with pytest.raises(SpecError, match="keeps an entry per 12 tokens; use a multiple of it"):
        plan_cache(spec, MIB, SERVING, block_size=16)


def test_32_bit_kernels_limit_the_arena() -> None:
    """A view of more elements than the kernels can index is refused, with the memory that would do."""
    kernels = KernelConstraints(max_tensor_elements=2**31)
    spec = gemma_like()
    assert plan_cache(spec, 8 * GIB - 10 * MIB, SERVING, block_size=16, kernels=kernels).groups
    with pytest.raises(SpecError, match=r"layer 0's 'k' would span .* elements, the kernels address .*8.00 GiB"):
        plan_cache(spec, 9 * GIB, SERVING, block_size=16, kernels=kernels)


def test_a_state_larger_than_a_slab_is_refused_by_its_layer() -> None:
    """One layer's state cannot be cut further: the error says so instead of asking for a smaller block."""
    huge = CacheTensor(name="ssm", kind="per_sequence", shape=(65 * MIB // 4,), dtype="float32")
    spec = model(LayerCache(lifecycle=state_cache().lifecycle, tensors=(huge,)))
    with pytest.raises(SpecError, match=r"blocks of 65.00 MiB, slabs hold at most 64.00 MiB; one layer's state"):
        plan_cache(spec, GIB, SERVING)
    assert plan_cache(spec, GIB, SERVING, kernels=KernelConstraints(max_slab_bytes=128 * MIB)).groups


def test_describing_never_refuses_for_memory() -> None:
    """A plan is described for any memory, 0 bytes included; planning refuses what holds no sequence."""
    spec = ModelSpec.load("Bamba-9B-v1")
    for memory_bytes in (0, 1, 10 * MIB, 100 * MIB):
        plan = describe_cache(spec, memory_bytes, SERVING)
        assert max_concurrency(plan, 8192) == 0
        with pytest.raises(SpecError, match=r"memory: got .*, expected at least .* slabs of"):
            plan_cache(spec, memory_bytes, SERVING)
    least = plan.min_num_slabs * plan.slab_bytes
    assert max_concurrency(plan_cache(spec, least, SERVING), 1) == 1
    for bad in (-1, True, 1.5):
        with pytest.raises(SpecError, match="memory: got"):
            describe_cache(spec, bad, SERVING)  # type: ignore[arg-type]


def test_advice_in_refusals_works_when_followed() -> None:
    """The memory or the block size that an error names is accepted, and one byte less is not."""
    spec = gemma_like()
    with pytest.raises(SpecError) as caught:
        plan_cache(spec, 100, SERVING, block_size=16)
    least = int(str(caught.value).split("expected at least ")[1].split(" ")[0])
    plan_cache(spec, least, SERVING, block_size=16)
    with pytest.raises(SpecError):
        plan_cache(spec, least - 1, SERVING, block_size=16)
    wide = model(kv_cache(FULL, 1, 2**20), kv_cache(SlidingWindow(window=8), 1, 3))
    kernels = KernelConstraints(block_size_power_of_two=True)
    with pytest.raises(SpecError, match="use a block_size of 8"):
        plan_cache(wide, GIB, SERVING, block_size=16, kernels=kernels)
    plan_cache(wide, GIB, SERVING, block_size=8, kernels=kernels)
    with pytest.raises(SpecError, match="use a larger max_slab_bytes"):
        plan_cache(wide, GIB, SERVING, block_size=1, kernels=KernelConstraints(max_slab_bytes=MIB))
    limit = KernelConstraints(max_tensor_elements=2**20)
    with pytest.raises(SpecError) as caught:
        plan_cache(spec, GIB, SERVING, block_size=16, kernels=limit)
    most = int(str(caught.value).split("use at most ")[1].split(" ")[0])
    plan_cache(spec, most, SERVING, block_size=16, kernels=limit)


def test_the_limit_of_sequences_counts_in_planned_waste() -> None:
    """With two sequences in a large memory the null blocks and the tables weigh more than with as many as fit."""
    plan = plan_cache(ModelSpec.load("gemma-3-27b"), 80 * GIB, SERVING, block_size=16)
    assert planned_waste(plan, Load((8192,), max_num_seqs=2)) > planned_waste(plan, Load((8192,)))


def test_a_full_chunk_of_whole_blocks_has_no_ragged_ends() -> None:
    """Chunks of 64 tokens take 4 blocks of 16; windows of 64 tokens take 4 and on average most of a fifth."""
    plan = plan_cache(
        model(kv_cache(ChunkedAttention(chunk=64)), kv_cache(SlidingWindow(window=64))), MIB, SERVING, block_size=16
    )
    chunked, window = plan.groups
    assert chunked.expected_blocks(1000) == 4
    assert window.expected_blocks(1000) == (64 + 15) / 16
    assert chunked.expected_blocks(40) == window.expected_blocks(40) == (40 + 7.5) / 16
