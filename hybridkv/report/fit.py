"""The largest context with the concurrency that a memory holds of a model."""

from dataclasses import dataclass, field, replace

from hybridkv.capacity import longest_context, max_concurrency
from hybridkv.errors import SpecError
from hybridkv.plan import CachePlan
from hybridkv.report.document import HIDDEN, Json, to_dict
from hybridkv.report.options import DEFAULT_PLAN_OPTIONS, PlanOptions
from hybridkv.report.search import least_memory, make_plan
from hybridkv.specs import ModelSpec
from hybridkv.units import format_bytes


@dataclass(frozen=True)
class FitReport:
    """What fits, with the flags of the command line that say so.

    Attributes:
        max_model_len: the longest context, up to the model's length or the one asked for.
        max_num_seqs: sequences of that context that run at once.
        flags: what to pass to `hybridkv plan` or `hybridkv run` beside the memory.
        plan: made with those flags.
    """

    model: str
    memory_bytes: int
    max_model_len: int
    max_num_seqs: int
    flags: tuple[str, ...]
    plan: CachePlan = field(kw_only=True, repr=False, metadata=HIDDEN)

    def to_dict(self) -> dict[str, Json]:
        """Return the object that `hybridkv fit --json` prints."""
        return to_dict(self)


def fit_report(spec: ModelSpec, memory_bytes: int, options: PlanOptions = DEFAULT_PLAN_OPTIONS) -> FitReport:
    """Return the longest context of which `memory_bytes` hold one sequence, and how many of them.

    With `options.max_num_seqs` it is the longest context of which that many fit. `options.contexts` are not used.

    Raises: SpecError if nothing fits, with the least memory that would do; if neither the model nor the options say how
        long a sequence may be.
    """
    most = options.max_model_len or spec.max_model_len
    if most is None:
        raise SpecError(f"max_model_len: {spec.name} names no longest sequence; give one")
    num_seqs = options.max_num_seqs or 1
    widest = replace(options, contexts=(most,), max_model_len=most)
    plan = make_plan(spec, memory_bytes, widest)
    context = longest_context(plan, num_seqs)
    if not context:
        least = least_memory(spec, memory_bytes, widest, 1, num_seqs)
        raise SpecError(
            f"memory: got {format_bytes(memory_bytes)} for caches, which hold not one token of {num_seqs} "
            f"sequence{'s' * (num_seqs > 1)}; use at least {least} bytes ({format_bytes(least)})"
        )
    # With the block size chosen, a shorter longest sequence leaves the slabs as they are.
    block_size = next((group.block_size for group in plan.groups if not group.group.is_state), None)
    fitting = replace(options, contexts=(context,), max_model_len=context, block_size=block_size)
    plan = make_plan(spec, memory_bytes, fitting)
    num_seqs = options.max_num_seqs or max_concurrency(plan, context)
    flags = {"--max-model-len": context, "--max-num-seqs": num_seqs, "--block-size": block_size}
    return FitReport(
        model=spec.name,
        memory_bytes=memory_bytes,
        max_model_len=context,
        max_num_seqs=num_seqs,
        flags=tuple(part for flag, value in flags.items() if value is not None for part in (flag, str(value))),
        plan=plan,
    )
