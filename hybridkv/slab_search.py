"""The smallest slab that every group cuts into equal blocks with little padding.

With sizes in units of the alignment: a group whose block holds p units may use any stride d with
`p <= d <= p / (1 - bound)`, and a slab of U units suits it exactly if U is a multiple of one of these strides. So each
group marks the multiples of its strides, and the first U that all groups marked is the answer:

    U          1  2  3  4  5  6  7  8  9  10 11 12
    p = 3      .  .  x  .  .  x  .  .  x  .  .  x      strides {3}
    p = 4      .  .  .  x  .  .  .  x  .  .  .  x      strides {4}           slab: 12 units, 4 and 3 blocks

A group of states may be cut over its layers into parts; it marks the strides of every number of parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridkv.limits import KernelConstraints
from hybridkv.units import cdiv

_SEARCHED_FIRST = (16, 4, 1)  # parts of the range of slabs
_MIN_PADDING, _MAX_PADDING = 2**-10, 0.25  # between them the search doubles its bound


@dataclass(frozen=True)
class BlockShape:
    """One way to make a group's blocks: how many parts a sequence's state is cut into, and bytes a block."""

    num_parts: int
    payload_bytes: int


@dataclass(frozen=True)
class BlockChoice:
    """A group's blocks in the chosen slab."""

    num_parts: int
    payload_bytes: int
    stride_bytes: int


@dataclass(frozen=True)
class SlabChoice:
    """A slab and, in the order of the groups, how each cuts it."""

    slab_bytes: int
    blocks: tuple[BlockChoice, ...]

    @property
    def worst_padding(self) -> float:
        """Largest part of the slab that goes unused in a group that stores anything."""
        return max(1 - block.payload_bytes / block.stride_bytes for block in self.blocks if block.payload_bytes)


def slab_choices(
    shapes: Sequence[Sequence[BlockShape]], kernels: KernelConstraints, max_padding: float, most: int = 1
) -> list[SlabChoice]:
    """Return up to `most` slabs, smallest first, in which no group pads more than `max_padding`; maybe none.

    `shapes` lists for each group the block shapes to choose from; the one that pads least is taken, and of equal ones
    the one of fewest parts.
    """
    unit = kernels.alignment_bytes
    slabs: NDArray[np.int64] = np.empty(0, dtype=np.int64)
    for part in _SEARCHED_FIRST:  # most answers are small, so the first part of the range is searched alone first
        slabs = _suitable_slabs(shapes, unit, max_padding, kernels.max_slab_bytes // unit // part)
        if len(slabs) >= most:
            break
    return [
        SlabChoice(slab * unit, tuple(_best_blocks(group_shapes, slab, unit, max_padding) for group_shapes in shapes))
        for slab in slabs[:most].tolist()
    ]


def _suitable_slabs(
    shapes: Sequence[Sequence[BlockShape]], unit: int, max_padding: float, num_units: int
) -> NDArray[np.int64]:
    """Return every slab of up to `num_units` units that suits all groups, smallest first."""
    suits_all = np.ones(num_units + 1, dtype=np.bool_)
    suits_all[0] = False
    for group_shapes in shapes:
        suits = np.zeros(num_units + 1, dtype=np.bool_)
        for shape in group_shapes:
            for stride in _strides(shape, unit, max_padding, num_units):
                suits[stride::stride] = True
        suits_all &= suits
    slabs: NDArray[np.int64] = np.flatnonzero(suits_all)
    return slabs


def choose_slab(shapes: Sequence[Sequence[BlockShape]], kernels: KernelConstraints, *, exact: bool) -> SlabChoice:
    """Return the smallest slab within `kernels.max_padding`, or within the smallest doubling of it that has any.

    With `exact`, a slab without padding is taken if there is one. Past a quarter, the slab is one block of the group
    whose blocks are largest. Every group needs a shape that fits the largest slab.
    """
    bounds = [0.0, kernels.max_padding] if exact else [kernels.max_padding]
    while bounds[-1] <= _MAX_PADDING / 2:
        bounds.append(max(2 * bounds[-1], _MIN_PADDING))
    found = (slab_choices(shapes, kernels, bound) for bound in bounds)
    return next((choices[0] for choices in found if choices), None) or _one_block_slab(shapes, kernels)


def _one_block_slab(shapes: Sequence[Sequence[BlockShape]], kernels: KernelConstraints) -> SlabChoice:
    unit = kernels.alignment_bytes
    smallest = [min(group_shapes, key=lambda shape: shape.payload_bytes) for group_shapes in shapes]
    units = [max(1, cdiv(shape.payload_bytes, unit)) for shape in smallest]
    slab = max(units)
    strides = [next(stride for stride in range(own, slab + 1) if slab % stride == 0) for own in units]
    return SlabChoice(
        slab * unit,
        tuple(
            BlockChoice(shape.num_parts, shape.payload_bytes, stride * unit)
            for shape, stride in zip(smallest, strides, strict=True)
        ),
    )


def _strides(shape: BlockShape, unit: int, max_padding: float, num_units: int) -> range:
    least = max(1, cdiv(shape.payload_bytes, unit))
    most = int(shape.payload_bytes / (1 - max_padding) / unit)
    return range(least, min(most, num_units) + 1)


def _best_blocks(shapes: Sequence[BlockShape], slab: int, unit: int, max_padding: float) -> BlockChoice:
    choices = [
        BlockChoice(shape.num_parts, shape.payload_bytes, stride * unit)
        for shape in shapes
        for stride in _strides(shape, unit, max_padding, slab)
        if slab % stride == 0
    ]
    return max(choices, key=lambda choice: (choice.payload_bytes / choice.stride_bytes, -choice.num_parts))
