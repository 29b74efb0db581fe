"""Claims about scattering keys with values into a paged cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from hybridkv_kernels.kv_write import (
    _fixed_shape_targets,
    _Side,
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
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


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


def compare(
    writer: Callable[..., None],
    shape: Shape,
    slots: list[int],
    layout: Layout,
    device: torch.device,
    **scales: float | torch.Tensor,
) -> None:
    """Run a writer beside the reference, then compare every byte of both arenas."""
    key, value = make_tokens(shape, len(slots), device)
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    arenas = []
    for function in (write_kv_reference, writer):
        key_cache = make_cache(shape, layout, shape.key_dim, shape.key_cache_dtype, device)
        value_cache = make_cache(shape, layout, shape.value_dim, shape.value_cache_dtype, device)
        function(key, value, key_cache, value_cache, slot_mapping, layout=layout, **scales)
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
    _write_fixed_shape(_Side("key", key, got, 1.0), slot_mapping)
    assert torch.equal(whole_storage(got), whole_storage(expected))


def test_fixed_shape_path_aims_skipped_tokens_at_a_kept_one() -> None:
    """With any kept token, no target lies in the null block; with none, every target is slot 0."""
    token, target = _fixed_shape_targets(torch.tensor([-1, 2, 9, 6, -1]), 4)
    assert token.tolist() == [2, 2, 2, 3, 2]
    assert target.tolist() == [9, 9, 9, 6, 9]
    assert _fixed_shape_targets(torch.tensor([-1, 3]), 4)[1].tolist() == [0, 0]


def finite_values(dtype: torch.dtype) -> torch.Tensor:
    """Return every finite value of a float8 format once, ascending, as float64 (`-0.0` is left out)."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).double()
    return every[every.isfinite()].unique()


def nearest_float8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Search the format's table for the nearest value of each, for ties the one with an even code, for NaN NaN."""
    table = finite_values(dtype)
    distance = (values.double().clamp(table[0], table[-1])[..., None] - table).abs()
    is_odd = table.to(dtype).view(torch.uint8) & 1
    # Distances of float32 numbers to float8 ones are exact in float64, so equal ones are ties.
    best = (distance == distance.amin(-1, keepdim=True)).double() * (2.0 - is_odd)
    return torch.where(values.isnan(), torch.nan, table[best.argmax(-1)])


@pytest.mark.parametrize("writer", [write_kv_reference, *WRITERS])
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_cache_holds_the_nearest_value(
    writer: Callable[..., None], dtype: torch.dtype, device: torch.device, checked_int32: None
) -> None:
    """Values of the format, the midpoints between them with both their neighbours, the largest, infinities, NaN."""
    table = finite_values(dtype)
    middle = ((table[1:] + table[:-1]) / 2).float()
    lowest, highest = torch.tensor(-torch.inf), torch.tensor(torch.inf)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -1e9, 1e-45, -1e-30, 0.0])
    largest_nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    values = torch.cat(
        [table.float(), middle, middle.nextafter(lowest), middle.nextafter(highest), special, largest_nan]
    )
    values = torch.cat([values, values.new_zeros(-values.numel() % 256)]).reshape(1, -1, 256)
    cache = torch.zeros(3, 2, *values.shape[1:], device=device).to(dtype)
    writer(values.to(device), values.to(device), cache, cache.clone(), torch.tensor([3], device=device))
    got = cache[1, 1].double().cpu()
    assert torch.equal(got.isnan(), values[0].isnan())
    assert torch.equal(got.nan_to_num(), nearest_float8(values[0], dtype).nan_to_num())
    # A small negative number keeps its sign where the format has a negative zero.
    is_small = (got == 0) & (values[0] < 0)
    assert is_small.any()
    assert (torch.signbit(got[is_small]) == ("fnuz" not in str(dtype))).all()


@pytest.mark.parametrize("writer", [write_kv_reference, *WRITERS])
def test_each_side_and_head_is_divided_by_its_scale(writer: Callable[..., None], device: torch.device) -> None:
    """Keys by a number, values by one scale a head; what exceeds 448 after the division saturates."""
    key = torch.full((1, 2, 1), 96.0, device=device)
    value = torch.full((1, 2, 1), 1000.0, device=device)
    caches = [torch.zeros(2, 1, 2, 1, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = {"k_scale": 4.0, "v_scale": torch.tensor([2.0, 50.0], device=device)}
    writer(key, value, *caches, torch.tensor([1], device=device), **scales)
    assert caches[0][1, 0].flatten().tolist() == [24.0, 24.0]
    assert caches[1][1, 0].flatten().tolist() == [448.0, 20.0]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("num_scales", [None, 1, 3])
def test_float8_writers_equal_reference(
    writer: Callable[..., None], layout: Layout, num_scales: int | None, device: torch.device
) -> None:
    """Two formats, inexact quotients, a number, one scale, one a head: the same bytes as the reference."""
    shape = Shape(
        num_heads=3,
        key_dim=24,
        value_dim=8,
        dtype=torch.bfloat16,
        key_cache_dtype=torch.float8_e4m3fn,
        value_cache_dtype=torch.float8_e5m2,
    )
    scale: float | torch.Tensor = 0.3
    if num_scales is not None:
        scale = torch.linspace(0.003, 0.3, num_scales, device=device)
    compare(writer, shape, [-1, 23, 0, 4, 3, 9], layout, device, k_scale=scale, v_scale=scale)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float8_e4m3fn), (torch.float8_e5m2, torch.float16)], ids=str)
