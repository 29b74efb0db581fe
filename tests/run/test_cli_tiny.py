"""Claims about `hybridkv tiny`."""

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hybridkv.runner.tiny import FAMILIES
from tests.run.cli_harness import Run, cli_in_process, run_json


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Run:
    return cli_in_process(capsys)


@pytest.mark.parametrize("family", ["bamba", "qwen3_next"])
def test_a_tiny_hybrid_runs_and_is_equal(cli: Run, tmp_path: Path, family: str) -> None:
    """A checkpoint made by one command is run by the other on text, preempted, and equals Hugging Face's generation."""
    out = tmp_path / "new" / family
    assert cli("tiny", family, out) == (0, f"{out}\n", "")
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    texts = ("A hybrid keeps states beside pages.", "b")
    result = run_json(cli, out, *texts, "--max-new-tokens", 12, "--preempt-every", 5, "--block-size", 4, "--verify")
    assert result["verify"]["equal"]
    assert result["stats"]["num_preemptions"] > 0
    assert {group["lifecycle"] for group in result["stats"]["groups"]} == {"state", "full_attention"}
    for output in result["outputs"]:
        assert (len(output["token_ids"]), output["finish_reason"]) == (12, "length")
        assert len(set(output["token_ids"])) > 6


def test_the_seed_makes_the_weights(cli: Run, tmp_path: Path) -> None:
    """Equal seeds give equal float32 weights, another seed others."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert cli("tiny", "lfm2", tmp_path / name, "--seed", seed)[0] == 0
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert {str(tensor.dtype) for tensor in a.values()} == {"torch.float32"}
    assert all(a[name].equal(b[name]) for name in a)
    assert not any(a[name].equal(c[name]) for name in a)


def test_nothing_ends_a_completion(cli: Run, tmp_path: Path) -> None:
    """The checkpoint names no end token."""
    cli("tiny", "mamba2", tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()).get("eos_token_id") is None


def test_the_list_has_every_family(cli: Run, tmp_path: Path) -> None:
    """`--list` prints a family a line, and makes nothing."""
    code, out, err = cli("tiny", "lfm2", tmp_path / "out", "--list")
    assert (code, out.splitlines(), err) == (0, list(FAMILIES), "")
    assert len(FAMILIES) >= 50
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt5", "OUT"), "family: got 'gpt5', expected one of bamba, cohere2, "),
        (("bamba", "FULL"), "exists and is not an empty folder; give a new one"),
        (("bamba", "FILE"), "exists and is not an empty folder; give a new one"),
        (("bamba", "FILE/x"), "FILE/x' cannot be made (Not a directory); give another"),
        (("bamba", "/proc/nope/x"), "output: '/proc/nope/x' cannot be made (No such file or directory); give another"),
        (("bamba", "OUT" + 300 * "x"), "cannot be made (File name too long); give another"),
        (("bamba", "OUT", "--seed", -1), "--seed"),
        (("bamba",), "Missing argument 'OUT'"),
        ((), "Missing argument 'FAMILY'"),
    ],
)
def test_bad_usage_is_one_line(cli: Run, tmp_path: Path, arguments: tuple[object, ...], message: str) -> None:
    """An unknown family, a folder that holds something or a missing argument exits with 2 after one line."""
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "kept").touch()
    (tmp_path / "FILE").touch()
    paths = ("OUT", "FULL", "FILE")
    code, out, err = cli("tiny", *(tmp_path / a if str(a).startswith(paths) else a for a in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert [path.name for path in (tmp_path / "FULL").iterdir()] == ["kept"]
    assert not (tmp_path / "OUT").exists()


def test_an_empty_folder_is_taken(cli: Run, tmp_path: Path) -> None:
    """A folder that exists is used if it is empty."""
    assert cli("tiny", "lfm2", tmp_path) == (0, f"{tmp_path}\n", "")


def test_missing_extra_is_named(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the run extra, the command says how to install it."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tokenizers" else found(name))
    code, out, err = cli("tiny", "bamba", tmp_path / "out")
    assert (code, out) == (2, "")
    assert err.startswith("hybridkv: tiny needs tokenizers; install the run extra with pip install")
