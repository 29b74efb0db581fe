"""Ways for tests to call the command line."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridkv.cli.main import main

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]


def cli_in_process(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that calls the command line in this process; it gives exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def run_json(cli: Run, *arguments: object) -> dict:
    """Return the JSON object of a run that has to go well."""
    code, out, err = cli("run", *arguments, "--json", "--memory", "64MiB")
    assert (code, err) == (0, "")
    return json.loads(out)


def start_process(*arguments: str) -> subprocess.Popen[str]:
    """Start the command line as a process of its own."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "hybridkv", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=pipe, stderr=pipe)
