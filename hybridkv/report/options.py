"""What a plan is asked for."""

from dataclasses import dataclass

from hybridkv.errors import SpecError
from hybridkv.limits import BatchLimits
from hybridkv.specs import ModelSpec

USUAL_CONTEXTS = (8192, 32768, 131072)
DEFAULT_NUM_SEQS = 256
DEFAULT_NUM_BATCHED_TOKENS = 2048


@dataclass(frozen=True)
class PlanOptions:
    """What a plan is asked for; None leaves the choice to the planner.

    Attributes:
        contexts: lengths in tokens to report; one sequence of the longest must fit. None asks for the usual lengths
            and the model's own, and refuses nothing.
        max_model_len: tokens of the longest sequence; by default the model's.
        max_num_seqs: most sequences at once; None for as many as the memory holds, with tables for 256.
        max_num_batched_tokens: tokens of one step.
        block_size: tokens a block in every group of tokens.
    """

    contexts: tuple[int, ...] | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = DEFAULT_NUM_BATCHED_TOKENS
    block_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{name}: got {value}, expected at least 1")
        longest = max(self.contexts or (0,))
        if self.max_model_len is not None and longest > self.max_model_len:
            raise SpecError(
                f"context: got {longest}, beyond max_model_len={self.max_model_len}; ask for less or raise it"
            )

    def contexts_of(self, spec: ModelSpec) -> tuple[int, ...]:
        """Return the lengths to report for a model, sorted and distinct."""
        if self.contexts:
            return tuple(sorted(set(self.contexts)))
        most = self.max_model_len
        lengths = {*USUAL_CONTEXTS, *(length for length in (spec.max_model_len, most) if length is not None)}
        return tuple(sorted(length for length in lengths if most is None or length <= most))

    def limits_for(self, spec: ModelSpec) -> BatchLimits:
        """Return the batch that the tables are made for."""
        longest = max(*self.contexts_of(spec), self.max_model_len or spec.max_model_len or 1)
        return BatchLimits(self.max_num_seqs or DEFAULT_NUM_SEQS, longest, self.max_num_batched_tokens)


DEFAULT_PLAN_OPTIONS = PlanOptions()
