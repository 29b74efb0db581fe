"""Claims about `hybridkv plan`, `spec`, `fit` and `compare`."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridkv.lengths import RequestLength
from hybridkv.options import CacheOptions, apply_options
from hybridkv.report import PlanOptions, fit_report, plan_report, spec_report
from hybridkv.specs import ModelSpec, known_models
from tests.run.cli_harness import ROOT, Run, cli_in_process

GIB = 2**30
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n0,4000,96\n1,100,28\n2,200000,1\n"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Run:
    return cli_in_process(capsys)


def answer(cli: Run, *arguments: object) -> dict:
    """The JSON value of a command that has to go well; stdout holds nothing else."""
    code, out, err = cli(*arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def assert_refused(result: tuple[int, str, str], message: str) -> None:
    """One line on stderr, exit code 2, nothing on stdout."""
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert message in err
    assert err.startswith("hybridkv: ")
    assert err.count("\n") == 1


def test_plan_prints_the_report(cli: Run) -> None:
    """The JSON of `plan` is the report's own dictionary."""
    spec = ModelSpec.load("gemma-3-27b")
    assert answer(cli, "plan", "gemma-3-27b", "--memory", "80GiB") == plan_report(spec, 80 * GIB).to_dict()


def test_every_option_of_plan_arrives(cli: Run, tmp_path: Path) -> None:
    """Contexts, limits, block size, dtypes, ranks, drafts and the trace change the plan as in the Python API."""
    (tmp_path / "trace.csv").write_text(TRACE)
    options = ["--context", "8K,16384", "--max-model-len", "32K", "--max-num-seqs", 5, "--max-batched-tokens", 512]
    options += ["--block-size", 32, "--kv-dtype", "fp8", "--state-dtype", "bfloat16", "--tp", 2, "--draft-layers", 1]
    options += ["--trace", tmp_path / "trace.csv", "--reserve", "2GiB"]
    stored = CacheOptions(kv_dtype="float8_e4m3fn", state_dtype="bfloat16", tp_size=2, draft_layers=1)
    spec = apply_options(ModelSpec.load("Bamba-9B-v1"), stored)
    asked = PlanOptions((8192, 16384), 32768, 5, 512, 32)
    trace = [RequestLength(4000, 96), RequestLength(100, 28), RequestLength(200000, 1)]
    expected = plan_report(spec, 22 * GIB, asked, trace).to_dict()
    assert answer(cli, "plan", "Bamba-9B-v1", "--memory", "24GiB", *options) == expected
    assert expected["mixed"]["num_too_long"] == 1


def test_the_longest_source_is_an_option(cli: Run) -> None:
    """`--max-source-tokens` replaces the longest source of a cross attention model."""
    document = answer(cli, "plan", "whisper-large-v3", "--memory", "1GiB", "--max-source-tokens", 100)
    assert [group.get("max_source_tokens") for group in document["groups"]] == [None, 100]


def test_spec_prints_the_report(cli: Run) -> None:
    """The JSON of `spec` is the report's own dictionary, with the options applied."""
    for options, stored in (
        ((), CacheOptions()),
        (("--kv-dtype", "int8", "--tp", 4), CacheOptions(kv_dtype="int8", tp_size=4)),
    ):
        spec = apply_options(ModelSpec.load("gemma-3-27b"), stored)
        assert answer(cli, "spec", "gemma-3-27b", *options) == spec_report(spec).to_dict()


def test_spec_lists_the_known_models(cli: Run) -> None:
    """`--list` prints every known name, one a line or as JSON."""
    assert cli("spec", "--list") == (0, "\n".join(known_models()) + "\n", "")
    assert answer(cli, "spec", "--list") == {"models": known_models()}


def test_spec_folds_equal_layers(cli: Run) -> None:
    """The text shows equal layers as ranges, each kind once, with the totals."""
    code, out, _ = cli("spec", "gemma-3-1b")
    assert code == 0
    assert "0-4, 6-10, 12-16, 18-22, 24-25" in " ".join(out.split())
    assert "5, 11, 17, 23" in out
    assert out.count("sliding_window 512") == 1
    assert "B a token of full attention" in out


