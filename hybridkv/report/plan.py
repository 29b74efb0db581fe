"""What a memory holds of a model: groups, capacity, waste, other layouts beside ours."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from hybridkv.capacity import Waste, max_concurrency, measure_waste, mixed_capacity
from hybridkv.errors import SpecError
from hybridkv.layouts import LayoutCapacity, LayoutName, compare_layouts
from hybridkv.lengths import RequestLength
from hybridkv.plan import CachePlan, GroupPlan
from hybridkv.planner import DEFAULT_BLOCK_SIZE
from hybridkv.report.document import HIDDEN, OPTIONAL, Json, to_dict
from hybridkv.report.options import DEFAULT_PLAN_OPTIONS, PlanOptions
from hybridkv.report.search import least_memory, longest_fitting, make_plan
from hybridkv.specs import ModelSpec
from hybridkv.units import format_bytes

LAYOUT_NAMES: dict[LayoutName, str] = {
    "uniform": "uniform",
    "one_page_size": "one page size",
    "static_partition": "static partition",
    "lcm_pages": "LCM pages",
    "hybridkv": "hybridkv",
}
"""The layouts as people read them, in the order of the reports."""


@dataclass(frozen=True)
class GroupReport:
    """One KV cache group of a plan; the fields are those of `GroupPlan`, what does not apply is None."""

    lifecycle: str
    window: int | None = field(default=None, metadata=OPTIONAL)
    chunk: int | None = field(default=None, metadata=OPTIONAL)
    family: str | None = field(default=None, metadata=OPTIONAL)
    max_source_tokens: int | None = field(default=None, metadata=OPTIONAL)
    num_layers: int = 0
    block_size: int = 0
    num_parts: int = 0
    payload_bytes_per_block: int = 0
    block_stride_bytes: int = 0
    blocks_per_slab: int = 0
    padding_fraction: float = 0.0
    num_blocks: int = 0
    table_width: int = 0


@dataclass(frozen=True)
class ContextCapacity:
    """How many sequences of `context` tokens run at once; `num_tokens` is the product of both."""

    context: int
    max_concurrency: int
    num_tokens: int


@dataclass(frozen=True)
class MixedLoad:
    """How many requests of a trace fit at once, each at its full length, over many places of the trace to start from.

    Attributes:
        num_requests: requests of the trace that were counted.
        num_too_long: requests beyond `max_model_len`, left out.
    """

    num_requests: int
    num_too_long: int
    min_concurrency: int
    mean_concurrency: float
    max_concurrency: int
    mean_tokens: float


@dataclass(frozen=True)
class PlanReport:
    """What a plan holds, where its memory goes.

    Attributes:
        capacity: per context, shortest first.
        waste: for each context of which at least one sequence runs.
        layouts: per context the other engines' layouts, then `hybridkv`: what the memory holds, whatever the limit of
            sequences.
        mixed: None without a trace.
        plan: what all of it was measured on.
    """

    model: str
    memory_bytes: int
    slab_bytes: int
    num_slabs: int
    groups: tuple[GroupReport, ...]
    capacity: tuple[ContextCapacity, ...]
    waste: tuple[Waste, ...]
    layouts: tuple[LayoutCapacity, ...]
    mixed: MixedLoad | None = field(default=None, metadata=OPTIONAL)
    plan: CachePlan = field(kw_only=True, repr=False, metadata=HIDDEN)

    def to_dict(self) -> dict[str, Json]:
        """Return the object that `hybridkv plan --json` prints."""
        return to_dict(self)


def plan_report(
    spec: ModelSpec,
    memory_bytes: int,
    options: PlanOptions = DEFAULT_PLAN_OPTIONS,
    trace: Sequence[RequestLength] = (),
) -> PlanReport:
    """Plan `spec` in `memory_bytes` of cache, then measure what fits.

    Raises: SpecError if `options.contexts` are given and no sequence of the longest fits, with the memory that would do
        and the longest context that fits; if a block size does not suit the model; if the trace has no request that
        `max_model_len` admits.
    """
    plan = make_plan(spec, memory_bytes, options)
    contexts = options.contexts_of(spec)
    if options.contexts and max_concurrency(plan, contexts[-1]) == 0:
        raise SpecError(_too_small(plan, options, contexts[-1]))
    report = measure_plan(plan, contexts, options.max_num_seqs)
    return replace(report, mixed=_measure_trace(plan, trace)) if trace else report


def compare_reports(
    specs: Iterable[ModelSpec], memory_bytes: int, options: PlanOptions = DEFAULT_PLAN_OPTIONS
) -> list[PlanReport]:
    """Return the report of each model in the same memory; a context that does not fit is reported, never refused."""
    return [
        measure_plan(make_plan(spec, memory_bytes, options), options.contexts_of(spec), options.max_num_seqs)
        for spec in specs
    ]


def measure_plan(plan: CachePlan, contexts: Sequence[int], max_num_seqs: int | None = None) -> PlanReport:
    """Return what a plan holds of sequences of each context, at most `max_num_seqs` of them."""
    held = {context: max_concurrency(plan, context) for context in contexts}
    capped = {context: min(count, max_num_seqs or count) for context, count in held.items()}
    block_size = next((group.block_size for group in plan.groups if not group.group.is_state), DEFAULT_BLOCK_SIZE)
    layouts: list[LayoutCapacity] = []
    for context in contexts:
        if plan.memory_bytes:
            layouts += compare_layouts(
                plan.spec,
                plan.memory_bytes,
                [context],
                block_size=block_size,
                max_in_flight=plan.limits.max_in_flight,
            )
        layouts.append(_own_layout(plan, context, held[context], block_size))
    return PlanReport(
        model=plan.spec.name,
        memory_bytes=plan.memory_bytes,
        slab_bytes=plan.slab_bytes,
        num_slabs=plan.num_slabs,
        groups=tuple(map(_group_report, plan.groups)),
        capacity=tuple(ContextCapacity(context, count, context * count) for context, count in capped.items()),
        waste=tuple(measure_waste(plan, context, count) for context, count in capped.items() if count),
        layouts=tuple(layouts),
        plan=plan,
    )


def _too_small(plan: CachePlan, options: PlanOptions, context: int) -> str:
    least = least_memory(plan.spec, plan.memory_bytes, options, context)
    longest = longest_fitting(plan.spec, plan.memory_bytes, options, context)
    fits = f"the longest context that fits is {longest} tokens" if longest else "no shorter one fits either"
    return (
        f"memory: got {format_bytes(plan.memory_bytes)} for caches, one sequence of {context} tokens takes at least "
        f"{least} bytes ({format_bytes(least)}); {fits}"
    )


def _measure_trace(plan: CachePlan, trace: Sequence[RequestLength]) -> MixedLoad:
    longest = plan.limits.max_model_len
    lengths = [request.num_tokens for request in trace if request.num_tokens <= longest]
    if not lengths:
        raise SpecError(
            f"trace: all {len(trace)} requests are longer than max_model_len={longest}; raise it, the shortest has "
            f"{min(request.num_tokens for request in trace)} tokens"
        )
    mixed = mixed_capacity(plan, lengths)
    return MixedLoad(
        num_requests=len(lengths),
        num_too_long=len(trace) - len(lengths),
        min_concurrency=mixed.min_concurrency,
        mean_concurrency=mixed.mean_concurrency,
        max_concurrency=mixed.max_concurrency,
        mean_tokens=mixed.mean_tokens,
    )


def _own_layout(plan: CachePlan, context: int, num_seqs: int, block_size: int) -> LayoutCapacity:
    waste = measure_waste(plan, context, num_seqs) if num_seqs else None
    note = ""
    if waste is None:
        note = f"one sequence takes {format_bytes((1 + plan.slabs_for(context)) * plan.slab_bytes)}"
    return LayoutCapacity(
        layout="hybridkv",
        context=context,
        max_concurrency=num_seqs,
        num_tokens=num_seqs * context,
        held_bytes=waste.held_bytes if waste else 0,
        needed_bytes=waste.needed_bytes if waste else 0,
        block_size=block_size,
        note=note,
    )


def _group_report(group: GroupPlan) -> GroupReport:
    lifecycle = group.group.lifecycle
    return GroupReport(
        lifecycle=lifecycle.kind,
        **lifecycle.model_dump(exclude={"kind"}),
        num_layers=group.group.num_layers,
        block_size=group.block_size,
        num_parts=group.num_parts,
        payload_bytes_per_block=group.payload_bytes_per_block,
        block_stride_bytes=group.block_stride_bytes,
        blocks_per_slab=group.blocks_per_slab,
        padding_fraction=group.padding_fraction,
        num_blocks=group.num_blocks,
        table_width=group.table_width,
    )
