"""Claims about scattering keys with values into a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from hybridkv_kernels.kv_write import (
    _fixed_shape_targets,
    _write_fixed_shape,
    check_write_kv,
    write_kv,
    write_kv_reference,
    write_kv_torch,
)

Layout = Literal["NHD", "HND"]
POISON = 12345.0
NUM_BLOCKS = 6
WRITERS = [write_kv, write_kv_torch]


@dataclass(frozen=True)
class Shape:
    """Sizes, dtypes of one case."""

    num_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    key_cache_dtype: torch.dtype = torch.float32
    value_cache_dtype: torch.dtype = torch.float32


def make_cache(shape: Shape, layout: Layout, dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a poisoned cache that is a strided view: gaps between blocks, another tensor between heads."""
    middle = (shape.block_size, shape.num_heads) if layout == "NHD" else (shape.num_heads, shape.block_size)
    arena = torch.full((NUM_BLOCKS + 1, 2, *middle, dim + 3), POISON, device=device).to(dtype)
    return arena[:NUM_BLOCKS, 1, :, :, 1 : dim + 1]


def whole_storage(cache: torch.Tensor) -> torch.Tensor:
    """View the bytes of the arena that a cache is cut from, gaps included."""
    return torch.tensor([], dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())


def make_tokens(shape: Shape, num_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make keys with values as slices of wider projections, so that neither is contiguous, nor strided alike."""
    torch.manual_seed(num_tokens)
    wide_key = torch.randn(num_tokens, shape.num_heads, shape.key_dim + 7, device=device).to(shape.dtype)
    wide_value = torch.randn(num_tokens, shape.num_heads + 1, shape.value_dim + 2, device=device).to(shape.dtype)
    return wide_key[..., 7:], wide_value[:, 1:, : shape.value_dim]


def compare(writer: Callable[..., None], shape: Shape, slots: list[int], layout: Layout, device: torch.device) -> None:
    """Run a writer beside the reference, then compare every byte of both arenas."""
    key, value = make_tokens(shape, len(slots), device)
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    arenas = []
    for function in (write_kv_reference, writer):
        key_cache = make_cache(shape, layout, shape.key_dim, shape.key_cache_dtype, device)
        value_cache = make_cache(shape, layout, shape.value_dim, shape.value_cache_dtype, device)
        function(key, value, key_cache, value_cache, slot_mapping, layout=layout)
        arenas.append((whole_storage(key_cache), whole_storage(value_cache)))
    assert torch.equal(arenas[0][0], arenas[1][0])
    assert torch.equal(arenas[0][1], arenas[1][1])


@pytest.mark.parametrize("writer", [write_kv_reference, *WRITERS])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_token_lands_in_its_block_at_its_offset(
    writer: Callable[..., None], layout: Layout, device: torch.device
) -> None:
    """Slot 9 of block size 4 is block 2, offset 1; every other element keeps its poison."""
    shape = Shape()
    key, value = make_tokens(shape, 1, device)
    key_cache = make_cache(shape, layout, 16, torch.float32, device)
    value_cache = make_cache(shape, layout, 16, torch.float32, device)
    writer(key, value, key_cache, value_cache, torch.tensor([9], device=device), layout=layout)
    for cache, source in ((key_cache, key), (value_cache, value)):
        place = cache[2, 1] if layout == "NHD" else cache[2, :, 1]
        assert torch.equal(place, source[0])
        place.fill_(POISON)
        assert (cache == POISON).all()


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("slots", [[], [4], [-1], [-1, 23, 4, -1, 8, 0, 3]], ids=["empty", "one", "padding", "mixed"])
def test_writers_equal_reference_for_any_batch(
    writer: Callable[..., None], layout: Layout, slots: list[int], device: torch.device
) -> None:
    """Empty, single, all-padding, mixed batches change the same bytes as the reference, gaps included."""
    compare(writer, Shape(), slots, layout, device)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(key_dim=24, value_dim=8),
        Shape(num_heads=3, key_dim=5, value_dim=1, block_size=3),
        Shape(num_heads=1, key_dim=1, value_dim=1, block_size=1),
        Shape(num_heads=33, key_dim=96, value_dim=128),
        Shape(dtype=torch.bfloat16, key_cache_dtype=torch.bfloat16, value_cache_dtype=torch.float16),
        # Triton 3.9's interpreter truncates float32 to bfloat16, so the rounding cast is tested with float16.
        Shape(dtype=torch.float32, key_cache_dtype=torch.float16, value_cache_dtype=torch.float32),
    ],
    ids=["dims differ", "odd", "ones", "many heads", "two dtypes", "cast"],
)
def test_writers_equal_reference_for_any_shape(writer: Callable[..., None], shape: Shape, device: torch.device) -> None:
    """Head sizes, head counts, block sizes, dtypes of keys or values may be any."""
    compare(writer, shape, [shape.block_size, -1, 2 * shape.block_size + 1 % shape.block_size], "NHD", device)


@pytest.mark.parametrize("writer", [write_kv_reference, *WRITERS])
def test_null_block_is_never_written(writer: Callable[..., None], device: torch.device) -> None:
    """Slots of block 0 are skipped like padding, whatever block 0 holds."""
    shape = Shape()
    key, value = make_tokens(shape, 4, device)
    key_cache = make_cache(shape, "NHD", 16, torch.float32, device)
    value_cache = make_cache(shape, "NHD", 16, torch.float32, device)
    slots = torch.tensor([0, 3, -1, 1], device=device)
    writer(key, value, key_cache, value_cache, slots)
    assert (key_cache == POISON).all()
    assert (value_cache == POISON).all()


@pytest.mark.parametrize("slots", [[-1, -1], [-1, 9, 4, 2], [5]])
def test_fixed_shape_path_equals_reference(slots: list[int], device: torch.device) -> None:
    """The sync-free torch path writes the same bytes without a shape that depends on the slots."""
    shape = Shape()
    key, _ = make_tokens(shape, len(slots), device)
    slot_mapping = torch.tensor(slots, device=device)
    expected = make_cache(shape, "NHD", 16, torch.float32, device)
    got = make_cache(shape, "NHD", 16, torch.float32, device)
    write_kv_reference(key, key, expected, expected.clone(), slot_mapping)
    _write_fixed_shape(key, got, slot_mapping)
    assert torch.equal(whole_storage(got), whole_storage(expected))


def test_fixed_shape_path_aims_skipped_tokens_at_a_kept_one() -> None:
    """With any kept token, no target lies in the null block; with none, every target is slot 0."""
    token, target = _fixed_shape_targets(torch.tensor([-1, 2, 9, 6, -1]), 4)
    assert token.tolist() == [2, 2, 2, 3, 2]
    assert target.tolist() == [9, 9, 9, 6, 9]
    assert _fixed_shape_targets(torch.tensor([-1, 3]), 4)[1].tolist() == [0, 0]


def test_cache_beyond_32_bit_offsets_is_written(device: torch.device, checked_int32: None) -> None:
    """A block whose offset passes 2**31 elements is written where it belongs, not where 32 bits would wrap."""
    stride, block_id = 2**28 + 8, 9
    # Only the pages that are touched become resident: the arena is 2.3 GiB of address space.
    arena = torch.empty(block_id * stride + 64, dtype=torch.uint8, device=device)
    cache = arena.as_strided((block_id + 1, 2, 1, 8), (stride, 8, 8, 1))
    source = torch.arange(1, 9, dtype=torch.uint8, device=device).reshape(1, 1, 8)
    write_kv(source, source, cache, cache, torch.tensor([2 * block_id + 1], device=device))
    assert arena[block_id * stride + 8 : block_id * stride + 16].tolist() == list(range(1, 9))


@pytest.mark.parametrize("slots", [[0], [3], [24], [-2], [7, 7]])
def test_check_refuses_bad_slots(slots: list[int]) -> None:
    """Null-block, out-of-range, unknown negative, repeated slots are refused by the check."""
    shape = Shape()
    key, value = make_tokens(shape, len(slots), torch.device("cpu"))
    caches = [make_cache(shape, "NHD", 16, torch.float32, torch.device("cpu")) for _ in range(2)]
    check_write_kv(key, value, caches[0], caches[1], torch.arange(4, 4 + len(slots)))
    with pytest.raises(ValueError, match="slot_mapping: expected"):
        check_write_kv(key, value, caches[0], caches[1], torch.tensor(slots))


def test_launcher_refuses_what_the_kernel_cannot_address(device: torch.device) -> None:
    """Wrong head size, wrong slot dtype, wrong layout, strided last dimension each name their argument."""
    shape = Shape(num_heads=2, key_dim=16, value_dim=16)
    key, value = make_tokens(shape, 2, device)
    cache = make_cache(shape, "NHD", 16, torch.float32, device)
    slots = torch.tensor([4, 5], device=device)
    with pytest.raises(ValueError, match="value_cache"):
        write_kv(key, value[..., :8], cache, cache, slots)
    with pytest.raises(ValueError, match=r"slot_mapping\.dtype"):
        write_kv(key, value, cache, cache, slots.int())
    with pytest.raises(ValueError, match="layout"):
        write_kv(key, value, cache, cache, slots, layout="DHN")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"key\.stride"):
        write_kv(key.mT.contiguous().mT, value, cache, cache, slots)
