"""The requests of a stamped world, and what is in flight for them."""

from dataclasses import dataclass, field

from hybridkv.arena import ArenaLayout
from hybridkv.resume_policy import ResumePolicy
from hybridkv.row_lengths import RowState
from tests.world_content import Content
from tests.world_memory import MIXED_SIZES, CopyBlocks, Written


@dataclass(frozen=True)
class WorldConfig:
    """A world's shape.

    Attributes:
        lifecycles: groups, as numbers of `world_memory.LIFECYCLES`.
        is_async: launch a step before the one before it has settled.
        host_slabs: memory for swapped requests, in slabs.
        defer: how often copies wait for the next verb's, though no forward pass needs them yet.
        copy: how the slab layout copies blocks; one memory copy a block by default.
    """

    lifecycles: tuple[int, ...] = (0, 1, 2, 3)
    block_sizes: tuple[int, ...] = MIXED_SIZES
    num_slabs: int = 30
    layout: ArenaLayout = "slab"
    is_async: bool = False
    prefix_caching: bool = True
    policy: ResumePolicy = field(default_factory=ResumePolicy)
    watermark: float = 0.0
    host_slabs: int = 12
    defer: float = 0.3
    copy: CopyBlocks | None = None


@dataclass(eq=False)
class Request:
    """One request, and the lengths that the manager should see."""

    number: int
    content: Content
    row: int
    has_ids: bool
    state: RowState = RowState.RUNNING
    epoch: int = 0  # how often it lost its blocks: tells what is in flight for it from what no longer is
    computed: int = 0
    settled: int = 0
    committed: int = 0
    checkpoint: int | None = None
    num_prompt: int = 0

    def __post_init__(self) -> None:
        self.num_prompt = len(self.content)


@dataclass
class Entry:
    """What a launched step computes for one request: `count` tokens from `start` on; less once some are taken back."""

    request: Request
    epoch: int
    start: int
    count: int
    num_accepted: int

    @property
    def is_live(self) -> bool:
        """Whether the request still has the blocks that the step writes."""
        return self.request.epoch == self.epoch

    @property
    def is_wrong(self) -> bool:
        """Whether drafts of it are to be taken back."""
        return self.is_live and self.num_accepted < self.count

    def cut(self, num_tokens: int) -> None:
        """Note that the request was taken back to `num_tokens` tokens."""
        self.count = min(max(num_tokens - self.start, 0), self.count)


@dataclass(frozen=True)
class Flight:
    """A launched step."""

    number: int
    entries: list[Entry]
    written: Written
