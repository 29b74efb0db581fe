"""The benchmark of the block managers gives every system the same work and compares what they hold."""

import importlib
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda num_threads: None)
    return importlib.import_module("manager")


@pytest.fixture
def workloads(manager: ModuleType) -> ModuleType:
    return importlib.import_module("manager_workloads")


@pytest.mark.parametrize(("block_size", "num_crossing"), [(16, 16), (528, 1)])
def test_equally_many_rows_need_a_block_in_every_step(workloads: ModuleType, block_size: int, num_crossing: int):
    """16 rows of 256 cross a boundary of blocks of 16 tokens, one crosses one of Bamba's 528."""
    decode = workloads.Decode(block_size)
    decode.next_step()
    for _ in range(20):
        before = decode.num_full_blocks(block_size)
        assert decode.next_step().ids.shape == (256,)
        assert decode.num_full_blocks(block_size) - before == num_crossing


def test_a_window_holds_the_blocks_of_the_tokens_that_a_later_query_sees(workloads: ModuleType):
    """The count agrees with a list of the visible tokens of each row."""
    decode = workloads.Decode()
    expected = sum(
        len({token // 16 for token in range(max(length - 1023, 0), length)}) for length in decode.lengths.tolist()
    )
    assert decode.num_window_blocks(16, 1024) == expected


@pytest.mark.parametrize(("hit_percent", "expected"), [(0, 0), (50, 4096), (100, 8176)])
def test_prompts_share_what_is_to_be_found(workloads: ModuleType, hit_percent: int, expected: int):
    """Prompts of 8,192 tokens start alike for their share and differ after it; the last block is computed anyway."""
    admission = workloads.Admission(hit_percent)
    first, second = admission.next_prompt(), admission.next_prompt()
    assert first.dtype == np.int32
    assert len(first) == len(second) == 8192
    assert admission.expected_hit == expected
    num_alike = 8192 if np.array_equal(first, second) else int((first != second).argmax())
    assert num_alike == 8192 * hit_percent // 100


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Gemma-3-27B", "gpt-oss-20b", "Bamba-9B"])
def test_ours_and_the_floor_end_a_decode_with_the_expected_blocks(manager: ModuleType, model: str):
    """Steps of every model leave as many blocks, window's included, as lengths and window ask for."""
    (row,) = manager.run_case(f"decode, {model}", None, 1)
    assert (row.peer, row.num_rounds, row.our_us is None) == ("numpy floor", 1, False)


@pytest.mark.parametrize("method", ["num_full_blocks", "num_window_blocks"])
def test_a_wrong_number_of_blocks_stops_the_benchmark(
    manager: ModuleType, monkeypatch: pytest.MonkeyPatch, method: str
):
    """A system that holds one block too many is refused, however fast it is."""
    right = getattr(manager.Floor, method)
    monkeypatch.setattr(manager.Floor, method, lambda self: right(self) + 1)
    with pytest.raises(RuntimeError, match="numpy floor: blocks of"):
        manager.run_case("decode, Gemma-3-27B", None, 1)


def test_check_without_the_peers_fails(manager: ModuleType, capsys: pytest.CaptureFixture[str]):
    """`--check` exits 1 where there is no peer to compare with, and still prints our times beside the floor's."""
    assert manager.main(["--check", "--rounds", "1", "--cases", "decode, Llama-3.1-8B"]) == 1
    printed = capsys.readouterr()
    assert "the peer is missing" in printed.err
    assert "| decode, Llama-3.1-8B | numpy floor |" in printed.out
