"""Claims about what kernels take and what a load is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import SpecError
from hybridkv.limits import BatchLimits, KernelConstraints, Load


@given(multiple=st.integers(1, 96), power=st.booleans(), at_least=st.integers(1, 300), also=st.sampled_from([1, 4, 8]))
def test_the_smallest_block_size_is_the_first_that_kernels_take(
    multiple: int, power: bool, at_least: int, also: int
) -> None:
    """Trying one size after the other finds the same, or nothing where there is none."""
    kernels = KernelConstraints(block_size_multiple=multiple, block_size_power_of_two=power)
    tried = (size for size in range(at_least, 40_000) if kernels.takes_block_size(size) and size % also == 0)
    first = next(tried, None)
    if first is None:
        with pytest.raises(SpecError, match="no power of two is a multiple of"):
            kernels.smallest_block_size(at_least, also)
    else:
        assert kernels.smallest_block_size(at_least, also) == first


@pytest.mark.parametrize(
    ("kernels", "block_size", "message"),
    [
        (KernelConstraints(block_size_multiple=16), 24, "got 24 for group 1, kernels take a multiple of 16; use 32"),
        (KernelConstraints(block_size_power_of_two=True), 48, "a multiple of 1 that is a power of two; use 64"),
        (KernelConstraints(block_size_multiple=64, block_size_power_of_two=True), 96, "use 128"),
        (KernelConstraints(), 0, "expected at least 1 token a block"),
    ],
)
def test_a_block_size_kernels_do_not_take_is_refused(kernels: KernelConstraints, block_size: int, message: str) -> None:
    """The error says the rule and the nearest size that would do."""
    with pytest.raises(SpecError, match=message):
        kernels.check_block_size(1, block_size)
    assert KernelConstraints(block_size_multiple=16).check_block_size(0, 48) == 48


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size_multiple", 0),
        ("alignment_bytes", 96),
        ("alignment_bytes", 2),
        ("alignment_bytes", 2**21),
        ("max_tensor_elements", 0),
        ("max_slab_bytes", 0),
        ("max_padding", 1.0),
        ("max_padding", -0.1),
    ],
)
def test_bad_constraints_are_refused_by_name(field: str, value: object) -> None:
    """A constraint that no kernel can have raises a `SpecError` that names it."""
    with pytest.raises(SpecError, match=f"{field}: got {value}"):
        KernelConstraints(**{field: value})  # type: ignore[arg-type]


def test_a_load_keeps_the_usual_lengths_below_the_models() -> None:
    """Usual lengths beyond the model's are left out; a model shorter than all of them has its own."""
    assert Load.up_to(131_072).contexts == (8192, 32_768, 131_072)
    assert Load.up_to(40_000).contexts == (8192, 32_768)
    assert Load.up_to(448).contexts == (448,)


@pytest.mark.parametrize(("contexts", "num_seqs"), [((), None), ((0,), None), ((8,), 0), ((True,), 1), ((8.0,), 1)])
def test_a_bad_load_is_refused(contexts: tuple[int, ...], num_seqs: int | None) -> None:
    """A load has at least one length, of at least a token, and at least one sequence."""
    with pytest.raises(SpecError):
        Load(contexts, num_seqs)


def test_a_decoding_row_has_its_token_and_the_unsettled_ones_in_flight() -> None:
    """One token a step, and those of steps that are not settled."""
    assert BatchLimits(4, 100, 8).decode_in_flight == 1
    assert BatchLimits(4, 100, 8, max_unsettled_tokens=3).decode_in_flight == 4
