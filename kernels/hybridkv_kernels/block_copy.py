"""Copies of whole blocks of any groups in one launch: forks, checkpoints, compaction, zeroing of newly lent blocks.

Contract
    arena[d * stride_g : d * stride_g + bytes_g] = arena[s * stride_g : s * stride_g + bytes_g]
    for every entry (g, s, d) of `copies[:num_copies]`; zeros where s is the null block.
    An entry with a negative number, with d = NULL_BLOCK_ID or with s = d writes nothing. Bytes of a block beyond
    bytes_g (the padding up to the stride) are neither read nor written.

    All sources are read as they were before the call, in any order, so copies must not form chains (I4). A permutation
    of beams is no in-place shuffle of blocks: rows share full blocks by reference, only a last partial block that is to
    be written on is copied, into a newly lent block, and the old one is freed once the copy is done. A partial block is
    copied whole: its unused tail costs less than a byte count per entry and layer would.

Shapes
    arena        [arena_bytes] uint8          contiguous; its address is a multiple of 16
    copies       [N, 3]        int32, int64   group, source block, destination block
    num_copies   [1]           int32          live entries; those after them may hold anything
    group_bytes  [G, 2]        int64          stride of a block, bytes to copy of it

Invariants
    I1  0 <= num_copies <= N, live groups are in [0, G), live blocks lie in the arena
    I2  0 <= bytes_g <= stride_g, stride_g > 0
    I3  no destination overlaps the bytes of any group's null block (groups share the arena: where one cuts a slab into
        several blocks, the ids up to the end of the first slab are other groups' null blocks)
    I4  no destination overlaps the source or destination of another entry, whatever their groups; a source may serve
        many destinations

Width: where stride_g is a multiple of 16 (plans align strides to 128 by default), whole 16-byte pieces of a block move
as two int64 and the rest of up to 15 bytes singly; any other stride moves single bytes, which is right but slow.
Grid: (N, programs per copy); it depends on N and the arena only, so a captured graph serves any number of copies up to
N. The programs of an entry loop over its tiles, so large blocks do not multiply the programs of idle entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch

from hybridkv_kernels._checks import expect, expect_one_device, expect_tensor
from hybridkv_kernels._triton import Launch, jit, tl
from hybridkv_kernels.constants import NULL_BLOCK_ID

__all__ = [
    "check_copy_blocks",
    "copy_blocks",
    "copy_blocks_of_views",
    "copy_blocks_reference",
    "copy_blocks_torch",
    "prepare_copy_blocks",
]

_ALIGNMENT_BYTES = 16
_TILE_BYTES = 8192
# About 30 programs a multiprocessor of a large GPU, shared by the entries of the list, idle ones included.
_NUM_PROGRAMS = 4096
_MIN_PROGRAMS_PER_COPY, _MAX_PROGRAMS_PER_COPY = 8, 256


def _check_shapes(
    arena: torch.Tensor, copies: torch.Tensor, num_copies: torch.Tensor, group_bytes: torch.Tensor
) -> None:
    expect_tensor("arena", arena, torch.uint8, (None,))
    expect(copies.dtype in (torch.int32, torch.int64), "copies.dtype", "int32 or int64", copies.dtype)
    expect_tensor("copies", copies, None, (None, 3))
    expect_tensor("num_copies", num_copies, torch.int32, (1,))
    expect_tensor("group_bytes", group_bytes, torch.int64, (None, 2))
    named = (("arena", arena), ("copies", copies), ("num_copies", num_copies), ("group_bytes", group_bytes))
    for name, tensor in named:
        expect(tensor.is_contiguous(), f"{name}.stride()", "contiguous", tensor.stride())
    expect_one_device(named)


def _byte_copies(
    copies: torch.Tensor, num_copies: torch.Tensor, group_bytes: torch.Tensor
) -> Iterator[tuple[int | None, int, int]]:
    """Yield (first source byte or None for zeros, first destination byte, bytes) of each entry that writes; syncs."""
    sizes = group_bytes.tolist()
    for group, source, destination in copies[: int(num_copies)].tolist():
        if group < 0 or source < 0 or destination <= NULL_BLOCK_ID or source == destination:
            continue
        stride, num_bytes = sizes[group]
        yield None if source == NULL_BLOCK_ID else source * stride, destination * stride, num_bytes


def check_copy_blocks(
    arena: torch.Tensor, copies: torch.Tensor, num_copies: torch.Tensor, group_bytes: torch.Tensor
) -> None:
    """Check shapes plus the invariants I1 to I4; syncs, for tests and debugging.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(arena, copies, num_copies, group_bytes)
    sizes, count = group_bytes.tolist(), int(num_copies)
    expect(0 <= count <= copies.shape[0], "num_copies", f"0..{copies.shape[0]}", count)
    for group, (stride, num_bytes) in enumerate(sizes):
        expect(
            0 <= num_bytes <= stride and stride > 0, f"group_bytes[{group}]", "0 <= bytes <= stride > 0", sizes[group]
        )
    for idx, (group, source, destination) in enumerate(copies[:count].tolist()):
        if min(group, source, destination) < 0:
            continue
        expect(group < len(sizes), f"copies[{idx}]: group", f"a skip (-1) or 0..{len(sizes) - 1}", group)
        last = (arena.numel() - sizes[group][1]) // sizes[group][0]
        expect(source <= last, f"copies[{idx}]: source", f"a block of group {group}, up to {last}", source)
        in_arena = NULL_BLOCK_ID < destination <= last
        expect(in_arena, f"copies[{idx}]: destination", f"-1 or a block of group {group}, 1..{last}", destination)
    _check_overlaps(list(_byte_copies(copies, num_copies, group_bytes)), max((size for _, size in sizes), default=0))


