"""A model, a byte budget, limits become a `CachePlan` that wastes as little as the kernels allow."""

from collections.abc import Mapping, Sequence
from math import lcm

from hybridkv.errors import SpecError
from hybridkv.grouping import KVCacheGroup, group_layers
from hybridkv.limits import BatchLimits, KernelConstraints, Load
from hybridkv.plan import CachePlan, GroupPlan, SlotMappingMode
from hybridkv.retention import max_live_blocks, needed_bytes
from hybridkv.slab_search import BlockShape, SlabChoice, choose_slab
from hybridkv.specs import DTYPE_BYTES, ModelSpec
from hybridkv.units import INT32_MAX, INT64_MAX, check_integer, format_bytes

DEFAULT_KERNELS = KernelConstraints()
DEFAULT_BLOCK_SIZE = 16
_NUM_CANDIDATES = 5  # block sizes 16 to 256 where the kernels take them


def plan_cache(
    spec: ModelSpec,
    memory_bytes: int,
    limits: BatchLimits,
    *,
    block_size: int | Mapping[int, int] | None = None,
    kernels: KernelConstraints = DEFAULT_KERNELS,
    load: Load | None = None,
) -> CachePlan:
    """Plan the arena of `spec` in `memory_bytes`.

    Args:
        memory_bytes: bytes of the whole arena, the reserved slab included.
        block_size: tokens a block, for all groups or per group index; state groups take none. None lets the planner
            choose the one that wastes least under `load`.
        load: what the plan is for; by default sequences of the usual lengths up to `max_model_len`.

    Raises: SpecError if a block size is wrong, if a block is larger than the largest slab, if table entries or the
        kernels' indices would overflow, or if the memory holds no sequence. It says the numbers, and what would fit.
    """
    plan = describe_cache(spec, memory_bytes, limits, block_size=block_size, kernels=kernels, load=load)
    check_holds_a_sequence("memory", plan)
    return plan


def check_holds_a_sequence(name: str, plan: CachePlan) -> None:
    """Raise SpecError if a plan's memory holds no sequence at all; `name` is whose memory it is."""
    if plan.num_slabs < plan.min_num_slabs:
        least = plan.min_num_slabs * plan.slab_bytes
        raise SpecError(
            f"{name}: got {plan.memory_bytes} bytes, expected at least {least} ({format_bytes(least)}: "
            f"{plan.min_num_slabs} slabs of {format_bytes(plan.slab_bytes)}, one of null blocks, "
            f"{plan.min_num_slabs - 1} for one sequence's blocks)"
        )


def describe_cache(
    spec: ModelSpec,
    memory_bytes: int,
    limits: BatchLimits,
    *,
    block_size: int | Mapping[int, int] | None = None,
    kernels: KernelConstraints = DEFAULT_KERNELS,
    load: Load | None = None,
) -> CachePlan:
    """Return what `plan_cache` returns, also where the memory is too small to hold a sequence.

    Raises: SpecError as `plan_cache`, but for too little memory.
    """
    check_integer("memory", memory_bytes, 0)
    groups = group_layers(spec)
    candidates = [block_sizes(groups, block_size, kernels)] if block_size is not None else _candidates(groups, kernels)
    plans: list[CachePlan] = []
    problems: list[SpecError] = []
    for sizes in candidates:
        try:
            plan = build_plan(spec, memory_bytes, limits, sizes, _choose_slab(groups, sizes, kernels))
            check_plan(plan, kernels)
            plans.append(plan)
        except SpecError as error:
            problems.append(error)
    if not plans:
        raise problems[0]
    wanted = load or Load.up_to(limits.max_model_len)
    return min(plans, key=lambda plan: (planned_waste(plan, wanted), plan.slab_bytes))


