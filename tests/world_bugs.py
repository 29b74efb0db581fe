"""Bugs to put in on purpose: each one is something that a manager of caches could get wrong."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hybridkv import admitting, branching, compaction
from hybridkv.block_pool import BlockPool
from hybridkv.copy_list import BlockCopies, CopyList
from hybridkv.drafts import Drafts
from hybridkv.growing import Growth
from hybridkv.multi_group import MultiGroupBlockTable
from hybridkv.plan import SlotMappingMode
from hybridkv.prefix_index import PrefixIndex
from hybridkv.prefix_recorder import PrefixRecorder
from hybridkv.sequence_store import SequenceStore
from hybridkv.table_arrays import TableArrays
from hybridkv.units import INT32_MAX
from tests.world_memory import EQUAL_SIZES, StampedMemory
from tests.world_requests import WorldConfig

SYNC, ASYNC = WorldConfig(), WorldConfig(is_async=True, num_slabs=36)
# Much is cached here and stays so.
TAILS = WorldConfig(lifecycles=(0, 1), num_slabs=50)
ROOMY = WorldConfig(block_sizes=EQUAL_SIZES, num_slabs=60)


@dataclass(frozen=True)
class Bug:
    """A bug: what takes the place of which attributes, by owner and name."""

    changes: Mapping[tuple[object, str], object]
    config: WorldConfig = SYNC


# Tables


def move_without_clearing(self, sources, targets, right=TableArrays.move_rows):
    """`move_rows` that forgets to clear the source rows."""
    before = [view[:, sources].copy() for view in self._views]
    first, count = self.first[:, sources].copy(), self.count[:, sources].copy()
    right(self, sources, targets)
    for view, entries in zip(self._views, before, strict=True):
        view[:, sources] = entries
    self.first[:, sources], self.count[:, sources] = first, count


def one_slot_space(self, *args, right=MultiGroupBlockTable.step, **padded):
    """`step` that gives every token group the slots of group 0."""
    step = right(self, *args, **padded)
    for group, table in enumerate(self.tables):
        if table.mode is not SlotMappingMode.NONE:
            step.slot_mapping[group] = step.slot_mapping[0]
    return step


def drop_without_null(self, pairs, first):
    """`drop_head` that frees the blocks and leaves them in the row."""
    counts = (first - self.first.reshape(-1)[pairs]).clip(min=0)
    return np.concatenate([self.live_ids(pairs[i : i + 1])[:count] for i, count in enumerate(counts)])


def drop_and_leave_the_entries(self, pairs, first, right=TableArrays.drop_head):
    """`drop_head` that moves the row on and leaves the dead entries in their columns."""
    before = self.words[: self.first_offset].copy()
    ids = right(self, pairs, first)
    self.words[: self.first_offset] = before
    return ids


def commit_the_first_row_only(self, mirror, *_views):
    """`copy_dirty` that copies the row of a batch it guesses, not every dirty one."""
    self.take_dirty()
    for begin, stride in zip(self.offsets, self.strides, strict=True):
        mirror[begin : begin + stride] = self.words[begin : begin + stride]
    mirror[self.first_offset :] = self.words[self.first_offset :]
    return 0


def forget_the_live_ranges(self, mirror, *views, right=TableArrays.copy_dirty):
    """`copy_dirty` that copies the entries and no live range."""
    before = mirror[self.first_offset :].copy()
    num_words = right(self, mirror, *views)
    mirror[self.first_offset :] = before
    return num_words


# Sharing


def fork_shares_its_partial_block(store, row, right=branching._content):
    """Fork that shares the last block too, which both rows then write to."""
    content = right(store, row)
    copied = [part if group in store.groups.states else part[:0] for group, part in enumerate(content.copied)]
    shared = [
        part if group in store.groups.states else np.concatenate([part, content.copied[group]])
        for group, part in enumerate(content.shared)
    ]
    return replace(content, shared=shared, copied=copied)


def hit_shares_its_frozen_tail(*args, right=admitting._start_of):
    """Hit that goes on in the blocks of the cached tail."""
    store, start = args[0], right(*args)
    is_state = [group in store.groups.states for group in range(store.num_groups)]
    parts = list(zip(start.shared, start.sources, is_state, strict=True))
    shared = [mine if state else np.concatenate([mine, tail]) for mine, tail, state in parts]
    sources = [tail if state else tail[:0] for _, tail, state in parts]
    num_new = start.num_new - [0 if state else len(tail) for _, tail, state in parts]
    return replace(start, shared=shared, sources=sources, num_new=num_new)


def hit_does_not_copy_its_frozen_tail(*args, right=admitting._start_of):
    """Hit that gets blocks for the cached tail and no copies."""
    store, start = args[0], right(*args)
    sources = [part if group in store.groups.states else part[:0] for group, part in enumerate(start.sources)]
    return replace(start, sources=sources)


def hit_under_any_salt(self, tokens, salt=None, features=(), right=PrefixIndex.find):
    """Look-up that does not tell tenants apart."""
    return right(self, tokens, None, features)


def hit_whatever_the_image(self, tokens, salt=None, features=(), right=PrefixIndex.find):
    """Look-up that does not tell apart what stands behind placeholder tokens."""
    return right(self, tokens, salt, ())


# Copies


def run_in_the_wrong_order(self, copies):
    """Engine that runs the lists last to first."""
    self._to_or_from_host(copies.to_host, to_host=True)
    self._within_device(copies.within)
    self._to_or_from_host(copies.from_host, to_host=False)
    self._within_device(copies.moves)


def drop_the_copies(self, right=CopyList.take):
    """Copy list that a verb in between takes and forgets."""
    copies = right(self)
    return replace(copies, within=BlockCopies().within) if len(copies.within) % 2 else copies


def swap_out_without_a_group(self, sources, targets, right=CopyList.add_to_host):
    """Swap that copies all groups but the first to the host."""
    kept = sources >= self._pool.offsets[1]
    right(self, sources[kept], targets[kept])


def compact_without_the_index(self, sources, targets):
    """Compaction after which the index still names the old blocks."""


def compact_without_a_row(store, group, sources, targets, right=compaction._move):
    """Compaction that leaves the row with the highest number as it was."""
    table = store.tables[group]
    held = np.flatnonzero(table.num_blocks_per_row > table.first_block_per_row)
    before = table.entries[held[-1:]].copy()
    right(store, group, sources, targets)
    table.entries[held[-1:]] = before


# States and drafts


def chunks_without_limits(self, rows):
    """`chunk_limits` that let a row pass where its state is to be kept."""
    return np.full(len(rows), INT32_MAX, dtype=np.int64)


def keep_a_state_that_moved_on(self, row, end):
    """Resume point with the state of a row that is past it."""
    while (position := int(self.next_point[row])) <= end:
        self._keep(row, position, end)
        self._plan_point(row, position)


def roll_back_lengths_alone(self, rows, counts):
    """Rollback that leaves the states as the drafts made them."""
    lengths = self._store.rows
    rows, counts = rows[counts > 0], counts[counts > 0]
    if self._scratch.shape[1]:
        lengths.computed[rows] = self.positions[rows]
        self.positions[rows] = -1
    else:
        lengths.computed[rows] -= counts


# Time


def free_at_release(self, flat, *, after_next=False, right=BlockPool.release):
    """Pool that lends blocks again while a step in flight still writes to them."""
    queue = self.drain_queue
    launched, queue.launched = queue.launched, queue.settled
    try:
        right(self, flat)
    finally:
        queue.launched = launched


def drop_by_computed_tokens(self, rows, num_tokens, right=SequenceStore.drop_out_of_window):
    """Windows that move on with tokens that are only launched."""
    right(self, rows, self.rows.computed[rows])


def _table(name: str, broken: Callable) -> Bug:
    return Bug({(TableArrays, name): broken})


BUGS: dict[str, Bug] = {
    "move without clearing": _table("move_rows", move_without_clearing),
    "one slot space": Bug({(MultiGroupBlockTable, "step"): one_slot_space}),
    "drop without null": _table("drop_head", drop_without_null),
    "drop and leave the entries": _table("drop_head", drop_and_leave_the_entries),
    "commit the first row only": _table("copy_dirty", commit_the_first_row_only),
    "forget the live ranges": _table("copy_dirty", forget_the_live_ranges),
    "fork shares its partial block": Bug({(branching, "_content"): fork_shares_its_partial_block}),
    "hit shares its frozen tail": Bug({(admitting, "_start_of"): hit_shares_its_frozen_tail}, TAILS),
    "hit does not copy its frozen tail": Bug({(admitting, "_start_of"): hit_does_not_copy_its_frozen_tail}),
    "hit under any salt": Bug({(PrefixIndex, "find"): hit_under_any_salt}, ROOMY),
    "hit whatever the image": Bug({(PrefixIndex, "find"): hit_whatever_the_image}, ROOMY),
    "copies in the wrong order": Bug(
        {(StampedMemory, "run"): run_in_the_wrong_order}, replace(ROOMY, num_slabs=45, defer=0.9)
    ),
    "copies dropped": Bug({(CopyList, "take"): drop_the_copies}),
    "swap without a group": Bug({(CopyList, "add_to_host"): swap_out_without_a_group}),
    "compaction without the index": Bug({(PrefixIndex, "replace_blocks"): compact_without_the_index}),
    "compaction without a row": Bug({(compaction, "_move"): compact_without_a_row}),
    "state kept too late": Bug(
        {(Growth, "chunk_limits"): chunks_without_limits, (PrefixRecorder, "_reach"): keep_a_state_that_moved_on},
        ROOMY,
    ),
    "rollback without the states": Bug({(Drafts, "roll_back"): roll_back_lengths_alone}),
    "freed at release": Bug({(BlockPool, "release"): free_at_release}, ASYNC),
    "window by computed tokens": Bug({(SequenceStore, "drop_out_of_window"): drop_by_computed_tokens}, ASYNC),
}
