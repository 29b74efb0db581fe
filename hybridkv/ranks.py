"""Plans of several ranks that share one scheduler: every block id must mean a block on every rank.

Tensor-parallel ranks keep alike caches, in memories that may differ; pipeline stages keep different layers. One table
serves them all, so they agree on groups, block sizes, parts of a state, blocks a slab, and on the smallest number of
slabs. Bytes are each rank's own:

    rank 0, 6 + 2 layers   | slab of 8 MiB | 8 MiB | 8 MiB |         block 7 of group 1 lies in slab 1 everywhere
    rank 1, 5 + 2 layers   | 7 MiB | 7 MiB | 7 MiB | (one more would fit)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import exp, lcm, log

from hybridkv.errors import SpecError
from hybridkv.grouping import KVCacheGroup, group_layers
from hybridkv.limits import BatchLimits, KernelConstraints
from hybridkv.plan import CachePlan
from hybridkv.planner import (
    DEFAULT_KERNELS,
    block_sizes,
    build_plan,
    check_holds_a_sequence,
    check_plan,
    fitting_shapes,
)
from hybridkv.slab_search import BlockChoice, BlockShape, SlabChoice, choose_slab, slab_choices
from hybridkv.specs import LayerSpec, ModelSpec
from hybridkv.units import check_integer, round_up

Groups = Sequence[KVCacheGroup]
_MAX_CANDIDATES = 200  # slabs that suit the largest blocks, to try on every rank
_MAX_SCALE = 64  # blocks a slab of the largest ones, between the mixes of the ranks


def split_layers(spec: ModelSpec, num_stages: int) -> tuple[ModelSpec, ...]:
    """Cut a model into pipeline stages of consecutive layers, as even as they go; layers keep their numbers.

    Raises: SpecError for more stages than layers, for a stage without a cache, or for a layer that shares the cache of
        another stage.
    """
    num_layers = spec.num_layers
    check_integer("num_stages", num_stages, 1, num_layers)
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
        stages.append(spec.with_layers(layers))
    return tuple(stages)


def plan_ranks(
    specs: Sequence[ModelSpec],
    memory_bytes: Sequence[int],
    limits: BatchLimits,
    *,
    block_size: int | Mapping[int, int] | None = None,
    kernels: KernelConstraints = DEFAULT_KERNELS,
) -> tuple[CachePlan, ...]:
    """Plan one arena a rank, with equal groups, block sizes, parts, blocks a slab and number of slabs.

    A lifecycle that a rank has no layer of is an empty group there: its blocks take room, since they lie in slabs that
    another group cannot use meanwhile, and hold nothing.

    Args:
        specs: what each rank keeps: the same spec for tensor parallelism (`apply_options` makes it), the stages of
            `split_layers` for pipeline parallelism.
        memory_bytes: bytes of each rank's arena.
        block_size: as for `plan_cache`; None takes the smallest one of at least 16 tokens that suits model and kernels.

    Ranks of different mixes of layers pad, since their slabs hold equal numbers of blocks: see
    `GroupPlan.padding_fraction` of each.

    Raises: SpecError as `plan_cache`.
    """
    if not specs or len(specs) != len(memory_bytes):
        raise SpecError(f"memory_bytes: got {len(memory_bytes)} for {len(specs)} ranks, expected one for each of them")
    for rank, memory in enumerate(memory_bytes):
        check_integer(f"memory of rank {rank}", memory, 0)
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
    """Return one slab a rank with equal parts and blocks a slab; of the candidates, the one that pads least.

    What pads is the group whose share of a rank is small: no numbers of blocks suit ranks of different mixes. So the
    numbers tried go from the mix of the largest blocks to the one between the extremes of all ranks, and the first
    within the bound wins.
    """
    payloads = [
        [_payload_by_parts(own, groups, size, kernels) for own, size in zip(rank, sizes, strict=True)]
        for rank in groups
    ]
    shared_parts = [set.intersection(*(set(rank[group]) for rank in payloads)) for group in range(len(sizes))]
    largest = [
        [BlockShape(parts, max(rank[group][parts] for rank in payloads)) for parts in sorted(shared)]
        for group, shared in enumerate(shared_parts)
    ]
    exact = not any(group.is_state for group in groups[0])
    best: list[SlabChoice] = []
    for parts, counts in _candidates(largest, payloads, kernels, exact):
        own = [[payload[n] for payload, n in zip(rank, parts, strict=True)] for rank in payloads]
        slabs = [_cut(parts, counts, rank, kernels) for rank in own]
        if max(slab.slab_bytes for slab in slabs) > kernels.max_slab_bytes:
            continue
        if not best or _worst_padding(slabs) < _worst_padding(best):
            best = slabs
        if _worst_padding(best) <= kernels.max_padding:
            break
    return best


def _candidates(
    largest: Sequence[Sequence[BlockShape]],
    payloads: Sequence[Sequence[Mapping[int, int]]],
    kernels: KernelConstraints,
    exact: bool,
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield parts and blocks a slab of every group to try."""
    fitting = [choose_slab(largest, kernels, exact=exact)]
    fitting += slab_choices(largest, kernels, kernels.max_padding, _MAX_CANDIDATES)
    for slab in fitting:
        yield (
            tuple(block.num_parts for block in slab.blocks),
            tuple(slab.slab_bytes // block.stride_bytes for block in slab.blocks),
        )
    for shapes in product(*largest):
        parts = tuple(shape.num_parts for shape in shapes)
        weights = _middle_weights([[payload[n] for payload, n in zip(rank, parts, strict=True)] for rank in payloads])
        for scale in range(1, _MAX_SCALE + 1):
            yield parts, tuple(max(1, round(scale * weight)) for weight in weights)


def _middle_weights(payloads: Sequence[Sequence[int]]) -> list[float]:
    """Return blocks a slab, the fewest 1, by which no rank pads more than the rank most unlike it.

    In logarithms: a group takes the middle between its smallest and its largest share of a rank.
    """
    shares = []
    for rank in payloads:
        logs = [log(max(payload, 1)) for payload in rank]
        shares.append([own - sum(logs) / len(logs) for own in logs])
    middles = [(min(group) + max(group)) / 2 for group in zip(*shares, strict=True)]
    return [exp(max(middles) - middle) for middle in middles]


def _payload_by_parts(
    own: KVCacheGroup, ranks: Sequence[Groups], block_size: int, kernels: KernelConstraints
) -> dict[int, int]:
    """Return bytes a block by number of parts, for every number that divides the layers of some rank."""
    counts = [len(groups[own.group_id].caches) for groups in ranks]
    parts = [n for n in range(1, max(counts) + 1) if any(count and count % n == 0 for count in counts)]
    shapes = fitting_shapes(own, block_size, kernels, parts)
    return {shape.num_parts: shape.payload_bytes for shape in shapes}


def _cut(
    parts: Sequence[int], counts: Sequence[int], payloads: Sequence[int], kernels: KernelConstraints
) -> SlabChoice:
    """Return one rank's smallest slab that holds `counts` blocks of each group."""
    largest = max(count * payload for count, payload in zip(counts, payloads, strict=True))
    slab_bytes = round_up(largest, kernels.alignment_bytes * lcm(*counts))
    blocks = (
        BlockChoice(num_parts, payload, slab_bytes // count)
        for num_parts, payload, count in zip(parts, payloads, counts, strict=True)
    )
    return SlabChoice(slab_bytes, tuple(blocks))


def _worst_padding(slabs: Sequence[SlabChoice]) -> float:
    return max(slab.worst_padding for slab in slabs)
