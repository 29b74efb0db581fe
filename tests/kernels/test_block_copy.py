"""Claims about copying whole blocks of several groups."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hybridkv_kernels import block_copy
from hybridkv_kernels.block_copy import (
    check_copy_blocks,
    copy_blocks,
    copy_blocks_of_views,
    copy_blocks_reference,
    copy_blocks_torch,
    prepare_copy_blocks,
)

# Strides with bytes to copy, over one arena: whole 16-byte pieces, a rest of 5 bytes, an unaligned stride, an odd rest.
GROUPS = [(384, 384), (128, 101), (20, 17), (64, 15)]
ARENA_BYTES = 384 * 8
STALE = (0, 1, 2)
COPIERS = [copy_blocks, copy_blocks_torch]
ALL = [copy_blocks_reference, *COPIERS]


def make_arena(device: torch.device) -> torch.Tensor:
    """Make an arena in which no byte equals its neighbours."""
    torch.manual_seed(0)
    return torch.randint(1, 255, (ARENA_BYTES,), dtype=torch.uint8, device=device)


def as_lists(
    entries: list[tuple[int, int, int]], device: torch.device, dtype: torch.dtype = torch.int32, padded: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return copies with `padded` unused entries that look live, the live count, the groups' bytes."""
    copies = torch.tensor([*entries, *[STALE] * padded], dtype=dtype, device=device)
    count = torch.tensor([len(entries)], dtype=torch.int32, device=device)
    return copies.reshape(-1, 3), count, torch.tensor(GROUPS, dtype=torch.int64, device=device)


@pytest.mark.parametrize("copier", ALL)
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_block_arrives_whole_and_alone(copier: Callable[..., None], group: int, device: torch.device) -> None:
    """Exactly the bytes of the source block change the destination; padding, neighbours, source stay."""
    arena = make_arena(device)
    expected, (stride, num_bytes) = arena.clone(), GROUPS[group]
    last = (ARENA_BYTES - num_bytes) // stride
    for offset in range(num_bytes):
        expected[last * stride + offset] = arena[2 * stride + offset]
    copier(arena, *as_lists([(group, 2, last)], device))
    assert torch.equal(arena, expected)


@pytest.mark.parametrize("copier", ALL)
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_null_source_zeroes_the_block(copier: Callable[..., None], group: int, device: torch.device) -> None:
    """Source 0 gives zeros, even where the null block's bytes are poisoned; nothing else changes."""
    arena = make_arena(device)
    expected, (stride, num_bytes) = arena.clone(), GROUPS[group]
    expected[5 * stride : 5 * stride + num_bytes] = 0
    copier(arena, *as_lists([(group, 0, 5)], device))
    assert torch.equal(arena, expected)


@pytest.mark.parametrize("copier", ALL)
@pytest.mark.parametrize(
    "entry", [(0, 3, 0), (1, 0, 0), (-1, 3, 5), (0, -1, 5), (0, 3, -1), (-1, -1, -1), (2, 7, 7)], ids=str
)
def test_skipped_entries_write_nothing(
    copier: Callable[..., None], entry: tuple[int, int, int], device: torch.device
) -> None:
    """The null block as destination, any -1, a block onto itself leave every byte as it was."""
    arena = make_arena(device)
    before = arena.clone()
    copier(arena, *as_lists([entry], device))
    assert torch.equal(arena, before)


@pytest.mark.parametrize("copier", ALL)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_entries_after_the_count_are_not_read(copier: Callable[..., None], count: int, device: torch.device) -> None:
    """The count is data: one list of fixed size serves any number of copies, stale entries in its tail do nothing."""
    entries = [(0, 3, 5), (0, 4, 6), (0, 0, 7)]
    arena = make_arena(device)
    expected = arena.clone()
    for _, source, destination in entries[:count]:
        expected.view(8, 384)[destination] = arena.view(8, 384)[source] if source else 0
    copier(arena, *as_lists(entries[:count], device, padded=2))
    assert torch.equal(arena, expected)


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_copiers_equal_reference_for_all_groups_in_one_call(
    copier: Callable[..., None], dtype: torch.dtype, device: torch.device
) -> None:
    """Forks to several blocks, zero fills, skips of all groups in one list change the same bytes."""
    entries = [(0, 2, 7), (1, 4, 10), (-1, 4, 11), (1, 4, 12), (2, 100, 101), (3, 0, 28), (0, 0, 0), (2, 103, 104)]
    arenas = [make_arena(device) for _ in range(2)]
    lists = as_lists(entries, device, dtype, padded=1)
    copy_blocks_reference(arenas[0], *lists)
    copier(arenas[1], *lists)
    assert torch.equal(arenas[0], arenas[1])
    assert not torch.equal(arenas[0], make_arena(device))


