"""The README's snippets work as printed."""

import json
import re
import shlex
from pathlib import Path

import pytest

from hybridkv.cli.main import main
from hybridkv.runner.tiny import make_tiny

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
SETUP = [text.strip() for language, text in SNIPPETS if language == "bash" and text.startswith("python3")]
COMMANDS = [
    line
    for language, text in SNIPPETS
    if language == "bash" and not text.startswith("python3")
    for line in text.strip().splitlines()
]
PYTHON = [text for language, text in SNIPPETS if language == "python"]


def test_the_python_snippets_run(capsys):
    """Each Python snippet runs on its own and leaves the values its comments promise."""
    assert len(PYTHON) == 1
    scope: dict[str, object] = {}
    exec(PYTHON[0], scope)
    assert tuple(scope["slots"].shape) == (2, 100)
    assert scope["keys"].shape[1:] == (16, 1, 256)
    assert len(PYTHON[0].strip().splitlines()) <= 21


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(command, tmp_path, monkeypatch, capsys):
    """Each command runs on a small checkpoint and exits 0."""
    make_tiny("gemma3_text", tmp_path / "checkpoint", tokenizer=True)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once"}\n{"token_ids": [1, 2, 3], "max_new_tokens": 4}\n')
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    out = capsys.readouterr().out
    if "--json" in command:
        assert json.loads(out)["verify"]["equal"]
    else:
        assert out


def test_there_are_exactly_two_set_up_commands():
    """One command installs and runs the main job, one installs and passes the tests; CI runs the latter as printed."""
    assert len(SETUP) == 2
    assert all(len(command.splitlines()) == 1 for command in SETUP)
    assert "hybridkv run gemma-3-270m" in SETUP[0]
    assert SETUP[1].endswith("python -m pytest -n auto")


def test_linked_files_exist():
    """Every relative link of the README leads to a file."""
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / target).is_file(), target
