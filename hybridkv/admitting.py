"""Admission: a sequence gets a row and what the cache already has of its prompt, or learns what is missing."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hybridkv.admission import Admission, Verdict
from hybridkv.compaction import can_fit, compact_for
from hybridkv.errors import InvalidRequest, NeverFits
from hybridkv.prefix_index import Match
from hybridkv.row_lengths import RowState
from hybridkv.sequence_store import SequenceStore
from hybridkv.slabs import slab_shortfall
from hybridkv.units import INT32_MAX, RowId, format_bytes

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Identity:
    """What besides its tokens tells a prompt's cache from others'.

    Attributes:
        salt: anything hashable that the whole sequence depends on: a tenant, an adapter.
        features: (position, anything hashable) of what stands behind placeholder tokens: an image's hash.
    """

    salt: Hashable = None
    features: Sequence[tuple[int, Hashable]] = ()


@dataclass(frozen=True)
class _Start:
    """What a row begins with: in each group shared blocks, then new ones, the first of which are copies.

    Shapes: firsts [num_groups] int64, the first ordinal; num_new [num_groups] int64, new blocks; shared, sources: by
        group the flat blocks to share and to copy
    """

    firsts: Int64
    num_new: Int64
    shared: list[Int64]
    sources: list[Int64]


def check_fits(store: SequenceStore, num_tokens: int) -> None:
    """Check that one sequence of `num_tokens` tokens fits when it has the pool to itself.

    Raises: InvalidRequest if it is longer than `max_model_len`, NeverFits if it does not fit.
    """
    plan = store.plan
    limit = plan.limits.max_model_len
    if num_tokens > limit:
        raise InvalidRequest(f"tokens: got a sequence of {num_tokens}, expected at most max_model_len={limit}")
    needed = plan.slabs_for(num_tokens)
    if needed > plan.num_usable_slabs:
        longest = plan.longest_sequence()
        blocks = store.groups.max_blocks(num_tokens, plan.limits.max_in_flight)
        missing = slab_shortfall(blocks, np.zeros_like(blocks), store.pool.blocks_per_slab, plan.num_usable_slabs)
        short = {group: int(count) for group, count in enumerate(missing) if count}
        raise NeverFits(
            f"memory: a sequence of {num_tokens} tokens needs {format_bytes((needed + 1) * plan.slab_bytes)}, "
            f"the arena has {format_bytes(plan.arena_bytes)} (short of {short} blocks by group); "
            f"at most {longest} tokens fit",
            short,
        )


def admit(
    store: SequenceStore, row: int, num_prompt: int, tokens: Int32 | None, external_tokens: int, identity: Identity
) -> Admission:
    """Let an empty row run a checked prompt; `tokens` [num_prompt] are None if nobody knows them."""
    index, match = store.index, None
    if index is not None and tokens is not None:
        assert store.recorder is not None
        store.recorder.flush()
        match = index.find(tokens, identity.salt, identity.features)
    admission = _admit(store, row, num_prompt, tokens, external_tokens, match)
    is_alone = not (store.rows.states == RowState.RUNNING).any()
    if admission.verdict == Verdict.LATER and is_alone and match is not None and match.num_hit_tokens:
        # Nobody will make room: what the sequence was to copy from the cache stands in its own way.
        match = replace(match, num_hit_tokens=0, serving=None)
        admission = _admit(store, row, num_prompt, tokens, external_tokens, match)
    return admission


def _admit(
    store: SequenceStore, row: int, num_prompt: int, tokens: Int32 | None, external_tokens: int, match: Match | None
) -> Admission:
    """Let an empty row run a prompt from its match's hit on."""
    num_hit = 0 if match is None else match.num_hit_tokens
    num_reserved = max(num_hit, min(external_tokens, num_prompt - 1))
    start = _start_of(store, match, num_hit, num_reserved)
    need, kept = _need(store, start, num_prompt), np.concatenate([*start.shared, *start.sources])
    # Asked first without holding the hit: with steps in flight, what is held and let go drains.
    beside = need + _by_group(store, kept[store.pool.holders[kept] == 0])
    if not can_fit(store, beside, kept):
        return _later(store, num_hit, beside)
    with _kept(store, kept, match):
        if not store.lender.fits(need):
            compact_for(store, need, kept)
        if not store.lender.fits(need):
            return _later(store, num_hit, need)
        _place(store, row, start)
        store.rows.start(row, num_hit)
        store.rows.capacity[row] = num_reserved
        if match is not None:
            assert store.index is not None
            assert store.recorder is not None
            assert tokens is not None
            store.recorder.start(row, match, num_hit, tokens)
            store.index.touch(match)
    reason = "nothing is cached for prompts without tokens" if match is None else match.explain()
    return Admission(Verdict.OK, RowId(row), num_hit, (0,) * store.num_groups, reason)


