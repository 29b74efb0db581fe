"""The benchmark of the block tables compares outputs before it compares times."""

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda num_threads: None)
    return importlib.import_module("tables")


@pytest.mark.parametrize("case", ["decode, 32K", "decode, 32K, Gemma-3-27B", "prefill", "churn", "churn, commit"])
def test_ours_and_the_floor_end_every_workload_with_the_recorded_tables_and_slots(tables: ModuleType, case: str):
    """A block of each workload leaves our tables and the floor's as the plain record says."""
    rows = tables.run_case(case, None, 1)
    peers = ["numpy floor", "ours, numpy"][: 1 + tables.host.is_built()]
    assert [(row.case, row.peer, row.num_rounds) for row in rows] == [(case, peer, 1) for peer in peers]


def test_ours_in_numpy_has_no_compiled_helper(tables: ModuleType):
    """The system that is timed as numpy works without the helper, which later tables have again."""
    shape = (tables.GroupShape(4),)
    assert tables.OursInNumpy(shape, 16).tables.arrays.native is None
    assert (tables.Ours(shape, 16).tables.arrays.native is not None) == tables.host.is_built()


def test_check_without_the_helper_fails(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """`--check` exits 1 where the helper was not built, whatever the times, and says so."""
    monkeypatch.setattr(tables.host, "is_built", lambda: False)
    monkeypatch.setattr(tables, "import_vllm", lambda folder: object())
    monkeypatch.setattr(tables, "run_case", lambda *arguments: [])
    assert tables.main(["--check", "--peer", ".", "--cases", "churn"]) == 1
    assert "the compiled helper was not built" in capsys.readouterr().err


@pytest.mark.parametrize(("method", "what"), [("slots", "the slots differ"), ("device_table", "the table of group 0")])
def test_a_wrong_output_stops_the_benchmark(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch, method: str, what: str
):
    """A system whose slots or tables are off by one is refused, however fast it is."""
    right = getattr(tables.Floor, method)
    monkeypatch.setattr(tables.Floor, method, lambda self, argument: right(self, argument) + 1)
    with pytest.raises(RuntimeError, match=f"numpy floor: {what}"):
        tables.run_case("decode, 32K", None, 1)


def test_check_without_the_peer_fails(tables: ModuleType, capsys: pytest.CaptureFixture[str]):
    """`--check` exits 1 where there is no vLLM to compare with, and still prints our times beside the floor's."""
    assert tables.main(["--check", "--rounds", "1", "--cases", "decode, 32K"]) == 1
    printed = capsys.readouterr()
    assert "the peer is missing" in printed.err
    assert "| decode, 32K | numpy floor |" in printed.out