def build_plan(
    spec: ModelSpec,
    memory_bytes: int,
    limits: BatchLimits,
    sizes: Sequence[int],
    slab: SlabChoice,
    groups: Sequence[KVCacheGroup] | None = None,
) -> CachePlan:
    """Return the plan in which group i has blocks of `sizes[i]` tokens, cut from `slab` as it says.

    `groups` are the spec's own unless ranks have agreed on others.
    """
    num_slabs = memory_bytes // slab.slab_bytes
    plans = []
    for group, size, blocks in zip(groups or group_layers(spec), sizes, slab.blocks, strict=True):
        per_slab = slab.slab_bytes // blocks.stride_bytes
        width = max_live_blocks(group.lifecycle, size, limits.max_model_len, limits.max_in_flight)
        plans.append(
            GroupPlan(
                group=group,
                mode=_mode_of(group),
                block_size=size,
                num_parts=blocks.num_parts,
                payload_bytes_per_block=blocks.payload_bytes,
                block_stride_bytes=blocks.stride_bytes,
                blocks_per_slab=per_slab,
                num_blocks=num_slabs * per_slab,
                table_width=blocks.num_parts if group.is_state else width,
                tensors=group.place_tensors(size, blocks.num_parts),
            )
        )
    return CachePlan(spec, limits, memory_bytes, slab.slab_bytes, num_slabs, tuple(plans))


def planned_waste(plan: CachePlan, load: Load) -> float:
    """Return the part of the memory that a load is expected to waste: what the planner minimises over block sizes.

    Counted are padding, sequence tails (half a block where lengths are arbitrary), the null blocks' slab, half a slab
    for each group's partly used one, and the tables' bytes on the device.
    """
    fixed = plan.slab_bytes + sum(plan.slab_bytes - group.block_stride_bytes for group in plan.groups) / 2
    fixed += plan.table_bytes
    wasted = 0.0
    for context in load.contexts:
        held = sum(group.expected_blocks(context) * group.block_stride_bytes for group in plan.groups)
        num_seqs = max(1.0, min((plan.memory_bytes - fixed) / held, load.max_num_seqs or INT32_MAX))
        wasted += 1 - num_seqs * needed_bytes(plan.spec, context) / (num_seqs * held + fixed)
    return wasted / len(load.contexts)


def block_shapes(group: KVCacheGroup, block_size: int, part_counts: Sequence[int] | None = None) -> list[BlockShape]:
    """Return the ways to make a group's blocks; a state may be cut into any number of equal runs of its layers."""
    num_caches = len(group.caches)
    if not group.is_state:
        counts: Sequence[int] = (1,)
    else:
        counts = part_counts or [parts for parts in range(1, num_caches + 1) if num_caches % parts == 0]
    shapes = []
    for num_parts in counts:
        placements = group.place_tensors(block_size, num_parts)
        shapes.append(BlockShape(num_parts, max((t.offset_bytes + t.num_bytes for t in placements), default=0)))
    return shapes


def fitting_shapes(
    group: KVCacheGroup, block_size: int, kernels: KernelConstraints, part_counts: Sequence[int] | None = None
) -> list[BlockShape]:
    """Return the block shapes that fit the largest slab.

    Raises: SpecError if none does, with the largest block size that would.
    """
    shapes = block_shapes(group, block_size, part_counts)
    most = kernels.max_slab_bytes // kernels.alignment_bytes * kernels.alignment_bytes
    fitting = [shape for shape in shapes if shape.payload_bytes <= most]
    if fitting:
        return fitting
    smallest = min(shape.payload_bytes for shape in shapes)
    problem = (
        f"block_size: group {group.group_id} ({group.lifecycle.kind}) has blocks of {format_bytes(smallest)}, "
        f"slabs hold at most {format_bytes(most)}"
    )
    if group.is_state:
        raise SpecError(f"{problem}; one layer's state is larger, raise max_slab_bytes")
    fits = _largest_block_size(group, most, kernels)
    raise SpecError(f"{problem}; use {f'a block_size of {fits}' if fits else 'a larger max_slab_bytes'}")


