"""Block managers side by side: decode steps, admissions, prefix searches.

    python benchmarks/make_peer_env.py DIR                      once: fetches vLLM 0.33, SGLang 0.5.23
    python benchmarks/manager.py --peer DIR [--check] [--json] [--cases ...] [--rounds 11]

One process on one core; in each round every system runs a block of operations, in turns; a time is the median of a
block, a ratio the median over rounds of (peer's time / our time) of the same round. Times are those of the thread on
the core, so that other jobs of the machine count less. Free memory is full of evictable cache, as on a server that has
been up for a while.

    decode            256 rows at 8K tokens compute one token each: allocate, evict, free what left a window, hash
    admit, H %        a prompt of 8,192 tokens of which H % are cached: hash, look up, allocate, publish, finish
    search, hashed    32,768 cached tokens are found, their hashes made; "holes": window blocks of the last 28K are gone
    search            the same with hashes at hand

    vLLM                        its KVCacheManager with the calls that its scheduler makes, sha256 as by default
    SGLang, Rust/Python core    its UnifiedRadixCache and allocators, pages of 16 tokens, of 1 for Bamba; no hashes
    numpy floor                 decode only: arrays in, nothing checked, cached or hashed

SGLang's allocation runs its own torch code in place of its GPU kernels (see `manager_sglang.py`). Prompts, tokens come
in each system's own currency, made outside the timed part. Outputs are compared: tokens found, blocks held.

`--check` exits 1 if a target is missed or a peer cannot be set up; unequal outputs raise in any case.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from manager_floor import Floor
from manager_ours import Ours
from manager_peers import Manager, VllmManager, VllmModules, import_vllm
from manager_runs import AdmissionRun, DecodeRun, Run, SearchRun
from manager_sglang import SglangManager, SglangModules, import_sglang
from manager_workloads import BAMBA, GEMMA, GPT_OSS, LLAMA, Shape
from side_by_side import Row, interleave, rows_of, run_command

VLLM, RUST, PYTHON = "vLLM", "SGLang, Rust core", "SGLang, Python core"
Peers: TypeAlias = tuple[VllmModules, SglangModules]


@dataclass(frozen=True)
class Case:
    """One workload of one model; `targets` are least ratios by peer, a peer without one is for information."""

    shape: Shape
    make_run: Callable[[Shape], Run]
    targets: dict[str, float] = field(default_factory=dict)


def _admission(hit_percent: int) -> Callable[[Shape], Run]:
    return lambda _shape: AdmissionRun(hit_percent)


def _search(*, has_holes: bool = False, hashes: bool = False) -> Callable[[Shape], Run]:
    return lambda _shape: SearchRun(has_holes=has_holes, hashes=hashes)


# Alone, a search may take three times as long as one that compares tokens in Rust.
_SEARCH, _HASHED = {RUST: 1 / 3}, {VLLM: 20.0}
_AHEAD: dict[str, float] = {RUST: 1, PYTHON: 1}
CASES = {
    "decode, Llama-3.1-8B": Case(LLAMA, DecodeRun, {VLLM: 20, **_AHEAD}),
    "decode, Gemma-3-27B": Case(GEMMA, DecodeRun, {VLLM: 50, RUST: 2, PYTHON: 2}),
    "decode, gpt-oss-20b": Case(GPT_OSS, DecodeRun, {RUST: 2, PYTHON: 2}),
    "decode, Bamba-9B": Case(BAMBA, DecodeRun, {VLLM: 100, **_AHEAD}),
    **{f"admit, {hit} %, Llama-3.1-8B": Case(LLAMA, _admission(hit), _AHEAD) for hit in (0, 50, 100)},
    **{f"admit, {hit} %, Gemma-3-27B": Case(GEMMA, _admission(hit), {VLLM: 15, **_AHEAD}) for hit in (0, 50, 100)},
    **{f"admit, {hit} %, gpt-oss-20b": Case(GPT_OSS, _admission(hit), _AHEAD) for hit in (0, 50, 100)},
    "search, hashed, Llama-3.1-8B": Case(LLAMA, _search(hashes=True), _HASHED),
    "search, hashed, Gemma-3-27B": Case(GEMMA, _search(hashes=True), _HASHED),
    "search, hashed, holes, Gemma-3-27B": Case(GEMMA, _search(has_holes=True, hashes=True), _HASHED),
    "search, Llama-3.1-8B": Case(LLAMA, _search(), _SEARCH),
    "search, Gemma-3-27B": Case(GEMMA, _search(), _SEARCH),
    "search, holes, Gemma-3-27B": Case(GEMMA, _search(has_holes=True), _SEARCH),
}


def run_case(name: str, peers: Peers | None, num_rounds: int) -> list[Row]:
    """Measure one case.

    Raises: RuntimeError if a system's output is not the expected one.
    """
    case = CASES[name]
    run = case.make_run(case.shape)
    systems = _systems(case.shape, run, peers)
    for system in systems:
        run.set_up(system)
    seconds = interleave(
        systems, num_rounds, run.next_block, lambda system, steps: statistics.median(run.time_block(system, steps))
    )
    for system in systems:
        run.check(f"{name}: {system.name}", system)
    return rows_of(name, Ours.name, seconds, case.targets)


def _systems(shape: Shape, run: Run, peers: Peers | None) -> list[Manager | Floor]:
    systems: list[Manager | Floor] = [Ours(shape, run.num_rows)]
    if run.is_decode:
        systems.append(Floor(shape))
    if peers is not None:
        systems.append(VllmManager(peers[0], shape, run.num_rows))
        systems += [SglangManager(peers[1], shape, run.num_rows, core=core) for core in ("rust", "python")]
    return systems


def _import_peers(folder: Path) -> Peers:
    return import_vllm(folder), import_sglang(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 where `--check` finds a target missed or no peer."""
    return run_command(__doc__, list(CASES), _import_peers, run_case, argv)


if __name__ == "__main__":
    sys.exit(main())
