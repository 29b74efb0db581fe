"""Claims about the search for the smallest slab that all groups cut with little padding."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.limits import KernelConstraints
from hybridkv.slab_search import BlockShape, SlabChoice, choose_slab, slab_choices

UNIT = 128
SMALL = KernelConstraints(max_slab_bytes=200 * UNIT)


def padding(payload: int, stride: int) -> float:
    """Part of a block that goes unused."""
    return 1 - payload / stride


def suits(shapes: list[BlockShape], slab: int, bound: float) -> bool:
    """Try every number of blocks of every shape."""
    return any(
        slab % (count * UNIT) == 0
        and shape.payload_bytes <= slab // count
        and padding(shape.payload_bytes, slab // count) <= bound
        for shape in shapes
        for count in range(1, slab // UNIT + 1)
    )


def group_shapes() -> st.SearchStrategy[list[BlockShape]]:
    """One block, or a state of 12 layers cut into 1, 2, 3, 4, 6 or 12 parts."""
    block = st.integers(1, 60 * UNIT).map(lambda payload: [BlockShape(1, payload)])
    layer = st.integers(1, 16 * UNIT).map(
        lambda payload: [BlockShape(parts, 12 // parts * payload) for parts in (1, 2, 3, 4, 6, 12)]
    )
    return st.one_of(block, layer)


@settings(max_examples=150, deadline=None)
@given(groups=st.lists(group_shapes(), min_size=1, max_size=3), bound=st.sampled_from([0.0, 0.005, 0.02, 0.25]))
def test_it_is_the_smallest_slab_that_suits_every_group(groups: list[list[BlockShape]], bound: float) -> None:
    """No smaller slab suits all groups, as trying every slab with every number of blocks shows."""
    found = [slab for slab in range(UNIT, 200 * UNIT + 1, UNIT) if all(suits(g, slab, bound) for g in groups)]
    choices = slab_choices(groups, SMALL, bound, most=3)
    assert [choice.slab_bytes for choice in choices] == found[:3]
    for choice in choices:
        check(choice, groups, bound)


def check(choice: SlabChoice, groups: list[list[BlockShape]], bound: float) -> None:
    """Blocks tile the slab, are of the shapes offered and are the best of them."""
    for block, shapes in zip(choice.blocks, groups, strict=True):
        assert choice.slab_bytes % block.stride_bytes == 0
        assert block.stride_bytes % UNIT == 0
        assert BlockShape(block.num_parts, block.payload_bytes) in shapes
        assert padding(block.payload_bytes, block.stride_bytes) <= bound
        for shape in shapes:
            for count in range(1, choice.slab_bytes // UNIT + 1):
                stride = choice.slab_bytes // count
                if choice.slab_bytes % (count * UNIT) == 0 and stride >= shape.payload_bytes:
                    better = padding(shape.payload_bytes, stride), shape.num_parts
                    assert (padding(block.payload_bytes, block.stride_bytes), block.num_parts) <= better
    worst = max(padding(block.payload_bytes, block.stride_bytes) for block in choice.blocks)
    assert choice.worst_padding == worst


@settings(max_examples=100, deadline=None)
@given(groups=st.lists(group_shapes(), min_size=1, max_size=3), most_units=st.integers(1, 211))
def test_there_is_always_a_slab(groups: list[list[BlockShape]], most_units: int) -> None:
    """However badly blocks divide each other or the largest slab, one that holds a block of every group is found."""
    kernels = KernelConstraints(max_slab_bytes=most_units * UNIT)
    fitting = [[shape for shape in shapes if shape.payload_bytes <= most_units * UNIT] for shapes in groups]
    fitting = [shapes for shapes in fitting if shapes]
    if fitting:
        choice = choose_slab(fitting, kernels, exact=False)
        assert choice.slab_bytes <= most_units * UNIT
        assert len(choice.blocks) == len(fitting)


def test_exact_prefers_no_padding_to_a_small_slab() -> None:
    """Blocks of 200 and 201 units fit one of 201 with 0.5 %; without padding it takes their common multiple."""
    groups = [[BlockShape(1, 200 * UNIT)], [BlockShape(1, 201 * UNIT)]]
    kernels = KernelConstraints()
    assert choose_slab(groups, kernels, exact=False).slab_bytes == 201 * UNIT
    exact = choose_slab(groups, kernels, exact=True)
    assert (exact.slab_bytes, exact.worst_padding) == (200 * 201 * UNIT, 0)


def test_exact_falls_back_to_the_bound() -> None:
    """Where no slab is without padding, the smallest one within the bound is taken, then of twice the bound."""
    groups = [[BlockShape(1, 1000 * UNIT + 1)], [BlockShape(1, 1000 * UNIT)]]
    choice = choose_slab(groups, KernelConstraints(), exact=True)
    assert choice.slab_bytes == 1001 * UNIT
    kernels = KernelConstraints(max_slab_bytes=500 * UNIT, max_padding=0.01)
    choice = choose_slab([[BlockShape(1, 400 * UNIT)], [BlockShape(1, 150 * UNIT)]], kernels, exact=False)
    assert choice.slab_bytes == 450 * UNIT
    assert choice.worst_padding == pytest.approx(1 / 9)


@pytest.mark.parametrize("alignment", [4, 128, 512, 4096])
def test_strides_keep_the_alignment_asked_for(alignment: int) -> None:
    """Every stride is a multiple of the alignment that the kernels declare."""
    kernels = KernelConstraints(alignment_bytes=alignment)
    choice = choose_slab([[BlockShape(1, 99_999)], [BlockShape(1, 31_234)]], kernels, exact=False)
    assert all(block.stride_bytes % alignment == 0 for block in choice.blocks)