def _start_of(store: SequenceStore, match: Match | None, num_hit: int, num_reserved: int) -> _Start:
    """Return what a row of `num_reserved` tokens holds, of which the match has the first `num_hit`."""
    groups, nothing = store.groups, np.empty(0, dtype=np.int64)
    firsts = np.zeros(store.num_groups, dtype=np.int64)
    shared, sources = [nothing] * store.num_groups, [nothing] * store.num_groups
    if match is not None and num_hit:
        assert store.index is not None
        for group, (first, blocks) in enumerate(store.index.hit_blocks(match)):
            firsts[group] = first
            # The sequence gets copies of what it will write to and of what is in no whole unit: the index knows a
            # block by one prefix.
            num_shared = max(store.num_whole_blocks(group, num_hit) - first, 0)
            if group in groups.states:
                num_shared = 0
            shared[group], sources[group] = blocks[:num_shared], blocks[num_shared:]
    for group in groups.windowed:  # what only tokens that are computed elsewhere could see is not needed here
        first = int(groups.first_blocks(group, np.array([num_reserved]))[0])
        num_passed = max(first - int(firsts[group]), 0)
        sources[group] = sources[group][max(num_passed - len(shared[group]), 0) :]
        shared[group] = shared[group][num_passed:]
        firsts[group] += num_passed
    num_held = np.array([len(of_group) for of_group in shared], dtype=np.int64)
    ends = groups.ends(np.array([num_reserved]))[:, 0] if num_reserved else firsts
    return _Start(firsts, ends - firsts - num_held, shared, sources)


@contextmanager
def _kept(store: SequenceStore, held: Int64, match: Match | None) -> Iterator[None]:
    """Hold what a row is to share or copy while others are evicted to make room for it."""
    node = None
    store.pool.hold(held)
    if match is not None:
        assert store.index is not None
        node = np.array([match.node_at(match.num_hit_tokens // store.index.unit)], dtype=np.int32)
        store.index.pin(node)
    try:
        yield
    finally:
        if node is not None:
            assert store.index is not None
            store.index.unpin(node)
        store.pool.release(held)


def _need(store: SequenceStore, start: _Start, num_prompt: int) -> Int64:
    """Return the blocks by group for the whole prompt and the watermark, but for those that are shared."""
    num_shared = np.array([len(of_group) for of_group in start.shared], dtype=np.int64)
    most = store.groups.max_blocks(num_prompt, store.plan.limits.max_in_flight)
    need: Int64 = np.maximum(most - num_shared, start.num_new)
    if (store.rows.states == RowState.RUNNING).any():
        need = need + store.watermark_blocks
    return need


def _by_group(store: SequenceStore, flat: Int64) -> Int64:
    """Return how many of some blocks are each group's."""
    return np.bincount(store.pool.offsets.searchsorted(flat, side="right") - 1, minlength=store.num_groups)


def _place(store: SequenceStore, row: int, start: _Start) -> None:
    """Take the new blocks, write the row, ask for the copies."""
    taken, shared = store.lender.take(start.num_new), np.concatenate(start.shared)
    store.pool.hold(shared)
    try:
        new = np.split(taken, start.num_new.cumsum()[:-1])
        blocks = [np.concatenate(parts) for parts in zip(start.shared, new, strict=True)]
        targets = [of_group[: len(s)] for of_group, s in zip(new, start.sources, strict=True)]
        store.place(row, start.firsts, blocks)
    except BaseException:
        store.pool.release(np.concatenate([taken, shared]))
        raise
    store.copies.add(np.concatenate(start.sources), np.concatenate(targets))


def _later(store: SequenceStore, num_hit: int, need: Int64) -> Admission:
    """Say which blocks are missing, and what stands idle in other groups' slabs."""
    missing = store.lender.shortfall(need)
    short = ", ".join(f"{count} blocks of group {group}" for group, count in enumerate(missing.tolist()) if count)
    idle = max(store.pool.idle_foreign_bytes(group) for group in np.flatnonzero(missing).tolist() or [0])
    until = "for a sequence to end" if store.copies.is_empty else "until the copies are taken or a sequence ends"
    reason = f"short of {short}; {format_bytes(idle)} stand idle in slabs of other groups; wait {until}"
    return Admission(Verdict.LATER, None, num_hit, tuple(missing.tolist()), reason)


def token_ids_of(values: ArrayLike, expected: int | None) -> Int32:
    """Return token ids as int32.

    Raises: InvalidRequest for values that are not a flat list of int32 of at least 0, or not as many as expected.
    """
    ids = np.asarray(values)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu") or (expected is not None and len(ids) != expected):
        wanted = "a flat list of integers" if expected is None else f"{expected} integers, one for each token"
        raise InvalidRequest(f"token_ids: got {ids.dtype} of shape {ids.shape}, expected {wanted}")
    if ids.dtype == np.int32:
        # As unsigned numbers negative ones are the largest, so one pass finds both ends.
        is_wrong = ids.size and int(np.maximum.reduce(ids.view(np.uint32))) > INT32_MAX
    else:
        is_wrong = ids.size and (ids.min() < 0 or ids.max() > INT32_MAX)
    if is_wrong:
        raise InvalidRequest(f"token_ids: got {ids.min()}..{ids.max()}, expected 0..{INT32_MAX}")
    return np.ascontiguousarray(ids, dtype=np.int32)
