"""Which plan the options describe, how much memory or which context would do."""

from dataclasses import replace

from hybridkv.capacity import blocks_of, longest_context
from hybridkv.limits import Load
from hybridkv.plan import CachePlan
from hybridkv.planner import describe_cache
from hybridkv.report.options import DEFAULT_PLAN_OPTIONS, PlanOptions
from hybridkv.specs import ModelSpec
from hybridkv.units import cdiv


def make_plan(spec: ModelSpec, memory_bytes: int, options: PlanOptions = DEFAULT_PLAN_OPTIONS) -> CachePlan:
    """Return the plan that `options` describe, also where the memory holds no sequence.

    Raises: SpecError if a block size does not suit the model or indices would overflow.
    """
    load = Load(options.contexts_of(spec), options.max_num_seqs)
    return describe_cache(spec, memory_bytes, options.limits_for(spec), block_size=options.block_size, load=load)


def least_memory(spec: ModelSpec, memory_bytes: int, options: PlanOptions, context: int, num_seqs: int = 1) -> int:
    """Return the least bytes in which the planner holds `num_seqs` sequences of `context` tokens.

    One byte less does not do. The planner may choose other blocks in another memory, so what a plan needs is planned
    again, and the boundary halved where that does not hold. `memory_bytes` is where the search starts.
    """

    def needed(num_bytes: int) -> int:
        plan = make_plan(spec, num_bytes, options)
        blocks = blocks_of(plan, context, num_seqs).tolist()
        num_slabs = 1 + sum(cdiv(count, g.blocks_per_slab) for count, g in zip(blocks, plan.groups, strict=True))
        return num_slabs * plan.slab_bytes

    low, high = 0, memory_bytes
    while (hint := needed(high)) > high:
        low, high = high, hint
    while high - low > 1:
        probe = hint if low < hint < high else (low + high) // 2
        hint = needed(probe)
        if hint > probe:
            low = probe
        else:
            high, hint = probe, min(hint, probe - 1)
    return high


def longest_fitting(spec: ModelSpec, memory_bytes: int, options: PlanOptions, below: int) -> int:
    """Return the longest context below `below` of which the planner holds a sequence when asked for it; 0 if none.

    One token more does not fit. The planner may choose other blocks for another context, so what fits in a plan is
    planned again, and the boundary halved where that does not hold.
    """

    def longest(context: int) -> int:
        return longest_context(make_plan(spec, memory_bytes, replace(options, contexts=(context,))), 1)

    low, high, hint = 0, below, longest(below)
    while high - low > 1:
        probe = hint if low < hint < high else (low + high) // 2
        hint = longest(probe)
        if hint < probe:
            high = probe
        else:
            low, hint = probe, max(hint, probe + 1)
    return low
