"""What a plan must respect: the batch, the kernels, the load it is made for."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

from hybridkv.errors import SpecError
from hybridkv.units import INT32_MAX, check_integer, round_up

BLOCK_ALIGNMENT_BYTES = 128
MAX_SLAB_BYTES = 64 * 2**20
MAX_PADDING = 0.005
_MAX_ALIGNMENT_BYTES = 2**20
_MAX_UNITS = 2**24  # of alignment in a slab: the search keeps a flag for each


@dataclass(frozen=True)
class BatchLimits:
    """The largest batch the tables are made for.

    Attributes:
        max_num_seqs: rows of every table.
        max_model_len: tokens of the longest sequence.
        max_num_batched_tokens: tokens of one step, hence the most one row schedules.
        max_unsettled_tokens: tokens a row may have in flight beside those of the current step.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_unsettled_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens"):
            check_integer(name, getattr(self, name), 1, INT32_MAX)
        check_integer("max_unsettled_tokens", self.max_unsettled_tokens, 0, INT32_MAX)

    @property
    def max_in_flight(self) -> int:
        """Tokens a row may have scheduled or unsettled at once."""
        return min(self.max_num_batched_tokens, self.max_model_len) + self.max_unsettled_tokens

    @property
    def decode_in_flight(self) -> int:
        """Tokens a decoding row has scheduled or unsettled at once."""
        return 1 + self.max_unsettled_tokens


@dataclass(frozen=True)
class KernelConstraints:
    """What the kernels that read the caches can take.

    Attributes:
        block_size_multiple: block sizes of token groups are multiples of it.
        block_size_power_of_two: block sizes of token groups are powers of two.
        alignment_bytes: every block starts at a multiple of it.
        max_tensor_elements: most elements between the first and the last of one layer's view, for kernels that index
            with 32 bits; None for kernels with 64-bit arithmetic, like this library's.
        max_slab_bytes: largest slab.
        max_padding: part of a slab that may go unused in any group. Where no slab can do with it, the planner doubles
            it until one can; `GroupPlan.padding_fraction` says what came of it.
    """

    block_size_multiple: int = 1
    block_size_power_of_two: bool = False
    alignment_bytes: int = BLOCK_ALIGNMENT_BYTES
    max_tensor_elements: int | None = None
    max_slab_bytes: int = MAX_SLAB_BYTES
    max_padding: float = MAX_PADDING

    def __post_init__(self) -> None:
        check_integer("block_size_multiple", self.block_size_multiple, 1, INT32_MAX)
        check_integer("alignment_bytes", self.alignment_bytes, 1, _MAX_ALIGNMENT_BYTES)
        if self.alignment_bytes & (self.alignment_bytes - 1) or self.alignment_bytes % 4:
            # Tensors of all dtypes share a block, so it must start where the widest of them may.
            raise SpecError(f"alignment_bytes: got {self.alignment_bytes}, expected a power of two of at least 4")
        check_integer("max_slab_bytes", self.max_slab_bytes, self.alignment_bytes, _MAX_UNITS * self.alignment_bytes)
        if not isinstance(self.block_size_power_of_two, bool):
            raise SpecError(f"block_size_power_of_two: got {self.block_size_power_of_two!r}, expected true or false")
        if self.max_tensor_elements is not None:
            check_integer("max_tensor_elements", self.max_tensor_elements, 1, 2**63 - 1)
        number = isinstance(self.max_padding, int | float) and not isinstance(self.max_padding, bool)
        if not number or not 0 <= self.max_padding < 1:
            raise SpecError(f"max_padding: got {self.max_padding!r}, expected a fraction from 0 to below 1")

    def check_block_size(self, group_id: int, block_size: object) -> int:
        """Return a group's block size in tokens if the kernels take it.

        Raises: SpecError with the nearest one they take.
        """
        if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
            raise SpecError(f"block_size: got {block_size!r} for group {group_id}, expected at least 1 token a block")
        if not self.takes_block_size(block_size):
            rule = f"a multiple of {self.block_size_multiple}"
            if self.block_size_power_of_two:
                rule += " that is a power of two"
            nearest = self.smallest_block_size(block_size)
            raise SpecError(f"block_size: got {block_size} for group {group_id}, kernels take {rule}; use {nearest}")
        return block_size

    def takes_block_size(self, block_size: int) -> bool:
        """Return whether the kernels can work on blocks of so many tokens."""
        is_power = block_size & (block_size - 1) == 0
        return block_size % self.block_size_multiple == 0 and (is_power or not self.block_size_power_of_two)

    def smallest_block_size(self, at_least: int, multiple_of: int = 1) -> int:
        """Return the smallest block size the kernels take that is a multiple of `multiple_of`.

        Raises: SpecError if there is none.
        """
        step = lcm(self.block_size_multiple, multiple_of)
        size = round_up(at_least, step)
        while self.block_size_power_of_two and size & (size - 1):
            size = round_up(1 << size.bit_length(), step)
            if size > INT32_MAX:
                raise SpecError(f"block_size: got power_of_two, no power of two is a multiple of {step}")
        return size


@dataclass(frozen=True)
class Load:
    """The sequences a plan is made for.

    Attributes:
        contexts: lengths in tokens, equally often.
        max_num_seqs: most sequences at once; None for as many as the memory holds.
    """

    contexts: tuple[int, ...]
    max_num_seqs: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.contexts, tuple) or not self.contexts:
            raise SpecError(f"contexts: got {self.contexts!r}, expected a tuple of at least one length in tokens")
        for context in self.contexts:
            check_integer("contexts", context, 1, INT32_MAX)
        if self.max_num_seqs is not None:
            check_integer("max_num_seqs", self.max_num_seqs, 1, INT32_MAX)

    @classmethod
    def up_to(cls, max_model_len: int, contexts: Iterable[int] = (8192, 32768, 131072)) -> "Load":
        """Return the usual lengths below `max_model_len`, or that length where all are longer."""
        return cls(tuple(context for context in contexts if context <= max_model_len) or (max_model_len,))
