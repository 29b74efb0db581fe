"""Claims about the buffers and streams of a step that need no GPU to fail."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from hybridkv import step_path
from hybridkv.block_table import BlockTable
from hybridkv.multi_group import MultiGroupBlockTable
from hybridkv.step_path import TritonPath, _DeviceBuffer
from hybridkv.table_arrays import TableShape


def make(device: torch.device) -> tuple[MultiGroupBlockTable, TritonPath]:
    """Tables of one group with a row of one block, and their path."""
    tables = MultiGroupBlockTable(BlockTable.of_groups(2, [TableShape(6, 4)]), 8, device, use_triton=True)
    tables.append_row(0, [[11]])
    assert isinstance(tables._path, TritonPath)
    return tables, tables._path


def test_a_capture_with_a_copy_stream_is_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would keep one of two buffers that take turns; without a copy stream there is one, and it may."""
    tables, path = make(device)
    staged = tables.stage([0], [1], [0])
    monkeypatch.setattr(step_path, "_is_capturing", lambda _device: True)
    with monkeypatch.context() as patch:
        patch.setattr(path, "_copy_stream", Mock())
        with pytest.raises(RuntimeError, match=r"launch: got a stream that is capturing .*without copy_stream"):
            tables.launch(staged)
    tables.launch(staged)
    assert staged.slot_mapping.tolist() == [[44]]


def test_a_capture_alone_delivers_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured launch runs with its first replay: until `replayed`, what was staged travels again."""
    tables, _path = make(device)
    tables.append_row(0, [[12]])
    staged = tables.stage([0], [1], [0])
    with monkeypatch.context() as patch:
        patch.setattr(step_path, "_is_capturing", lambda _device: True)
        tables.launch(staged)
    tables.commit()
    again = tables.num_words_copied
    tables.commit()
    assert tables.num_words_copied < again


def test_events_are_on_the_stream_of_the_tables_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device may be the current one: what a copy or a launch did is recorded where the tables are."""
    tables, path = make(device)
    streams = {tables.words.device: Mock()}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams.get(device))
    for buffer in path._host:
        monkeypatch.setattr(buffer, "copied", Mock())
    tables.stage([0], [1], [0])
    path._host[path._turn].copied.record.assert_called_once_with(streams[tables.words.device])
    monkeypatch.setattr(path, "_copy_stream", Mock())
    monkeypatch.setattr(path._device[0], "consumed", Mock())
    tables.replayed()
    path._device[0].consumed.record.assert_called_once_with(streams[tables.words.device])


def test_a_step_that_cannot_be_packed_leaves_the_last_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two buffers that take turns, a launch after a failure reads the one that was copied last."""
    tables, path = make(device)
    path._device.append(_DeviceBuffer(len(path._device[0].tensor), tables.device))
    staged = tables.step([0], [1], [0])
    with monkeypatch.context() as patch:
        patch.setattr("hybridkv.step_path.pack", Mock(side_effect=RuntimeError("no room")))
        with pytest.raises(RuntimeError, match="no room"):
            tables.step([0], [1], [1])
    staged.slot_mapping.fill_(12345)
    path.launch(staged._outputs, None)
    assert staged.slot_mapping.tolist() == [[44]]
    assert tables.step([0], [1], [1]).slot_mapping.tolist() == [[45]]