def test_fit_prints_the_report(cli: Run) -> None:
    """The JSON of `fit` is the report's own dictionary; the flags it names reproduce it."""
    spec = ModelSpec.load("gemma-3-27b")
    document = answer(cli, "fit", "gemma-3-27b", "--memory", "24GB")
    assert document == fit_report(spec, 24 * 10**9).to_dict()
    last = answer(cli, "plan", "gemma-3-27b", "--memory", "24GB", *document["flags"])["capacity"][-1]
    assert (last["context"], last["max_concurrency"]) == (document["max_model_len"], document["max_num_seqs"])
    fewer = answer(cli, "fit", "gemma-3-27b", "--memory", "24GB", "--max-num-seqs", 20)
    assert fewer["max_num_seqs"] == 20
    assert fewer["max_model_len"] < document["max_model_len"]
    assert " ".join(document["flags"]) in cli("fit", "gemma-3-27b", "--memory", "24GB")[1]


def test_compare_prints_a_plan_a_model(cli: Run) -> None:
    """The JSON of `compare` is a list of what `plan` prints for each model, in order."""
    names = ["gemma-3-1b", "Bamba-9B-v1"]
    plans = [answer(cli, "plan", name, "--memory", "8GiB") for name in names]
    assert answer(cli, "compare", *names, "--memory", "8GiB") == plans
    code, out, _ = cli("compare", *names, "--memory", "8GiB")
    assert code == 0
    assert all(name in out for name in names)


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "gemma-3-27b", "--memory", "80GiB"),
        ("plan", "Bamba-9B-v1", "--memory", "80GiB"),
        ("plan", "mamba2-2.7b-hf", "--memory", "1GiB"),
        ("plan", "Llama-4-Scout-17B-16E", "--memory", "100GB"),
        ("plan", "gemma-3-27b", "--memory", "1MiB"),
        ("spec", "Falcon-H1-7B"),
        ("fit", "gemma-3-27b", "--memory", "80GiB"),
        ("compare", "gemma-3-27b", "Bamba-9B-v1", "mamba2-2.7b-hf", "--memory", "80GiB"),
    ],
    ids=" ".join,
)
def test_tables_fit_120_columns(cli: Run, arguments: tuple[str, ...]) -> None:
    """Where stdout is no terminal, no line is wider than 120 columns, cut off or ends in spaces."""
    code, out, err = cli(*arguments)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 120
    assert "…" not in out
    assert all(line == line.rstrip() for line in lines)


def test_lengths_beyond_the_models_own_are_marked(cli: Run) -> None:
    """A context beyond what the model was made for is reported, with a mark that the text explains."""
    out = cli("plan", "gemma-3-1b", "--memory", "8GiB")[1]
    assert "128K*" in out
    assert " 32K " in out
    assert "* beyond the model's own length of 32,768 tokens" in out
    assert "* beyond" not in cli("plan", "gemma-3-1b", "--memory", "8GiB", "--context", "8K")[1]


def test_a_config_is_planned_with_the_canonical_dtypes(cli: Run, tmp_path: Path) -> None:
    """A config.json, or a folder with one, is read under its stem's or the folder's name; caches are bfloat16."""
    folder = tmp_path / "Llama-3.1-tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "my.llama.json").write_text(json.dumps(LLAMA))
    for path, name in ((folder, "Llama-3.1-tiny"), (tmp_path / "my.llama.json", "my.llama")):
        document = answer(cli, "spec", path)
        assert (document["model"], document["max_model_len"]) == (name, 4096)
        assert document["layers"][1]["caches"][0]["tensors"][0] == {"name": "k", "shape": [2, 16], "dtype": "bfloat16"}