@pytest.mark.parametrize(("entries", "programs"), [([(0, 2, 7)], 2), ([(0, 2, 7), (2, 67, 68)], 1)])
def test_programs_share_the_tiles_of_a_block(
    entries: list[tuple[int, int, int]], programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of more tiles than programs is copied whole: 384 bytes are three tiles of 128."""
    monkeypatch.setattr(block_copy, "_TILE_BYTES", 128)
    monkeypatch.setattr(block_copy, "_NUM_PROGRAMS", 2)
    monkeypatch.setattr(block_copy, "_MIN_PROGRAMS_PER_COPY", 1)
    arenas = [make_arena(device) for _ in range(2)]
    lists = as_lists(entries, device)
    copy_blocks_reference(arenas[0], *lists)
    assert prepare_copy_blocks(arenas[1], *lists).grid == (len(entries), programs, 1)
    copy_blocks(arenas[1], *lists)
    assert torch.equal(arenas[0], arenas[1])


def test_grid_follows_the_list_not_its_count(device: torch.device) -> None:
    """A long list of idle entries gets few programs per entry; no block gets more than the arena has tiles."""
    arena = torch.empty(1 << 24, dtype=torch.uint8, device=device)
    for num_entries, programs in ((0, 256), (1, 256), (64, 64), (1024, 8)):
        copies, count, sizes = as_lists([], device, padded=num_entries)
        assert prepare_copy_blocks(arena, copies, count, sizes).grid == (num_entries, programs, 1)
        assert prepare_copy_blocks(make_arena(device), copies, count, sizes).grid[1] == 1


@pytest.mark.parametrize("stride", [2**28 + 16, 2**28 + 8], ids=["words", "bytes"])
@pytest.mark.parametrize("copier", COPIERS)
def test_offsets_beyond_32_bits_are_copied(
    copier: Callable[..., None], stride: int, device: torch.device, checked_int32: None
) -> None:
    """Blocks past 2**31 bytes are read and written where they belong, not where 32 bits would wrap."""
    source, destination, num_bytes = 8, 9, 21
    # Only the pages that are touched become resident: the arena is 2.3 GiB of address space.
    arena = torch.empty(destination * stride + 64, dtype=torch.uint8, device=device)
    arena[source * stride : source * stride + num_bytes] = torch.arange(1, 22, dtype=torch.uint8, device=device)
    arena[destination * stride :] = 77
    sizes = torch.tensor([[stride, num_bytes]], dtype=torch.int64, device=device)
    copies = torch.tensor([[0, source, destination]], dtype=torch.int32, device=device)
    copier(arena, copies, torch.ones(1, dtype=torch.int32, device=device), sizes)
    assert arena[destination * stride :].tolist() == [*range(1, 22), *[77] * 43]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([(0, 3, 0)], r"destination: expected -1 or a block of group 0, 1\.\.7, got 0"),
        ([(4, 3, 5)], "group: expected"),
        ([(0, 3, 8)], r"destination: expected -1 or a block of group 0, 1\.\.7, got 8"),
        ([(0, 8, 5)], "source: expected a block of group 0, up to 7"),
        ([(0, 1, 2), (0, 2, 3)], "no chains"),
        ([(0, 2, 3), (0, 1, 2)], "no chains"),
        ([(0, 1, 2), (0, 2, 1)], "no chains"),
        ([(0, 1, 3), (0, 2, 3)], "no chains"),
        ([(0, 0, 3), (0, 0, 3)], "no chains"),
        ([(0, 4, 3), (1, 5, 9)], "no chains"),
        ([(0, 4, 3), (1, 10, 5)], "no chains"),
        ([(1, 9, 2)], "no chains"),
    ],
)
def test_check_refuses_bad_lists(entries: list[tuple[int, int, int]], message: str) -> None:
    """Null blocks (other groups' too), unknown groups or blocks, chains, overlaps across groups are refused."""
    arena = make_arena(torch.device("cpu"))
    good = [(0, 3, 5), (0, 3, 6), (-1, 0, 0), (0, -1, 99), (0, 0, 7), (1, 4, 4), (1, 5, 6), (1, 2, 8)]
    check_copy_blocks(arena, *as_lists(good, arena.device, padded=1))
    with pytest.raises(ValueError, match=message):
        check_copy_blocks(arena, *as_lists(entries, arena.device))


@pytest.mark.parametrize("size", [(16, 17), (0, 0), (16, -1)])
def test_check_refuses_bad_sizes(size: tuple[int, int]) -> None:
    """A block that is longer than its stride, a stride of 0, a negative size, a count beyond the list are refused."""
    arena = make_arena(torch.device("cpu"))
    copies, count, sizes = as_lists([(0, 3, 5)], arena.device)
    with pytest.raises(ValueError, match=r"num_copies: expected 0\.\.1, got 2"):
        check_copy_blocks(arena, copies, count + 1, sizes)
    sizes[1] = torch.tensor(size)
    with pytest.raises(ValueError, match=r"group_bytes\[1\]: expected"):
        check_copy_blocks(arena, copies, count, sizes)


def test_launcher_refuses_what_the_kernel_cannot_address(device: torch.device) -> None:
    """Wrong dtypes, a list that is no list of triples, strided or misaligned arenas each name their argument."""
    arena = make_arena(device)
    copies, count, sizes = as_lists([(0, 3, 5)], device)
    refused = [
        (r"arena\.dtype", (arena.view(torch.int32), copies, count, sizes)),
        (r"arena\.stride", (arena[::2], copies, count, sizes)),
        (r"arena\.data_ptr", (arena[8:], copies, count, sizes)),
        (r"copies\.dtype", (arena, copies.to(torch.int16), count, sizes)),
        (r"copies\.shape", (arena, copies[:, :2], count, sizes)),
        (r"num_copies\.dtype", (arena, copies, count.long(), sizes)),
        (r"group_bytes\.dtype", (arena, copies, count, sizes.int())),
        (r"group_bytes\.shape", (arena, copies, count, sizes[:, :1])),
    ]
    for message, arguments in refused:
        with pytest.raises(ValueError, match=message):
            copy_blocks(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_views_of_separate_tensors_are_copied_alike(dtype: torch.dtype, device: torch.device) -> None:
    """One call moves the same blocks of several tensors, dense or strided; skips, the rest of the blocks stay."""
    torch.manual_seed(0)
    wide = torch.randn(7, 6, device=device).to(dtype)
    views = [torch.randn(7, 3, 2, device=device).to(dtype), wide.as_strided((7, 4), (6, 1), 1)]
    for view in views:
        view[0] = 0
    before, wide_before = [view.clone() for view in views], wide.clone()
    source = torch.tensor([2, 0, -1, 4, 2, 6, 4], device=device)
    destination = torch.tensor([3, 1, 4, 0, 5, 6, -1], device=device)
    copy_blocks_of_views(views, source, destination)
    for view, old in zip(views, before, strict=True):
        for block_id, origin in enumerate([0, 0, 2, 2, 4, 2, 6]):
            assert torch.equal(view[block_id].float(), old[origin].float())
    assert torch.equal(wide[:, [0, 5]].float(), wide_before[:, [0, 5]].float())


def test_views_refuse_a_list_of_two_lengths(device: torch.device) -> None:
    """Sources and destinations are int64 lists of one length."""
    blocks = torch.tensor([1, 2], device=device)
    with pytest.raises(ValueError, match=r"destination\.shape"):
        copy_blocks_of_views([], blocks, blocks[:1])
    with pytest.raises(ValueError, match=r"source\.dtype"):
        copy_blocks_of_views([], blocks.int(), blocks)