def _check_overlaps(byte_copies: Sequence[tuple[int | None, int, int]], null_bytes: int) -> None:
    """Check I3 and I4 in one sweep over the byte ranges; `null_bytes` is the end of the longest null block."""
    spans = [(begin, begin + size, True) for _, begin, size in byte_copies if size]
    spans += [(begin, begin + size, False) for begin, _, size in byte_copies if begin is not None and size]
    written_end, touched_end = 0, null_bytes
    for begin, end, is_written in sorted(spans):
        free_from = touched_end if is_written else written_end
        expect(
            begin >= free_from,
            "copies",
            "destinations that overlap no null block, no other source, no other destination (no chains)",
            f"a {'destination' if is_written else 'source'} at byte {begin}, taken up to byte {free_from}",
        )
        touched_end = max(touched_end, end)
        written_end = max(written_end, end) if is_written else written_end


def copy_blocks_reference(
    arena: torch.Tensor, copies: torch.Tensor, num_copies: torch.Tensor, group_bytes: torch.Tensor
) -> None:
    """Copy entry by entry from a snapshot of the arena.

    Shapes, dtypes: as in the module's contract.
    """
    before = arena.clone()
    for group, source, destination in copies[: int(num_copies)].tolist():
        if min(group, source, destination) < 0 or destination in (NULL_BLOCK_ID, source):
            continue
        stride, num_bytes = group_bytes[group].tolist()
        target = arena[destination * stride : destination * stride + num_bytes]
        if source == NULL_BLOCK_ID:
            target.zero_()
        else:
            target.copy_(before[source * stride : source * stride + num_bytes])


def copy_blocks_torch(
    arena: torch.Tensor, copies: torch.Tensor, num_copies: torch.Tensor, group_bytes: torch.Tensor
) -> None:
    """Copy block by block without a temporary, on a CPU or any other device; reading the list syncs.

    One memory copy per block beats gathering and scattering all of them, which moves every byte twice.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride or device.
    """
    _check_shapes(arena, copies, num_copies, group_bytes)
    # numpy slices alike, in a fraction of torch's time.
    buffer = cast("torch.Tensor", arena.numpy()) if arena.device.type == "cpu" else arena
    for source, destination, num_bytes in _byte_copies(copies, num_copies, group_bytes):
        if source is None:
            buffer[destination : destination + num_bytes] = 0
        else:
            buffer[destination : destination + num_bytes] = buffer[source : source + num_bytes]


