"""Exceptions raised by hybridkv.

Three families, so that a caller never has to read a message to decide what to do:

* the caller's mistake: subclasses of `ValueError` (or `ImportError`), state unchanged;
* expected under load: `OutOfBlocks`, `OutOfRows`, with the shortfall as attributes, state unchanged;
* our bug: `InvariantError`, never caught inside the library.
"""

from collections.abc import Mapping


class HybridKVError(Exception):
    """Base class of every exception of this library."""


class SpecError(HybridKVError, ValueError):
    """A layer spec, a model spec or a plan's input breaks a rule."""


class UnsupportedModel(SpecError):
    """A config describes a model whose caches cannot be derived or cannot be run."""


class InvalidRequest(HybridKVError, ValueError):
    """A request can never be served as asked, whatever the load."""


class CheckpointError(HybridKVError, ValueError):
    """A checkpoint folder or file cannot be used."""


class NeverFits(InvalidRequest):
    """A sequence needs more cache than the whole pool has.

    Attributes:
        shortfall: per group index, blocks missing if the sequence had the pool to itself.
    """

    def __init__(self, message: str, shortfall: Mapping[int, int]) -> None:
        super().__init__(message)
        self.shortfall = dict(shortfall)


class OutOfBlocks(HybridKVError):
    """The pool cannot lend what was asked for now; nothing was lent.

    Attributes:
        requested: per group index, blocks asked for.
        shortfall: per group index, blocks missing.
    """

    def __init__(self, requested: Mapping[int, int], shortfall: Mapping[int, int]) -> None:
        self.requested = dict(requested)
        self.shortfall = dict(shortfall)
        super().__init__(
            f"asked for blocks {self.requested} (by group), short of {self.shortfall}; free or preempt rows"
        )


class OutOfRows(HybridKVError):
    """Every row is taken."""

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        super().__init__(f"all {max_num_seqs} rows are taken; finish a sequence or raise max_num_seqs")


class InvariantError(HybridKVError):
    """The library broke one of its own laws: a bug, please report it."""