def _largest_block_size(group: KVCacheGroup, most_bytes: int, kernels: KernelConstraints) -> int:
    """Return the largest block size that the kernels take and a slab holds, 0 if there is none."""
    step = lcm(*(tensor.tokens_per_entry for cache in group.caches for tensor in cache.cache.tensors))
    bytes_per_step = block_shapes(group, step)[0].payload_bytes
    sizes = range(most_bytes // bytes_per_step * step, 0, -step)
    fitting = (size for size in sizes if kernels.takes_block_size(size))
    return next((size for size in fitting if block_shapes(group, size)[0].payload_bytes <= most_bytes), 0)


def _choose_slab(groups: Sequence[KVCacheGroup], sizes: Sequence[int], kernels: KernelConstraints) -> SlabChoice:
    shapes = [fitting_shapes(group, size, kernels) for group, size in zip(groups, sizes, strict=True)]
    return choose_slab(shapes, kernels, exact=not any(group.is_state for group in groups))


def _candidates(groups: Sequence[KVCacheGroup], kernels: KernelConstraints) -> list[tuple[int, ...]]:
    """Return the block sizes to choose from, one size for all groups of tokens so that prefixes end together."""
    tokens_per_entry = lcm(
        *(tensor.tokens_per_entry for group in groups for cache in group.caches for tensor in cache.cache.tensors)
    )
    smallest = kernels.smallest_block_size(DEFAULT_BLOCK_SIZE, tokens_per_entry)
    doubled = [smallest << doubling for doubling in range(_NUM_CANDIDATES)]
    return [tuple(1 if group.is_state else size for group in groups) for size in doubled]


def block_sizes(
    groups: Sequence[KVCacheGroup], block_size: int | Mapping[int, int] | None, kernels: KernelConstraints
) -> tuple[int, ...]:
    """Return each group's block size in tokens, 1 for a group of states; without one, the smallest to choose from.

    Raises: SpecError for one that is missing, that is no size or that the kernels do not take.
    """
    if block_size is None:
        return _candidates(groups, kernels)[0]
    if not isinstance(block_size, Mapping):
        block_size = {group.group_id: block_size for group in groups}
    if not set(block_size) <= set(range(len(groups))):
        raise SpecError(f"block_size: got groups {list(block_size)}, the model has groups 0..{len(groups) - 1}")
    return tuple(
        1 if group.is_state else kernels.check_block_size(group.group_id, block_size.get(group.group_id))
        for group in groups
    )


def check_plan(plan: CachePlan, kernels: KernelConstraints) -> None:
    """Raise SpecError if block ids would pass int32, or a layer's view what the kernels can index."""
    for group in plan.groups:
        name = f"group {group.group.group_id} ({group.group.lifecycle.kind})"
        if group.num_blocks > INT32_MAX:
            most = INT32_MAX // group.blocks_per_slab * plan.slab_bytes
            raise SpecError(
                f"memory: {name} would have {group.num_blocks} blocks, block tables hold int32 ids up to {INT32_MAX}; "
                f"use a larger block_size than {group.block_size} or at most {most} bytes ({format_bytes(most)})"
            )
        limit = INT64_MAX if kernels.max_tensor_elements is None else kernels.max_tensor_elements
        for tensor in group.tensors:
            elements = plan.arena_bytes // DTYPE_BYTES[tensor.dtype]
            if elements > limit:
                most = limit * DTYPE_BYTES[tensor.dtype] // plan.slab_bytes * plan.slab_bytes
                raise SpecError(
                    f"memory: layer {tensor.layer}'s {tensor.name!r} would span {elements} elements, the kernels "
                    f"address {limit}; use at most {most} bytes ({format_bytes(most)}) or kernels with 64-bit indices"
                )


def _mode_of(group: KVCacheGroup) -> SlotMappingMode:
    match group.lifecycle.kind:
        case "state" | "cross_attention":
            # The step's tokens are the decoder's: they have no slots among states or among a source's keys.
            return SlotMappingMode.NONE
        case "sliding_window" | "chunked_attention":
            return SlotMappingMode.SLIDING_WINDOW
        case _:
            return SlotMappingMode.FULL