def copy_blocks_of_views(views: Sequence[torch.Tensor], source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy blocks of one group whose tensors are separate: one gather, one scatter per view; syncs off the CPU.

    For an arena with one dense tensor per layer. The null block is read as it is: zeros. Entries are skipped as in the
    module's contract, and I4 holds here too.

    Shapes: views [num_blocks, ...] each, any dtype, any strides; source, destination [N] int64
    Raises: ValueError for a wrong shape, dtype or device.
    """
    expect_tensor("source", source, torch.int64, (None,))
    expect_tensor("destination", destination, torch.int64, (source.shape[0],))
    named = [(f"views[{idx}]", view) for idx, view in enumerate(views)]
    expect_one_device([("source", source), ("destination", destination), *named])
    written = (source >= NULL_BLOCK_ID) & (destination > NULL_BLOCK_ID) & (source != destination)
    sources, destinations = source[written], destination[written]
    for view in views:
        view[destinations] = view[sources]


@jit
def _copy_span(
    ptr: tl.tensor,  # the arena, as elements of any width
    source: tl.tensor,  # first element of the source block, int64
    destination: tl.tensor,
    begin: tl.tensor,  # of the block's elements, the range to copy
    end: tl.tensor,
    read_end: tl.tensor,  # elements from here on are stored as zeros
    BLOCK: tl.constexpr,
) -> None:
    """Copy one program's tiles of a block."""
    first = begin + tl.program_id(1).to(tl.int64) * BLOCK
    for start in range(first, end, tl.num_programs(1).to(tl.int64) * BLOCK):
        element = start + tl.arange(0, BLOCK)
        values = tl.load(ptr + source + element, mask=element < read_end, other=0)
        tl.store(ptr + destination + element, values, mask=element < end)


@jit
def _copy_blocks_kernel(
    arena_ptr: tl.tensor,  # [arena_bytes] uint8
    copies_ptr: tl.tensor,  # [N, 3] int32 or int64
    num_copies_ptr: tl.tensor,  # [1] int32
    group_bytes_ptr: tl.tensor,  # [G, 2] int64
    NULL_BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE_BYTES: tl.constexpr,
) -> None:
    WORDS: tl.constexpr = ALIGNMENT // 8  # words are int64
    entry = tl.program_id(0).to(tl.int64)
    if entry >= tl.load(num_copies_ptr):
        return
    group = tl.load(copies_ptr + entry * 3).to(tl.int64)
    source = tl.load(copies_ptr + entry * 3 + 1).to(tl.int64)
    destination = tl.load(copies_ptr + entry * 3 + 2).to(tl.int64)
    if (group < 0) | (source < 0) | (destination <= NULL_BLOCK) | (source == destination):
        return
    stride = tl.load(group_bytes_ptr + group * 2)
    num_bytes = tl.load(group_bytes_ptr + group * 2 + 1)

    # The hints let a thread move 16 bytes at once. With an unaligned stride no word is moved.
    word_end = tl.multiple_of(tl.where(stride % ALIGNMENT == 0, num_bytes // ALIGNMENT, 0) * WORDS, WORDS)
    word_read_end = tl.multiple_of(tl.where(source == NULL_BLOCK, 0, word_end), WORDS)
    word_source = tl.multiple_of(source * (stride // 8), WORDS)
    word_destination = tl.multiple_of(destination * (stride // 8), WORDS)
    words_ptr = arena_ptr.to(tl.pointer_type(tl.int64))
    _copy_span(words_ptr, word_source, word_destination, 0, word_end, word_read_end, TILE_BYTES // 8)

    read_end = tl.where(source == NULL_BLOCK, 0, num_bytes)
    # What the words leave over is less than a tile when the stride is aligned, else all.
    _copy_span(arena_ptr, source * stride, destination * stride, word_end * 8, num_bytes, read_end, TILE_BYTES // 8)


def prepare_copy_blocks(
    arena: torch.Tensor, copies: torch.Tensor, num_copies: torch.Tensor, group_bytes: torch.Tensor
) -> Launch:
    """Check shapes, dtypes, alignment without a sync, then return the launch that `copy_blocks` runs.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError naming the argument, what was expected, what was given.
    """
    _check_shapes(arena, copies, num_copies, group_bytes)
    misaligned = arena.data_ptr() % _ALIGNMENT_BYTES
    expect(misaligned == 0, f"arena.data_ptr() % {_ALIGNMENT_BYTES}", 0, misaligned)
    num_entries = copies.shape[0]
    per_copy = min(_MAX_PROGRAMS_PER_COPY, max(_MIN_PROGRAMS_PER_COPY, _NUM_PROGRAMS // max(num_entries, 1)))
    # No block has more tiles than the arena.
    per_copy = min(per_copy, -(-arena.numel() // _TILE_BYTES))
    return Launch(
        name="copy_blocks",
        kernel=_copy_blocks_kernel,
        grid=(num_entries, per_copy, 1),
        args=(arena, copies, num_copies, group_bytes),
        options={
            "NULL_BLOCK": NULL_BLOCK_ID,
            "ALIGNMENT": _ALIGNMENT_BYTES,
            "TILE_BYTES": _TILE_BYTES,
            "num_warps": 4,
        },
    )


def copy_blocks(arena: torch.Tensor, copies: torch.Tensor, num_copies: torch.Tensor, group_bytes: torch.Tensor) -> None:
    """Copy blocks of all groups with one kernel launch; no sync, capturable.

    Shapes, dtypes: as in the module's contract.
    Raises: ValueError for a wrong shape, dtype, stride, alignment or device; ImportError without triton.
    """
    prepare_copy_blocks(arena, copies, num_copies, group_bytes).run()
