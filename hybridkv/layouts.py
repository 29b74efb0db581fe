"""How many sequences fit into a memory under the cache layouts that other engines use.

All layouts are asked about the same steady state: every sequence has `context` tokens, the one it decodes included,
windows are at their worst phase, nothing is shared between sequences:

    held    |  needed: growing caches, windows, states, sources  |  waste: dead tokens, padding, tails, idle pools  |
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal

from hybridkv.errors import SpecError
from hybridkv.planner import DEFAULT_BLOCK_SIZE
from hybridkv.retention import max_live_blocks, num_needed_tokens
from hybridkv.retention import needed_bytes as needed_bytes
from hybridkv.specs import CacheTensor, ChunkedAttention, CrossAttention, Lifecycle, ModelSpec, SlidingWindow, State
from hybridkv.units import cdiv, check_integer, format_bytes

LayoutName = Literal["uniform", "one_page_size", "static_partition", "lcm_pages", "hybridkv"]

KERNEL_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class LayoutCapacity:
    """How many sequences of `context` tokens one layout holds in a memory.

    Attributes:
        max_concurrency: sequences of `context` tokens at once; 0 if none fits.
        num_tokens: `max_concurrency * context`.
        held_bytes: bytes those sequences occupy in this layout, padding included.
        needed_bytes: bytes of what those sequences must keep.
        block_size: tokens of an attention block, the largest where groups differ; as asked for without attention.
        note: why nothing fits, or empty.
    """

    layout: LayoutName
    context: int
    max_concurrency: int
    num_tokens: int
    held_bytes: int
    needed_bytes: int
    block_size: int
    note: str

    @property
    def waste_fraction(self) -> float:
        """Part of the held bytes that no sequence must keep; 0 if nothing is held."""
        return 1 - self.needed_bytes / self.held_bytes if self.held_bytes else 0.0


@dataclass(frozen=True)
class PageGroup:
    """Caches that share one block table in `OnePageLayout`; `block_size` counts tokens, 1 for states."""

    lifecycle: Lifecycle
    num_caches: int
    block_size: int

    def num_blocks(self, context: int) -> int:
        """Blocks that a sequence of `context` tokens holds in this group."""
        return _num_blocks(self.lifecycle, self.block_size, context)


@dataclass(frozen=True)
class OnePageLayout:
    """A pool of blocks of one size that any group can take.

    `bytes_per_block` is the widest group's: its caches times the bytes of a page.
    """

    groups: tuple[PageGroup, ...]
    bytes_per_block: int


@dataclass(frozen=True)
class _Bucket:
    """Caches with one lifecycle and equal tensors."""

    lifecycle: Lifecycle
    tensors: tuple[CacheTensor, ...]
    num_caches: int

    @property
    def is_state(self) -> bool:
        return isinstance(self.lifecycle, State)

    def cache_bytes(self, num_tokens: int) -> int:
        """Bytes of one cache with room for `num_tokens` tokens; of one state whatever the tokens."""
        return sum(
            tensor.entry_bytes * (1 if self.is_state else cdiv(num_tokens, tensor.tokens_per_entry))
            for tensor in self.tensors
        )

    def all_bytes(self, num_tokens: int) -> int:
        """Bytes of all caches of the bucket."""
        return self.num_caches * self.cache_bytes(num_tokens)


@dataclass(frozen=True)
class _Case:
    """What a layout is asked: how many sequences of `context` tokens fit into `memory_bytes`."""

    buckets: tuple[_Bucket, ...]
    memory_bytes: int
    context: int
    block_size: int
    max_in_flight: int
    sequence_needs_bytes: int

    def prefill_blocks(self, lifecycle: Lifecycle, block_size: int) -> int:
        """Blocks that the one sequence being prefilled holds beyond those of a decoding one."""
        widest = max_live_blocks(lifecycle, block_size, self.context, self.max_in_flight)
        return widest - _num_blocks(lifecycle, block_size, self.context)

    @property
    def state_bytes(self) -> int:
        return sum(bucket.all_bytes(0) for bucket in self.buckets if bucket.is_state)

    @property
    def attention(self) -> tuple[_Bucket, ...]:
        return tuple(bucket for bucket in self.buckets if not bucket.is_state)

    def answer(
        self, layout: LayoutName, max_concurrency: int, held_bytes: int, note: str, block_size: int | None = None
    ) -> LayoutCapacity:
        return LayoutCapacity(
            layout,
            self.context,
            max_concurrency,
            max_concurrency * self.context,
            held_bytes,
            max_concurrency * self.sequence_needs_bytes,
            block_size or self.block_size,
            "" if max_concurrency else note,
        )


def compare_layouts(
    spec: ModelSpec,
    memory_bytes: int,
    contexts: Sequence[int],
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    max_in_flight: int = 1,
) -> list[LayoutCapacity]:
    """Return the capacity of every other engine's layout, in the order of `LayoutName`, for each context in turn.

    As in `capacity`, all sequences decode but one, which is being prefilled with `max_in_flight` tokens at once.

    Raises: SpecError if the memory, a context, the block size or `max_in_flight` is less than 1.
    """
    check_integer("max_in_flight", max_in_flight)
    check_integer("memory_bytes", memory_bytes)
    check_integer("block_size", block_size)
    buckets = _buckets(spec)
    capacities = []
    for context in contexts:
        check_integer("context", context)
        case = _Case(buckets, memory_bytes, context, block_size, max_in_flight, needed_bytes(spec, context))
        capacities += [layout(case) for layout in _LAYOUTS]
    return capacities


def uniform_waste(spec: ModelSpec, num_tokens: int, num_source_tokens: int = 0) -> float:
    """Return the waste of keeping every token in every attention layer, for one sequence and without blocks.

    Text and source tokens lie in all attention layers, though self attention needs the text and cross attention the
    source only. States count as held and as needed.

    Raises: SpecError if `num_tokens` is less than 1 or `num_source_tokens` passes the model's longest source.
    """
    check_integer("num_tokens", num_tokens)
    buckets = _buckets(spec)
    longest = _longest_source(buckets)
    check_integer("num_source_tokens", num_source_tokens, 0)
    if num_source_tokens > longest:
        raise SpecError(
            f"num_source_tokens: got {num_source_tokens}, expected 0 to {longest}, the longest source of {spec.name}"
        )
    held = sum(bucket.all_bytes(num_tokens + num_source_tokens) for bucket in buckets)
    needed = sum(
        bucket.all_bytes(
            num_source_tokens
            if isinstance(bucket.lifecycle, CrossAttention)
            else num_needed_tokens(bucket.lifecycle, num_tokens)
        )
        for bucket in buckets
    )
    return 1 - needed / held


def state_checkpoints_bytes(spec: ModelSpec, num_tokens: int, every_tokens: int) -> int:
    """Return the bytes of one sequence whose states are kept once every `every_tokens` tokens.

    The attention caches are kept as in `needed_bytes`. The state after the last token is kept too, so an interval of
    the whole sequence gives `needed_bytes`.

    Raises: SpecError if a count is less than 1.
    """
    check_integer("num_tokens", num_tokens)
    check_integer("every_tokens", every_tokens)
    set_bytes = sum(cache.bytes_per_sequence for _, _, cache in spec.owned_caches())
    return needed_bytes(spec, num_tokens) + (cdiv(num_tokens, every_tokens) - 1) * set_bytes


def one_page_layout(spec: ModelSpec, block_size: int = DEFAULT_BLOCK_SIZE) -> OnePageLayout:
    """Return the groups and the page of the layout `one_page_size`.

    1. Caches with equal lifecycle and tensors make a bucket. A model of one lifecycle is one group and nothing is
       padded: a block is the sum of its caches' pages.
    2. Beside states, the attention block size grows to the least multiple of 16 (of `block_size` and of
       `tokens_per_entry` too) at which the largest attention page holds the largest state.
    3. The page is the largest of all buckets. A smaller attention page takes more tokens if it divides the page, and
       is padded otherwise, as states are.
    4. With m and M caches in the smallest and the largest bucket, a group takes M caches if M < 1.5 m, else m; a
       bucket is dealt evenly over as few groups as hold it. Every block is as large as the widest group's.

    Raises: SpecError if the block size is less than 1.
    """
    check_integer("block_size", block_size)
    return _one_page_layout(_buckets(spec), block_size)


def _uniform(case: _Case) -> LayoutCapacity:
    """Every attention layer keeps every token, whatever its lifecycle.

    Each sequence holds whole blocks of all attention layers for its text and, with cross attention, its longest
    source; and one state set.
    """
    block_bytes = sum(bucket.all_bytes(case.block_size) for bucket in case.attention)
    num_blocks = cdiv(case.context + _longest_source(case.buckets), case.block_size)
    sequence_bytes = num_blocks * block_bytes + case.state_bytes
    fits = case.memory_bytes // sequence_bytes
    return case.answer("uniform", fits, fits * sequence_bytes, f"one sequence takes {format_bytes(sequence_bytes)}")


def _one_page_size(case: _Case) -> LayoutCapacity:
    """Every group takes blocks of one size from one pool whose block 0 is reserved; see `one_page_layout`.

    A windowed group holds the blocks its window touches, a state group one block, a sequence the sum over the groups.
    """
    layout = _one_page_layout(case.buckets, case.block_size)
    num_blocks = sum(group.num_blocks(case.context) for group in layout.groups)
    prefill = sum(case.prefill_blocks(group.lifecycle, group.block_size) for group in layout.groups)
    fits = max(case.memory_bytes // layout.bytes_per_block - 1 - prefill, 0) // num_blocks
    held = (fits * num_blocks + prefill) * layout.bytes_per_block if fits else 0
    note = f"one sequence takes {format_bytes((num_blocks + prefill) * layout.bytes_per_block)} beside a reserved block"
    block_size = max((group.block_size for group in layout.groups if group.lifecycle.kind != "state"), default=None)
    return case.answer("one_page_size", fits, held, note, block_size)


def _static_partition(case: _Case) -> LayoutCapacity:
    """The memory is split once between three pools, by ratios that no load changes.

    * states: one set a sequence; beside attention their pool has 0.9 x the bytes of the two KV pools together.
    * windowed: pages of all windowed and chunked layers; it has 0.8 x the pages of the full pool. A sequence holds
      the pages that the widest window touches.
    * full: pages of all full and cross attention layers; a sequence holds pages for its text and longest source.

    A model of one kind gives it all memory. The scarcest pool sets the concurrency. The sequences lock the same share
    of every pool as of that one, since nobody else can use it: `held_bytes` is the largest fraction of a pool in use
    times the memory. No page is reserved.
    """
    pools = _partition(case)
    fits, scarcest = min((max(units - once, 0) // per_sequence, name) for name, units, per_sequence, once in pools)
    held = 0
    if fits:
        held = max(
            cdiv(case.memory_bytes * (fits * per_sequence + once), units) for _, units, per_sequence, once in pools
        )
    return case.answer("static_partition", fits, held, f"the {scarcest} pool is too small for one sequence")


def _lcm_pages(case: _Case) -> LayoutCapacity:
    """Large pages, the least common multiple of all groups' blocks, that any group can take and cut without a rest.

    A group is all layers of one lifecycle. N sequences take `cdiv(N * blocks, blocks a page)` pages in each group:
    sequences share pages, groups don't. No page is reserved.
    """
    block_bytes: Counter[Lifecycle] = Counter()
    for bucket in case.buckets:
        block_bytes[bucket.lifecycle] += bucket.all_bytes(case.block_size)
    page_bytes = lcm(*block_bytes.values())
    groups = [
        (
            _num_blocks(lifecycle, case.block_size, case.context),
            case.prefill_blocks(lifecycle, case.block_size),
            page_bytes // num_bytes,
        )
        for lifecycle, num_bytes in block_bytes.items()
    ]

    def num_pages(num_sequences: int) -> int:
        if num_sequences == 0:
            return 0
        return sum(cdiv(num_sequences * blocks + once, blocks_per_page) for blocks, once, blocks_per_page in groups)

    most_pages = case.memory_bytes // page_bytes
    low, high = 0, min(most_pages * blocks_per_page // blocks for blocks, _, blocks_per_page in groups)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if num_pages(middle) <= most_pages else (low, middle - 1)
    passes = f"a page of {format_bytes(page_bytes)} passes the memory"
    note = f"one sequence takes {format_bytes(num_pages(1) * page_bytes)}" if most_pages else passes
    return case.answer("lcm_pages", low, num_pages(low) * page_bytes, note)


_LAYOUTS: tuple[Callable[[_Case], LayoutCapacity], ...] = (_uniform, _one_page_size, _static_partition, _lcm_pages)


def _buckets(spec: ModelSpec) -> tuple[_Bucket, ...]:
    """Caches by lifecycle and tensors, in the order in which they first appear."""
    return tuple(_Bucket(cache.lifecycle, cache.tensors, count) for cache, count in spec.distinct_caches)


def _longest_source(buckets: tuple[_Bucket, ...]) -> int:
    lifecycles = [bucket.lifecycle for bucket in buckets]
    return max((life.max_source_tokens for life in lifecycles if isinstance(life, CrossAttention)), default=0)


def _num_blocks(lifecycle: Lifecycle, block_size: int, context: int) -> int:
    """Blocks that a decoding sequence holds at the worst phase of its window, the token being decoded included."""
    return max_live_blocks(lifecycle, block_size, context, 1)


def _one_page_layout(buckets: tuple[_Bucket, ...], block_size: int) -> OnePageLayout:
    if len({bucket.lifecycle for bucket in buckets}) == 1:
        lifecycle, num_caches = buckets[0].lifecycle, sum(bucket.num_caches for bucket in buckets)
        group = PageGroup(lifecycle, num_caches, 1 if buckets[0].is_state else block_size)
        return OnePageLayout((group,), sum(bucket.all_bytes(block_size) for bucket in buckets))
    block_size = _inflated_block_size(buckets, block_size)
    page_bytes = max(bucket.cache_bytes(block_size) for bucket in buckets)
    counts = [bucket.num_caches for bucket in buckets]
    group_size = max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)
    groups = []
    for bucket in buckets:
        own_bytes = bucket.cache_bytes(block_size)
        times = page_bytes // own_bytes if page_bytes % own_bytes == 0 else 1
        num_groups = cdiv(bucket.num_caches, group_size)
        for idx in range(num_groups):
            num_caches = len(range(idx, bucket.num_caches, num_groups))
            groups.append(PageGroup(bucket.lifecycle, num_caches, 1 if bucket.is_state else block_size * times))
    return OnePageLayout(tuple(groups), group_size * page_bytes)


def _inflated_block_size(buckets: tuple[_Bucket, ...], block_size: int) -> int:
    """Tokens at which the largest attention page holds the largest state."""
    attention = [bucket for bucket in buckets if not bucket.is_state]
    states = [bucket.cache_bytes(0) for bucket in buckets if bucket.is_state]
    if not attention or not states:
        return block_size
    entries = [tensor.tokens_per_entry for bucket in attention for tensor in bucket.tensors]
    step = lcm(KERNEL_BLOCK_TOKENS, block_size, *entries)
    return step * cdiv(max(states), max(bucket.cache_bytes(step) for bucket in attention))


def _partition(case: _Case) -> list[tuple[str, int, int, int]]:
    """Name, units, units a sequence and units of a prefill of every pool; a unit is a page or a state set."""
    windowed = [bucket for bucket in case.attention if isinstance(bucket.lifecycle, SlidingWindow | ChunkedAttention)]
    full = [bucket for bucket in case.attention if bucket not in windowed]
    kv_bytes = case.memory_bytes * 10 // 19 if case.state_bytes else case.memory_bytes
    windowed_page, full_page = (sum(bucket.all_bytes(case.block_size) for bucket in kind) for kind in (windowed, full))
    pools = []
    num_pages = kv_bytes // windowed_page if windowed else 0
    if full:
        # 0.8 windowed pages go with a full page: x full pages take x * (full + 0.8 * windowed) bytes.
        full_pages = kv_bytes * 5 // (5 * full_page + 4 * windowed_page)
        num_pages = full_pages * 4 // 5
        source = _longest_source(case.buckets)
        pools.append(("full", full_pages, cdiv(case.context + source, case.block_size), 0))
    if windowed:
        widest = max(_num_blocks(bucket.lifecycle, case.block_size, case.context) for bucket in windowed)
        prefill = max(case.prefill_blocks(bucket.lifecycle, case.block_size) for bucket in windowed)
        pools.append(("windowed", num_pages, widest, prefill))
    if case.state_bytes:
        state_pool = case.memory_bytes - kv_bytes if case.attention else case.memory_bytes
        pools.append(("state", state_pool // case.state_bytes, 1, 0))
    return pools
