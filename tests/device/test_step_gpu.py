"""Claims about the step on a GPU: captured graphs, a copy stream, tables beyond 2 GiB."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridkv.block_table import BlockTable
from hybridkv.multi_group import MultiGroupBlockTable
from hybridkv.page_index import PageIndexRequest
from hybridkv.plan import SlotMappingMode
from hybridkv.table_arrays import TableShape
from tests.device.test_step import assert_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NUM_ROWS, MAX_TOKENS, BUCKET = 8, 512, 8
SHAPES = [
    TableShape(64, 16),
    TableShape(9, 16, SlotMappingMode.SLIDING_WINDOW),
    TableShape(2, 1, SlotMappingMode.NONE),
]
INDICES = {0: PageIndexRequest(block_table=True, csr=True), 1: PageIndexRequest(block_table=True)}


def make(device: str, copy_stream: torch.cuda.Stream | None = None) -> MultiGroupBlockTable:
    """Tables on a device that hold two rows."""
    tables = MultiGroupBlockTable(
        BlockTable.of_groups(NUM_ROWS, SHAPES), MAX_TOKENS, device, page_indices=INDICES, copy_stream=copy_stream
    )
    for row in (1, 4):
        tables.append_row(row, [[row + 1, row + 2], [row + 3, row + 4], [row + 5, row + 6]])
    return tables


def grow(tables: MultiGroupBlockTable, step: int) -> tuple[list[int], list[int], list[int]]:
    """Change some rows; return a decode batch of between one and three rows."""
    if step % 3 == 0:
        tables.append_row(1, [[20 + step], [30 + step], []])
        tables.drop_row_head(1, [0, 1 + step // 3, 0])
    if step % 4 == 1:
        tables.add_row(6, [[40 + step, 50 + step], [60 + step], [70, 71]])
    if step == 7:
        tables.move_row(4, 0)
    rows = [1, 0 if step >= 7 else 4, 6][: 1 + step % 3]
    return rows, [1] * len(rows), [min(16 + step, 30)] * len(rows)


def test_a_captured_launch_replays_with_any_batch_of_its_sizes() -> None:
    """A launch captured once, replayed after staging other batches, gives what the host path gives."""
    ours, host = make("cuda"), make("cpu")
    sizes = {"num_reqs_padded": BUCKET, "num_tokens_padded": BUCKET}
    first = ours.step([1, 4], [1, 1], [16, 16], **sizes)
    host.step([1, 4], [1, 1], [16, 16], **sizes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.launch(first)
    for step in range(24):
        batch = grow(ours, step)
        assert grow(host, step) == batch
        ours.stage(*batch, **sizes)
        graph.replay()
        ours.replayed()
        host.step(*batch, **sizes)
        torch.cuda.synchronize()
        assert_equal(ours._outputs_of(BUCKET, BUCKET).arrays(), host._outputs_of(BUCKET, BUCKET).arrays())
        assert torch.equal(ours.words.cpu(), host.words)


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_stream_needs_its_events(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies on a stream of their own arrive before the launch that reads them; without the events they do not."""
    stream = torch.cuda.Stream()
    ours, host = make("cuda", stream), make("cpu")
    if not waits:
        monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda _stream, _event: None)
    equal = True
    for step in range(24):
        batch = grow(ours, step)
        grow(host, step)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # the copy is late, and the launch has to wait for it
        ours.step(*batch)
        host.step(*batch)
        torch.cuda.synchronize()
        equal = equal and torch.equal(ours.words.cpu(), host.words)
    assert equal == waits


def test_tables_beyond_2_gib_are_addressed() -> None:
    """The last row of a table of more than 2 GiB gets its entries, and its tokens their slots."""
    width = 2**20
    tables = MultiGroupBlockTable(BlockTable.of_groups(520, [TableShape(width, 16)]), 16, "cuda")
    assert tables.words.nbytes > 2**31
    ids = np.arange(1, 4, dtype=np.int32) + 2**30
    tables.append_row(519, [ids])
    step = tables.step([519], [3], [32])
    slots = (int(ids[2]) * 16 + np.arange(3)).tolist()
    assert step.slot_mapping[0].tolist() == slots
    assert tables.block_table(0)[519, :4].tolist() == [*ids.tolist(), 0]
