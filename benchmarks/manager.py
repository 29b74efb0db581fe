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

import argparse
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from manager_floor import Floor
from manager_ours import Ours
from manager_peers import Manager, VllmManager, VllmModules, import_vllm
from manager_runs import AdmissionRun, DecodeRun, Run, SearchRun
from manager_sglang import SglangManager, SglangModules, import_sglang
from manager_workloads import BAMBA, GEMMA, GPT_OSS, LLAMA, Shape

VLLM, RUST, PYTHON = "vLLM", "SGLang, Rust core", "SGLang, Python core"
Peers: TypeAlias = tuple[VllmModules, SglangModules]


@dataclass(frozen=True)
class Case:
    """One workload of one model; `targets` are least ratios by peer, a peer without one is for information."""

    shape: Shape
    make_run: Callable[[Shape], Run]
    targets: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One case of one peer; times are medians over rounds, ratios of the same round, None where we do not run."""

    case: str
    peer: str
    our_us: float | None
    peer_us: float
    ratio: float | None
    lowest_ratio: float | None
    highest_ratio: float | None
    target: float | None
    num_rounds: int

    @property
    def is_met(self) -> bool:
        """Whether the ratio meets its target."""
        return self.target is None or (self.ratio is not None and self.ratio >= self.target)


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
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[float]] = {system.name: [] for system in systems}
    for round_idx in range(num_rounds + 1):
        steps = run.next_block()
        turn = round_idx % max(len(systems), 1)
        for system in systems[turn:] + systems[:turn]:
            median = statistics.median(run.time_block(system, steps))
            # The first round warms up.
            if round_idx:
                seconds[system.name].append(median)
    for system in systems:
        run.check(f"{name}: {system.name}", system)
    gc.unfreeze()
    return [_row(name, peer, seconds, case.targets.get(peer)) for peer in seconds if peer != Ours.name]


def _systems(shape: Shape, run: Run, peers: Peers | None) -> list[Manager | Floor]:
    systems: list[Manager | Floor] = [Ours(shape, run.num_rows)]
    if run.is_decode:
        systems.append(Floor(shape))
    if peers is not None:
        systems.append(VllmManager(peers[0], shape, run.num_rows))
        systems += [SglangManager(peers[1], shape, run.num_rows, core=core) for core in ("rust", "python")]
    return systems


def _row(case: str, peer: str, seconds: dict[str, list[float]], target: float | None) -> Row:
    theirs, ours = seconds[peer], seconds.get(Ours.name)
    ratios = None if ours is None else [b / a for a, b in zip(ours, theirs, strict=True)]
    return Row(
        case=case,
        peer=peer,
        our_us=None if ours is None else 1e6 * statistics.median(ours),
        peer_us=1e6 * statistics.median(theirs),
        ratio=None if ratios is None else statistics.median(ratios),
        lowest_ratio=None if ratios is None else min(ratios),
        highest_ratio=None if ratios is None else max(ratios),
        target=target,
        num_rounds=len(theirs),
    )


def format_table(rows: Sequence[Row]) -> str:
    """Render the rows as a Markdown table."""
    lines = ["| case | peer | ours us | peer us | ratio (lowest-highest) | target |", "|---|---|--:|--:|--:|--:|"]
    for row in rows:
        ours = ratios = "-"
        if row.ratio is not None:
            ours, ratios = f"{row.our_us:.0f}", f"{row.ratio:.3g} ({row.lowest_ratio:.3g}-{row.highest_ratio:.3g})"
        target = "" if row.target is None else f"{row.target:.3g}"
        lines.append(f"| {row.case} | {row.peer} | {ours} | {row.peer_us:.0f} | {ratios} | {target} |")
    return "\n".join(lines)


def _peers(folder: Path | None) -> Peers | None:
    if folder is None:
        print("no --peer: ours against the floor only", file=sys.stderr)
        return None
    try:
        return import_vllm(folder), import_sglang(folder)
    except ImportError as error:
        print(
            f"--peer: got {folder}, a peer does not import from it ({error}); make_peer_env.py makes one",
            file=sys.stderr,
        )
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 where `--check` finds a target missed or no peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, metavar="DIR", help="folder that make_peer_env.py made")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds of each case")
    parser.add_argument("--core", type=int, help="core to run on; the last one that is allowed by default")
    parser.add_argument("--json", action="store_true", help="print one JSON list of rows in place of the table")
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed or the peer is")
    arguments = parser.parse_args(argv)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if arguments.core is None else arguments.core})
    torch.set_num_threads(1)
    peers = _peers(arguments.peer)
    rows = []
    for name in arguments.cases:
        rows += run_case(name, peers, arguments.rounds)
        print(f"{name}: done", file=sys.stderr)
    print(json.dumps([asdict(row) for row in rows], indent=1) if arguments.json else format_table(rows))
    missed = [row for row in rows if not row.is_met]
    for row in missed:
        got = "not run" if row.ratio is None else f"{row.ratio:.3g}"
        print(f"missed: {row.case} against {row.peer}: {got}, expected {row.target:.3g}", file=sys.stderr)
    if arguments.check and peers is None:
        print("check: the peers are missing", file=sys.stderr)
    return 1 if arguments.check and (missed or peers is None) else 0


if __name__ == "__main__":
    sys.exit(main())