@pytest.mark.parametrize("writer", WRITERS)
def test_one_side_may_be_float8(
    writer: Callable[..., None], dtypes: tuple[torch.dtype, torch.dtype], device: torch.device
) -> None:
    """Keys or values alone may be float8; the other side is cast as ever."""
    scales = {name: 0.7 for name, dtype in zip(("k_scale", "v_scale"), dtypes, strict=True) if dtype in FLOAT8}
    shape = Shape(key_cache_dtype=dtypes[0], value_cache_dtype=dtypes[1])
    compare(writer, shape, [5, -1, 22], "NHD", device, **scales)


@pytest.mark.parametrize("writer", WRITERS)
def test_float8_codes_pass_through_as_bytes(writer: Callable[..., None], device: torch.device) -> None:
    """Tokens that are float8 already go from uint8 view to uint8 view unchanged."""
    codes = torch.arange(256, device=device).to(torch.uint8).view(1, 1, 256)
    cache = torch.zeros(2, 2, 1, 256, device=device).to(torch.float8_e4m3fn)
    cells = cache.view(torch.uint8)
    writer(codes, codes, cells, cells.clone(), torch.tensor([2], device=device))
    assert torch.equal(cells[1, 0], codes[0])


@pytest.mark.parametrize("slots", [[-1, -1], [-1, 9, 4, 2]])
def test_fixed_shape_path_writes_float8(slots: list[int], device: torch.device) -> None:
    """The sync-free torch path scales and saturates alike."""
    shape = Shape(key_cache_dtype=torch.float8_e4m3fn)
    key, _ = make_tokens(shape, len(slots), device)
    slot_mapping = torch.tensor(slots, device=device)
    expected, got = (make_cache(shape, "NHD", 16, torch.float8_e4m3fn, device) for _ in range(2))
    write_kv_reference(key, key, expected, expected.clone(), slot_mapping, k_scale=0.01)
    _write_fixed_shape(_Side("key", key, got, 0.01), slot_mapping)
    assert torch.equal(whole_storage(got), whole_storage(expected))


@pytest.mark.parametrize("writer", [check_write_kv, *WRITERS])
def test_scales_that_nothing_could_apply_are_refused(writer: Callable[..., None], device: torch.device) -> None:
    """A scale for a plain cache, of a wrong shape or dtype, of 0, a float8 source, an integer source are refused."""
    key, value = make_tokens(Shape(), 1, device)
    plain = make_cache(Shape(), "NHD", 16, torch.float32, device)
    cache = make_cache(Shape(), "NHD", 16, torch.float8_e4m3fn, device)
    ones, slots = torch.ones(2, device=device), torch.tensor([4], device=device)
    refused = [
        ("k_scale: expected 1.0 for a cache of torch.float32", key, plain, {"k_scale": 0.5}),
        ("v_scale: expected 1.0 for a cache of torch.float32", key, plain, {"v_scale": ones}),
        ("k_scale.shape: expected", key, cache, {"k_scale": ones.repeat(2)}),
        ("v_scale.dtype: expected", key, cache, {"v_scale": ones.half()}),
        ("k_scale: expected a finite number > 0", key, cache, {"k_scale": 0.0}),
        ("v_scale: expected a finite number > 0", key, cache, {"v_scale": float("nan")}),
        ("key.dtype: expected", key.to(torch.float8_e4m3fn), cache, {}),
        ("key.dtype: expected a float dtype", key.int(), cache, {}),
    ]
    for message, tokens, target, scales in refused:
        with pytest.raises(ValueError, match=re.escape(message)):
            writer(tokens, value, target, target.clone(), slots, **scales)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_check_refuses_bad_scale_values(bad: float) -> None:
    """Each element of a scale tensor must be finite and positive."""
    device = torch.device("cpu")
    key, value = make_tokens(Shape(), 1, device)
    cache = make_cache(Shape(), "NHD", 16, torch.float8_e4m3fn, device)
    scale = torch.ones(2)
    check_write_kv(key, value, cache, cache, torch.tensor([4]), v_scale=scale)
    scale[1] = bad
    with pytest.raises(ValueError, match="v_scale: expected finite numbers"):
        check_write_kv(key, value, cache, cache, torch.tensor([4]), v_scale=scale)


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
