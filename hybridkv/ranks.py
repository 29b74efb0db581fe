"""Plans of several ranks that share one scheduler: every block id must mean a block on every rank.

Tensor-parallel ranks keep alike caches, in memories that may differ; pipeline stages keep different layers. One table
serves them all, so they agree on groups, block sizes, parts of a state, blocks a slab, and on the smallest number of
slabs. Bytes are each rank's own:

    rank 0, 6 + 2 layers   | slab of 8 MiB | 8 MiB | 8 MiB |         block 7 of group 1 lies in slab 1 everywhere
    rank 1, 5 + 2 layers   | 7 MiB | 7 MiB | 7 MiB | (one more would fit)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import lcm

from hybridkv.errors import SpecError
from hybridkv.grouping import KVCacheGroup, group_layers
from hybridkv.limits import BatchLimits, KernelConstraints
from hybridkv.plan import CachePlan
from hybridkv.planner import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_KERNELS,
    block_sizes,
    build_plan,
    check_holds_a_sequence,
    check_plan,
    fitting_shapes,
)
from hybridkv.slab_search import BlockChoice, BlockShape, SlabChoice, choose_slab, slab_choices
from hybridkv.specs import LayerSpec, ModelSpec
from hybridkv.units import round_up

Groups = Sequence[KVCacheGroup]
_MAX_CANDIDATES = 200  # slabs to try on every rank


def split_layers(spec: ModelSpec, num_stages: int) -> tuple[ModelSpec, ...]:
    """Cut a model into pipeline stages of consecutive layers, as even as they go; layers keep their numbers.

    Raises: SpecError for a stage without a cache, or for a layer that shares the cache of another stage.
    """
    num_layers = spec.num_layers
    if not 1 <= num_stages <= num_layers:
        raise SpecError(f"num_stages: got {num_stages}, expected 1 to {num_layers}, the model's layers")
    bounds = [stage * num_layers // num_stages for stage in range(num_stages + 1)]
    stages = []
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        for layer in spec.layers[start:stop]:
            targets = [cache.shares_kv_with for cache in layer.caches if cache.shares_kv_with is not None]
            if any(target < start for target in targets):
                raise SpecError(
                    f"num_stages: got {num_stages}, layer {layer.layer} of stage {stage} shares the cache of layer "
                    f"{min(targets)} of another stage; use fewer stages"
                )
        layers = tuple(layer if start <= layer.layer < stop else LayerSpec(layer=layer.layer) for layer in spec.layers)
        if not any(cache.tensors for layer in layers for cache in layer.caches):
            raise SpecError(f"num_stages: got {num_stages}, stage {stage} has no cache; use fewer stages")
        stages.append(spec.model_copy(update={"layers": layers}))
    return tuple(stages)


def plan_ranks(
    specs: Sequence[ModelSpec],
    memory_bytes: Sequence[int],
    limits: BatchLimits,
    *,
    block_size: int | Mapping[int, int] = DEFAULT_BLOCK_SIZE,
    kernels: KernelConstraints = DEFAULT_KERNELS,
) -> tuple[CachePlan, ...]:
    """Plan one arena a rank, with equal groups, block sizes, parts, blocks a slab and number of slabs.

    A lifecycle that a rank has no layer of is an empty group there: its blocks take room, since they lie in slabs that
    another group cannot use meanwhile, and hold nothing.

    Args:
        specs: what each rank keeps: the same spec for tensor parallelism (`apply_options` makes it), the stages of
            `split_layers` for pipeline parallelism.
        memory_bytes: bytes of each rank's arena.

    Raises: SpecError as `plan_cache`.
    """
    if not specs or len(specs) != len(memory_bytes):
        raise SpecError(f"memory_bytes: got {len(memory_bytes)} for {len(specs)} ranks, expected one for each of them")
    lifecycles = list(dict.fromkeys(group.lifecycle for spec in specs for group in group_layers(spec)))
    groups = [group_layers(spec, lifecycles) for spec in specs]
    sizes = block_sizes(groups[0], block_size, kernels)
    slabs = _agree(groups, sizes, kernels)
    alone = []
    for rank, (spec, memory, slab) in enumerate(zip(specs, memory_bytes, slabs, strict=True)):
        alone.append(build_plan(spec, memory, limits, sizes, slab, groups[rank]))
        check_holds_a_sequence(f"memory of rank {rank}", alone[-1])
    smallest = min(plan.num_slabs for plan in alone)
    plans = []
    for rank, (plan, slab) in enumerate(zip(alone, slabs, strict=True)):
        agreed = build_plan(plan.spec, smallest * plan.slab_bytes, limits, sizes, slab, groups[rank])
        check_plan(agreed, kernels)
        plans.append(replace(agreed, memory_bytes=plan.memory_bytes))
    return tuple(plans)


def _agree(groups: Sequence[Groups], sizes: Sequence[int], kernels: KernelConstraints) -> list[SlabChoice]:
    """Return one slab a rank with equal parts and blocks a slab, in which the worst padding of all ranks is least.

    Candidates are the slabs that suit a rank with the largest blocks of each group; the first within the bound wins.
    """
    shapes = [
        [_shapes_by_parts(own, groups, size, kernels) for own, size in zip(rank, sizes, strict=True)] for rank in groups
    ]
    largest = [
        [
            BlockShape(parts, max(rank[group][parts] for rank in shapes))
            for parts in set.intersection(*(set(rank[group]) for rank in shapes))
        ]
        for group in range(len(sizes))
    ]
    exact = not any(group.is_state for group in groups[0])
    candidates = [choose_slab(largest, kernels, exact=exact)]
    candidates += slab_choices(largest, kernels, kernels.max_padding, _MAX_CANDIDATES)
    best: list[SlabChoice] = []
    for candidate in candidates:
        slabs = [_cut(candidate, rank, kernels) for rank in shapes]
        if not best or _worst_padding(slabs) < _worst_padding(best):
            best = slabs
        if _worst_padding(best) <= kernels.max_padding:
            break
    return best


def _shapes_by_parts(
    own: KVCacheGroup, ranks: Sequence[Groups], block_size: int, kernels: KernelConstraints
) -> dict[int, int]:
    """Return bytes a block by number of parts, for every number that divides the layers of some rank."""
    counts = [len(groups[own.group_id].caches) for groups in ranks]
    parts = [n for n in range(1, max(counts) + 1) if any(count and count % n == 0 for count in counts)]
    shapes = fitting_shapes(own, block_size, kernels, parts)
    return {shape.num_parts: shape.payload_bytes for shape in shapes}


def _cut(candidate: SlabChoice, payloads: Sequence[Mapping[int, int]], kernels: KernelConstraints) -> SlabChoice:
    """Return one rank's smallest slab that holds the candidate's blocks of every group."""
    counts = [candidate.slab_bytes // block.stride_bytes for block in candidate.blocks]
    own = [payload[block.num_parts] for payload, block in zip(payloads, candidate.blocks, strict=True)]
    largest = max(count * payload for count, payload in zip(counts, own, strict=True))
    slab_bytes = round_up(largest, kernels.alignment_bytes * lcm(*counts))
    blocks = (
        BlockChoice(block.num_parts, payload, slab_bytes // count)
        for block, payload, count in zip(candidate.blocks, own, counts, strict=True)
    )
    return SlabChoice(slab_bytes, tuple(blocks))


def _worst_padding(slabs: Sequence[SlabChoice]) -> float:
    return max(
        1 - block.payload_bytes / block.stride_bytes for slab in slabs for block in slab.blocks if block.payload_bytes
    )
