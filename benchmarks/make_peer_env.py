"""Fetch what it takes to import the peers of `tables.py`, `manager.py` beside the torch that is installed.

    python benchmarks/make_peer_env.py DIR

DIR gets the Python files of vLLM's and SGLang's wheels (downloads of about 340 and 40 MB) with SGLang's compiled prefix
tree and the kernel sources that its import looks for; the other compiled parts, which need CUDA, stay behind. It also
gets the packages that those files import, without their dependencies: torch, numpy, transformers come from the
environment that runs the benchmark, which the `dev` extra makes. Nothing is installed outside DIR.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

# By name: what of a wheel is kept beside its Python files, its metadata (from which both read their own version).
WHEELS = {"vllm==0.33.0": (), "sglang==0.5.23": ("sglang/srt/mem_cache/rust_tree_core/", "sglang/kernels/jit/")}
# What importing the block tables, the managers asks for, in the versions that the peers' own metadata asks for.
REQUIREMENTS = (
    "aiohappyeyeballs",
    "aiohttp>=3.14.4",
    "aiosignal",
    "apache-tvm-ffi==0.1.11",
    "attrs",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "compressed-tensors==0.18.0",
    "dill",
    "fastapi>=0.133.0,<0.137.0",
    "frozenlist",
    "ipython",
    "llguidance>=1.7.0,<1.8.0",
    "loguru",
    "msgspec",
    "multidict>=6.9.1",
    "openai>=2.25.0",
    "openai-harmony",
    "orjson",
    "partial-json-parser",
    "prometheus_client>=0.18.0",
    "propcache",
    "py-cpuinfo",
    "pybase64",
    "pyzmq>=25.0.0",
    "sentencepiece==0.2.1",
    "sniffio",
    "starlette>=1.0.1",
    "traitlets",
    "uvloop",
    "xgrammar==0.2.8",
    "yarl",
)


def make_environment(target: Path) -> None:
    """Fill `target` with the peers' Python files and what they import.

    Raises: subprocess.CalledProcessError if pip fails.
    """
    target.mkdir(parents=True, exist_ok=True)
    for requirement, kept in WHEELS.items():
        with tempfile.TemporaryDirectory() as downloads:
            _pip("download", "--no-deps", "--dest", downloads, requirement)
            (wheel,) = Path(downloads).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                names = [
                    name
                    for name in archive.namelist()
                    if name.endswith(".py") or ".dist-info/" in name or name.startswith(kept)
                ]
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
    print(f"next: python benchmarks/tables.py --peer {arguments.target}, or manager.py", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
