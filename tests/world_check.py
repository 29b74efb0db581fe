"""What must hold in a stamped world after every action."""

from collections.abc import Sequence

import numpy as np

from hybridkv import CacheManager
from hybridkv.multi_group import MultiGroupBlockTable
from hybridkv.row_lengths import RowState
from tests.world_memory import StampedMemory
from tests.world_requests import Request


def check_manager(manager: CacheManager, requests: Sequence[Request]) -> None:
    """Check a manager's accounting, and that it sees requests where and as long as they are."""
    manager.check()
    rows = [request.row for request in requests]
    assert len(set(rows)) == len(rows)
    lengths = manager.num_computed_tokens, manager.num_settled_tokens, manager.num_committed_tokens
    for request in requests:
        assert manager.row_states[request.row] == request.state
        if request.state is RowState.RUNNING:
            found = tuple(int(length[request.row]) for length in lengths)
            assert found == (request.computed, request.settled, request.committed)


def check_tables(tables: MultiGroupBlockTable) -> None:
    """Check that the device's copy of every table equals the host's and that columns that are not live read null."""
    tables.commit()
    for group, table in enumerate(tables.tables):
        assert np.array_equal(tables.block_table_cpu(group), table.entries[:, : table.width])
        assert not table.entries[~table.live_mask()].any(), "a column that is not live does not read null"


def read_back(requests: Sequence[Request], tables: MultiGroupBlockTable, memory: StampedMemory) -> None:
    """Check every live stamp of running requests through tables and slots, as many tokens a step as they take."""
    batch: list[tuple[Request, int, int]] = []
    left = tables.max_num_batched_tokens
    for request in requests:
        start = 0
        while start < request.computed:
            count = min(left, request.computed - start)
            batch.append((request, start, count))
            start, left = start + count, left - count
            if not left:
                _read_batch(batch, tables, memory)
                batch, left = [], tables.max_num_batched_tokens
    if batch:
        _read_batch(batch, tables, memory)


def _read_batch(batch: Sequence[tuple[Request, int, int]], tables: MultiGroupBlockTable, memory: StampedMemory) -> None:
    requests, starts, counts = ([part[i] for part in batch] for i in range(3))
    step = tables.step([request.row for request in requests], counts, starts)
    hashes = np.concatenate([r.content.hashes[start : start + count] for r, start, count in batch])
    settled = np.repeat([request.settled for request in requests], counts)
    memory.check_tokens(step, hashes, settled)
    last = np.array([request.computed - 1 for request in requests])
    hashes = np.array([request.content.hashes[request.computed - 1] for request in requests])
    memory.check_states(step, hashes, last)
