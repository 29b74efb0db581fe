"""Claims about `hybridkv run` where something is wrong."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hybridkv.cli import generate
from hybridkv.cli.terminal import print_error
from hybridkv.runner import Completion, Engine
from hybridkv.runner.tiny import make_tiny
from hybridkv.runner.tiny_configs import MAX_MODEL_LEN
from tests.run.cli_harness import Run, cli_in_process, start_process


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A windowed model with a tokenizer."""
    return str(make_tiny("gemma3_text", tmp_path_factory.mktemp("gemma3"), tokenizer=True))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without a tokenizer."""
    return str(make_tiny("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Run:
    return cli_in_process(capsys)


BAD_USAGE: list[tuple[Sequence[object], str]] = [
    ((), "Missing argument 'MODEL'"),
    (("MODEL",), "no prompt: give"),
    (("MODEL", "x", "--bogus"), "No such option"),
    (("MODEL", ""), "prompt: got an empty text"),
    (("MODEL", "\udcff"), "not valid UTF-8"),
    (("MODEL", "x", "--dtype", "int3"), "--dtype"),
    (("MODEL", "x", "--memory", "lots"), "byte size: got 'lots'"),
    (("MODEL", "x", "--memory", "10KiB"), "memory: got 10240 bytes, expected at least"),
    (("MODEL", "x" * 200, "--memory", "200KiB"), "memory: a sequence of 264 tokens needs"),
    (("MODEL", "x" * MAX_MODEL_LEN), f"expected fewer than max_model_len={MAX_MODEL_LEN}"),
    (("MODEL", "x", "--max-model-len", MAX_MODEL_LEN + 1), "max_model_len: got 513"),
    (("MODEL", "x", "--max-model-len", 0), "--max-model-len"),
    (("MODEL", "x", "--max-new-tokens", 0), "max_new_tokens: got 0"),
    (("MODEL", "x", "--max-new-tokens", "many"), "--max-new-tokens"),
    (("MODEL", "x", "--temperature", "-1"), "temperature: got -1.0"),
    (("MODEL", "x", "--temperature", "nan"), "temperature: got nan"),
    (("MODEL", "x", "--top-p", 0), "top_p: got 0.0"),
    (("MODEL", "x", "--top-k", -1), "top_k: got -1"),
    (("MODEL", "x", "--stop", ""), "stop: got ('',)"),
    (("MODEL", "x", "--block-size", 0), "block_size: got 0"),
    (("MODEL", "x", "--max-num-seqs", 0), "max_num_seqs: got 0"),
    (("MODEL", "x", "--max-batched-tokens", 0), "max_num_batched_tokens: got 0"),
    (("MODEL", "x", "--preempt-every", -1), "--preempt-every"),
    (("MODEL", "x", "--device", "abacus"), "device: got 'abacus'"),
    (("MODEL", "x", "--device", "cuda:99"), "device: got 'cuda:99'"),
    (("MODEL", "x", "--verify", "--temperature", 1), "--verify: compares greedy outputs only"),
    (("MODEL", "--prompts-file", "/nonexistent/file"), "cannot be read"),
    (("/nonexistent/folder", "x"), "is no existing folder or file"),
    (("/", "x"), "no config.json"),
]


def assert_refused(result: tuple[int, str, str], message: str) -> None:
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert message in err
    assert err.startswith("hybridkv: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("arguments", "message"), BAD_USAGE, ids=[message for _, message in BAD_USAGE])
def test_bad_usage_is_one_line(cli: Run, gemma3: str, arguments: Sequence[object], message: str) -> None:
    """Bad usage or input exits with 2 after one line on stderr that says what is wrong; stdout stays empty."""
    assert_refused(cli("run", *(gemma3 if argument == "MODEL" else argument for argument in arguments)), message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"fine\n\xff\n", "line 2: is not valid UTF-8"),
        (b'{"prompt": "x"}\n\n{"prompt": }\n', "line 3: is no JSON"),
        (b'{"prompt": "x"}\n["y"]\n', 'line 2: got ["y"], expected an object'),
        (b'{"prompt": "x"}\n{"text": "y"}\n', "line 2: unknown key 'text'"),
        (b'{"prompt": "x"}\n{"prompt": "y", "token_ids": [1]}\n', "line 2: expected either prompt or token_ids"),
        (b'{"max_new_tokens": 3}\n', "line 1: expected either prompt or token_ids"),
        (b'{"prompt": 5}\n', "line 1: prompt: got 5, expected a text"),
        (b'{"prompt": ""}\n', "line 1: prompt: got an empty text"),
        (b'{"token_ids": []}\n', "line 1: token_ids: got []"),
        (b'{"token_ids": [1, true]}\n', "line 1: token_ids: got [1, True]"),
        (b'{"token_ids": [-1]}\n', "line 1: token_ids: got [-1]"),
        (b'{"token_ids": [1], "max_new_tokens": 0}\n', "line 1: max_new_tokens: got 0"),
        (b'{"token_ids": [1, 256]}\n', "prompt 0: got token id 256, the vocabulary has 256 tokens"),
    ],
)
def test_bad_prompts_file_is_one_line(cli: Run, gemma3: str, tmp_path: Path, content: bytes, message: str) -> None:
    """A malformed prompts file exits with 2; the line says which line of the file."""
    (tmp_path / "prompts").write_bytes(content)
    assert_refused(cli("run", gemma3, "--prompts-file", tmp_path / "prompts"), message)


def test_text_without_tokenizer_is_refused(cli: Run, llama: str) -> None:
    """A text for a checkpoint without tokenizer is refused with the way out."""
    assert_refused(cli("run", llama, "x"), "has no tokenizer; give token_ids")


def test_unsupported_model_is_refused_before_its_weights(
    cli: Run, gemma3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An architecture without a reader is refused from its config alone, without loading weights."""
    for path in Path(gemma3).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "rwkv", "num_hidden_layers": 2}')
    monkeypatch.setattr(generate, "load_checkpoint", None)
    assert_refused(cli("run", tmp_path, "x"), "model_type: got 'rwkv', which has no reader")


def test_unknown_command_is_refused(cli: Run) -> None:
    """A command that does not exist exits with 2."""
    assert_refused(cli("fly"), "No such command 'fly'")


def test_missing_extra_is_named(cli: Run, gemma3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the run extra, the command says how to install it."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name))
    assert_refused(cli("run", gemma3, "x"), "run needs transformers; install the run extra with pip install")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError("no"), 1, "MemoryError: no"),
        (OSError("disk"), 1, "OSError: disk"),
        (torch.OutOfMemoryError("cuda"), 1, "the device is out of memory; use a smaller --memory (cuda)"),
    ],
)
def test_failures_have_their_codes(
    cli: Run, gemma3: str, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    """An interrupt exits with 130, a failure of the machine with 1; each prints one line."""

    def fail(*_arguments: object, **_options: object) -> list[Completion]:
        raise error

    monkeypatch.setattr(Engine, "generate", fail)
    assert cli("run", gemma3, "x") == (code, "", f"hybridkv: {line}\n")


def test_error_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    """A message of several lines is printed as one."""
    print_error("first\n  second\n\n")
    assert capsys.readouterr().err == "hybridkv: first; second\n"


def test_reader_that_goes_away_is_no_traceback(gemma3: str) -> None:
    """If the reader of stdout goes away, the command ends quietly."""
    process = start_process("run", gemma3, "a", "b", "--max-new-tokens", "3")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(timeout=120) == 1
