"""Events that tell other processes, such as routers, what is cached: numbered, in batches, as JSON."""

from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

# An unsigned 64-bit integer: a JSON parser that rounds large numbers is not enough.
PrefixHash = Annotated[int, Field(ge=0, lt=2**64)]
LifecycleKind = Literal["full_attention", "sliding_window", "chunked_attention", "state"]
DEFAULT_MAX_EVENTS = 100_000


@dataclass(frozen=True)
class BlocksStored:
    """A group's blocks along a prefix can be shared from now on.

    Without a checkpoint these are whole units of the trunk. With one the group keeps what a sequence needs to go on at
    `checkpoint_position`; a hit there needs that of every windowed and state group, and of all groups where the
    checkpoint is no multiple of `unit_tokens`. What is stored covers the tokens
    `[start_position, start_position + len(hashes) * unit_tokens)` and, of a checkpoint, those up to it.

    Attributes:
        window_tokens: the window or the chunk; None for other lifecycles.
        block_size: tokens a block of the group; None for states.
        unit_tokens: tokens a hash stands for, a multiple of all block sizes.
        start_position: tokens before what is stored.
        hashes: hash of the prefix up to the end of each whole unit.
        parent_hash: hash of the prefix up to `start_position`; None at a sequence's beginning.
        token_ids: trunk: the units' tokens. Checkpoint: those behind the last whole unit.
        checkpoint_position: tokens before the checkpoint.
        checkpoint_hash: hash of the prefix up to there; at the end of a unit that unit's hash.
        salt: what parts this prefix from equal tokens, where that is text or an integer; the hashes depend on it.
        is_portable: whether whoever hashes the same tokens under the same salt as documented finds these hashes. Not
            with image or audio features on the prefix, nor under salts but None, integers, text, bytes and tuples.
    """

    group_id: int
    lifecycle: LifecycleKind
    window_tokens: int | None
    block_size: int | None
    unit_tokens: int
    start_position: int
    hashes: tuple[PrefixHash, ...]
    parent_hash: PrefixHash | None
    token_ids: tuple[int, ...]
    checkpoint_position: int | None
    checkpoint_hash: PrefixHash | None
    salt: int | str | None
    is_portable: bool
    kind: Literal["blocks_stored"] = "blocks_stored"


@dataclass(frozen=True)
class BlocksRemoved:
    """A group's blocks can no longer be shared.

    Attributes:
        hashes: units of the trunk; empty for a checkpoint, whose window blocks may still serve other checkpoints.
        checkpoint_position, checkpoint_hash: as in `BlocksStored`, None for units.
    """

    group_id: int
    lifecycle: LifecycleKind
    hashes: tuple[PrefixHash, ...]
    checkpoint_position: int | None
    checkpoint_hash: PrefixHash | None
    kind: Literal["blocks_removed"] = "blocks_removed"


@dataclass(frozen=True)
class AllCleared:
    """Nothing that was reported before counts: what is cached now follows."""

    kind: Literal["all_cleared"] = "all_cleared"


CacheEvent = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True)
class EventBatch:
    """Consecutive events.

    Attributes:
        first_sequence: the first event's number, each later one's is one more. A gap to the batch before tells that
            events were lost: the next event is then `AllCleared`.
        version: of this format; it rises when a field changes its meaning.
    """

    first_sequence: int
    events: tuple[Annotated[CacheEvent, Field(discriminator="kind")], ...]
    version: Literal[1] = 1


class EventLog:
    """Events that nobody has taken yet, at most so many: of too many none is kept, and whoever takes them is told.

    Attributes:
        has_lost: whether events were lost since the last `drain`.
    """

    def __init__(self, max_events: int = DEFAULT_MAX_EVENTS) -> None:
        if max_events < 1:
            raise ValueError(f"max_events: got {max_events}, expected at least 1")
        self._max_events = max_events
        self._events: deque[CacheEvent] = deque()
        self._first = 0
        self.has_lost = False

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: CacheEvent) -> None:
        """Append an event; where there is no room for it, all are lost."""
        if self.has_lost:
            self._first += 1
        elif len(self._events) == self._max_events:
            self._first += len(self._events) + 1
            self._events.clear()
            self.has_lost = True
        else:
            self._events.append(event)

    def drain(self) -> EventBatch:
        """Return the events since the last call, or none of them if some were lost."""
        batch = EventBatch(self._first, tuple(self._events))
        self._first += len(self._events)
        self._events.clear()
        self.has_lost = False
        return batch

    def restart(self, events: list[CacheEvent]) -> EventBatch:
        """Return `AllCleared` and the events that tell all that is cached now, in place of what nobody has taken."""
        self._first += len(self._events)
        self._events = deque([AllCleared(), *events])
        return self.drain()


def to_json(batch: EventBatch) -> str:
    """Return a batch as one line of JSON: the fields of the classes above, by name."""
    return _adapter().dump_json(batch).decode()


def from_json(text: str | bytes) -> EventBatch:
    """Return the batch that `to_json` wrote.

    Raises: ValidationError, a ValueError, for any other text; unknown fields are ignored.
    """
    return _adapter().validate_json(text, strict=True)


def json_schema() -> dict[str, object]:
    """Return the JSON schema of a batch."""
    return _adapter().json_schema(mode="serialization")


@cache
def _adapter() -> TypeAdapter[EventBatch]:
    return TypeAdapter(EventBatch)
