"""Fetch what it takes to import the peer of `tables.py`, vLLM's block tables, beside the torch that is installed.

    python benchmarks/make_peer_env.py DIR

DIR gets the Python files of vLLM's wheel (a download of about 340 MB; the compiled parts, which need CUDA, stay behind)
together with the packages that those files import, without their dependencies: torch, numpy, transformers come from the
environment that runs the benchmark, which the `dev` extra makes. Nothing is installed outside DIR.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

VLLM = "vllm==0.33.0"
# What importing `vllm.v1.worker.block_table` asks for, in the versions that vLLM's own metadata asks for.
REQUIREMENTS = (
    "aiohappyeyeballs",
    "aiohttp>=3.14.4",
    "aiosignal",
    "apache-tvm-ffi==0.1.11",
    "attrs",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "fastapi>=0.133.0,<0.137.0",
    "frozenlist",
    "llguidance>=1.7.0,<1.8.0",
    "msgspec",
    "multidict>=6.9.1",
    "openai>=2.25.0",
    "openai-harmony",
    "partial-json-parser",
    "prometheus_client>=0.18.0",
    "propcache",
    "py-cpuinfo",
    "pybase64",
    "pyzmq>=25.0.0",
    "sniffio",
    "starlette>=1.0.1",
    "uvloop",
    "xgrammar==0.2.8",
    "yarl",
)


def make_environment(target: Path) -> None:
    """Fill `target` with vLLM's Python files and what they import.

    Raises: subprocess.CalledProcessError if pip fails.
    """
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as downloads:
        _pip("download", "--no-deps", "--dest", downloads, VLLM)
        (wheel,) = Path(downloads).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            # The metadata too: vLLM reads its own version from it.
            names = [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name]
            archive.extractall(target, names)
    _pip("install", "--no-deps", "--upgrade", "--target", str(target), *REQUIREMENTS)


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"], check=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 where pip fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, metavar="DIR", help="made if it does not exist")
    arguments = parser.parse_args(argv)
    try:
        make_environment(arguments.target)
    except subprocess.CalledProcessError as error:
        print(f"pip: exit {error.returncode} from {' '.join(error.cmd)}; see its message above", file=sys.stderr)
        return 1
    print(f"next: python benchmarks/tables.py --peer {arguments.target}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