def test_a_path_comes_before_a_known_name(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is called as a known model is read instead of it; a model spec's file is read as such."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gemma-3-1b").mkdir()
    (tmp_path / "gemma-3-1b" / "config.json").write_text(json.dumps(LLAMA))
    assert answer(cli, "spec", "gemma-3-1b")["model_type"] == "llama"
    spec = ModelSpec.load("gemma-3-4b")
    (tmp_path / "file.json").write_text(spec.to_json())
    assert answer(cli, "spec", "file.json") == spec_report(spec).to_dict()


def test_a_hub_id_fetches_its_config_alone(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Hub id nothing but config.json is fetched; the model keeps the id as its name."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    fetched = []

    def download(repo: str, name: str) -> str:
        fetched.append((repo, name))
        return str(tmp_path / name)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    assert answer(cli, "spec", "org/tiny")["model"] == "org/tiny"
    assert fetched == [("org/tiny", "config.json")]


def test_a_hub_that_cannot_be_reached_is_one_line(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without network or without huggingface_hub, the line says so and names close models."""

    def download(repo: str, name: str) -> str:
        raise OSError(f"no route\nto {repo}")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    refused = cli("spec", "google/gemma-3-27b-it")
    assert_refused(refused, "cannot be fetched from the Hugging Face Hub (no route to google/gemma-3-27b-it)")
    assert "did you mean gemma-3-27b" in refused[2]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert_refused(cli("spec", "google/gemma-3-27b-it"), "huggingface_hub is not installed")


def test_an_unknown_model_names_close_ones(cli: Run) -> None:
    """An unknown name lists close matches, and how to list all."""
    result = cli("plan", "Gemma-3-27", "--memory", "1GiB")
    assert_refused(
        result, "model: 'Gemma-3-27' is no existing file or folder and no known name; did you mean gemma-3-27b"
    )
    assert_refused(result, "hybridkv spec --list prints the known models")
    assert_refused(cli("plan", "GEMMA-3-27B", "--memory", "1GiB"), "did you mean gemma-3-27b")
    assert "did you mean" not in cli("plan", "xyzzy", "--memory", "1GiB")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--memory", "5XB"), "byte size: got '5XB'"),
        (("--memory", "0"), "byte size: got '0'"),
        ((), "Missing option '--memory'"),
        (("--memory", "1GiB", "--reserve", "1GiB"), "--reserve: got 1.00 GiB of --memory 1.00 GiB"),
        (("--memory", "1GiB", "--context", "8Q"), "context: got '8Q'"),
        (("--memory", "1GiB", "--context", "8K,"), "context: got ''"),
        (
            ("--memory", "1GiB", "--context", "8K", "--max-model-len", "4K"),
            "context: got 8192, beyond max_model_len=4096",
        ),
        (
            ("--memory", "1GiB", "--context", "8K,128K"),
            "memory: got 1.00 GiB for caches, one sequence of 131072 tokens",
        ),
        (("--memory", "1GiB", "--max-model-len", "0"), "max_model_len: got '0'"),
        (("--memory", "1GiB", "--max-num-seqs", "0"), "max_num_seqs: got 0"),
        (("--memory", "1GiB", "--max-batched-tokens", "0"), "max_num_batched_tokens: got 0"),
        (("--memory", "1GiB", "--block-size", "0"), "block_size: got 0"),
        (("--memory", "1GiB", "--block-size", "many"), "Invalid value for '--block-size'"),
        (("--memory", "1GiB", "--kv-dtype", "float7"), "Invalid value for '--kv-dtype'"),
        (("--memory", "1GiB", "--state-dtype", "float7"), "Invalid value for '--state-dtype'"),
        (("--memory", "1GiB", "--tp", "0"), "tp_size: got 0"),
        (("--memory", "1GiB", "--tp", "3"), "tp_size: got 3"),
        (("--memory", "1GiB", "--draft-layers", "-1"), "draft_layers: got -1"),
        (("--memory", "1GiB", "--max-source-tokens", "0"), "max_source_tokens: got 0"),
        (("--memory", "1GiB", "--trace", "/nonexistent/trace"), "trace '/nonexistent/trace': cannot be read"),
        (
            ("--memory", "1GiB", "--plot", "plan.pdf"),
            "--plot: got 'plan.pdf', expected a file that ends in .png or .svg",
        ),
        (("--memory", "1GiB", "--plot", "/nonexistent/plan.png"), "--plot: '/nonexistent/plan.png' cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_values_are_one_line(cli: Run, arguments: tuple[str, ...], message: str) -> None:
    """A bad value exits with 2 after one line that names it."""
    assert_refused(cli("plan", "gemma-3-27b", *arguments), message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{broken", "not valid JSON"),
        ("[]", "holds a list, not an object"),
        ('{"layers": []}', "name"),
        ("{}", "model_type"),
    ],
)
def test_broken_models_are_one_line(cli: Run, tmp_path: Path, content: str, message: str) -> None:
    """A file that is no JSON, no config and no model spec exits with 2 after one line."""
    (tmp_path / "model.json").write_text(content)
    assert_refused(cli("plan", tmp_path / "model.json", "--memory", "1GiB"), message)


def test_an_empty_folder_is_no_model(cli: Run, tmp_path: Path) -> None:
    """A folder without config.json is refused with what is missing."""
    assert_refused(cli("spec", tmp_path), "has no config.json")


def test_spec_needs_a_model(cli: Run) -> None:
    """`spec` without a model says how to list them."""
    assert_refused(cli("spec"), "Missing argument 'MODEL'; hybridkv spec --list")


def test_fit_refuses_what_holds_nothing(cli: Run) -> None:
    """A memory that holds not one token is refused with the least that would do."""
    assert_refused(cli("fit", "gemma-3-27b", "--memory", "1MiB"), "use at least ")


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PNG", b"\x89PNG")])
def test_plots_are_written(cli: Run, tmp_path: Path, suffix: str, magic: bytes) -> None:
    """`--plot` writes a picture beside the usual output, also for a memory that holds nothing."""
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{suffix}"
    for memory in ("8GiB", "1MiB"):
        assert answer(cli, "plan", "Bamba-9B-v1", "--memory", memory, "--plot", path)["model"] == "Bamba-9B-v1"
        assert path.read_bytes().startswith(magic)


def test_a_missing_matplotlib_names_the_extra(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib a plot is refused before any work, with the extra to install."""
    found = importlib.util.find_spec
    monkeypatch.setattr("hybridkv.report.plots.find_spec", lambda name: None if name == "matplotlib" else found(name))
    assert_refused(
        cli("plan", "no such model", "--memory", "1GiB", "--plot", "plan.png"), "pip install 'hybridkv[plot]'"
    )


def test_planning_loads_nothing_heavy() -> None:
    """A plan, printed as text, loads neither torch, triton, transformers nor matplotlib."""
    code = """
import sys
from hybridkv.cli.main import main
assert main(["plan", "gemma-3-27b", "--memory", "80GiB"]) == 0
print(sorted({"torch", "triton", "transformers", "matplotlib", "huggingface_hub"} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def keys_of(value: object) -> set[str]:
    """All keys of a JSON value."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    if isinstance(value, dict):
        return set(value) | keys_of(list(value.values()))
    return set()


def test_the_documentation_names_every_field(cli: Run, tmp_path: Path) -> None:
    """docs/planner.md explains every key of the JSON of all commands and every option of `plan`."""
    text = (ROOT / "docs" / "planner.md").read_text()
    (tmp_path / "trace.csv").write_text(TRACE)
    keys = keys_of(answer(cli, "plan", "Bamba-9B-v1", "--memory", "80GiB", "--trace", tmp_path / "trace.csv"))
    keys |= keys_of(answer(cli, "fit", "gemma-3-27b", "--memory", "80GiB"))
    for name in ("gemma-3n-E2B", "Llama-4-Scout-17B-16E", "whisper-large-v3", "Bamba-9B-v1"):
        keys |= keys_of(answer(cli, "spec", name))
    words = set(re.findall(r"[\w-]+", text))
    assert (keys | {"tokens_per_entry"}) - words == set()
    options = set(re.findall(r"--[a-z-]+", cli("plan", "--help")[1]))
    assert {"--trace", "--kv-dtype"} <= options
    assert options - words == {"--help"}
