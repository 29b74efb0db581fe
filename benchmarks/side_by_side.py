"""What benchmarks of systems side by side share: interleaved rounds, ratios, a table, the command line."""

import argparse
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch


class Named(Protocol):
    """A system under test."""

    name: str


SystemT = TypeVar("SystemT", bound=Named)
BlockT = TypeVar("BlockT")
PeersT = TypeVar("PeersT")


@dataclass(frozen=True)
class Row:
    """One case against one peer; times are medians over rounds, ratios of the same round."""

    case: str
    peer: str
    our_us: float
    peer_us: float
    ratio: float
    lowest_ratio: float
    highest_ratio: float
    target: float | None
    num_rounds: int

    @property
    def is_met(self) -> bool:
        """Whether the ratio meets its target."""
        return self.target is None or self.ratio >= self.target


def interleave(
    systems: Sequence[SystemT],
    num_rounds: int,
    next_block: Callable[[], BlockT],
    time_block: Callable[[SystemT, BlockT], float],
) -> dict[str, list[float]]:
    """Let every system run a block of operations in each round, in turns; return the seconds of each round by name.

    `time_block` returns a block's seconds; one more round before the others warms up.
    """
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[float]] = {system.name: [] for system in systems}
    for round_idx in range(num_rounds + 1):
        block = next_block()
        turn = round_idx % len(systems)
        for system in [*systems[turn:], *systems[:turn]]:
            median = time_block(system, block)
            if round_idx:
                seconds[system.name].append(median)
    gc.unfreeze()
    return seconds


def rows_of(case: str, ours: str, seconds: Mapping[str, Sequence[float]], targets: Mapping[str, float]) -> list[Row]:
    """Compare the system `ours` with every other one."""
    rows = []
    for peer, theirs in seconds.items():
        if peer == ours:
            continue
        ratios = [b / a for a, b in zip(seconds[ours], theirs, strict=True)]
        rows.append(
            Row(
                case=case,
                peer=peer,
                our_us=1e6 * statistics.median(seconds[ours]),
                peer_us=1e6 * statistics.median(theirs),
                ratio=statistics.median(ratios),
                lowest_ratio=min(ratios),
                highest_ratio=max(ratios),
                target=targets.get(peer),
                num_rounds=len(ratios),
            )
        )
    return rows


def format_table(rows: Sequence[Row]) -> str:
    """Render the rows as a Markdown table."""
    lines = ["| case | peer | ours us | peer us | ratio (lowest-highest) | target |", "|---|---|--:|--:|--:|--:|"]
    for row in rows:
        ratios = f"{row.ratio:.3g} ({row.lowest_ratio:.3g}-{row.highest_ratio:.3g})"
        target = "" if row.target is None else f"{row.target:.3g}"
        lines.append(f"| {row.case} | {row.peer} | {row.our_us:.0f} | {row.peer_us:.0f} | {ratios} | {target} |")
    return "\n".join(lines)


def import_peers(folder: Path | None, load: Callable[[Path], PeersT]) -> PeersT | None:
    """Return what `load` imports from a folder, None without one or if it does not import."""
    if folder is None:
        print("no --peer: ours against the floor only", file=sys.stderr)
        return None
    try:
        return load(folder)
    except ImportError as error:
        print(
            f"--peer: got {folder}, a peer does not import from it ({error}); make_peer_env.py makes one",
            file=sys.stderr,
        )
        return None


def run_command(
    description: str | None,
    cases: Sequence[str],
    load: Callable[[Path], PeersT],
    run_case: Callable[[str, PeersT | None, int], list[Row]],
    argv: Sequence[str] | None,
    problems: Sequence[str] = (),
) -> int:
    """Run the command line on one core; return 1 where `--check` finds a target missed, no peer or other problems."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, metavar="DIR", help="folder that make_peer_env.py made")
    parser.add_argument("--cases", nargs="+", choices=list(cases), default=list(cases), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds of each case")
    parser.add_argument("--core", type=int, help="core to run on; the last one that is allowed by default")
    parser.add_argument("--json", action="store_true", help="print one JSON list of rows in place of the table")
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed or the peer is")
    arguments = parser.parse_args(argv)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if arguments.core is None else arguments.core})
    torch.set_num_threads(1)
    peers = import_peers(arguments.peer, load)
    rows = []
    for name in arguments.cases:
        rows += run_case(name, peers, arguments.rounds)
        print(f"{name}: done", file=sys.stderr)
    print(json.dumps([asdict(row) for row in rows], indent=1) if arguments.json else format_table(rows))
    missed = [row for row in rows if not row.is_met]
    for row in missed:
        print(f"missed: {row.case} against {row.peer}: {row.ratio:.3g}, expected {row.target:.3g}", file=sys.stderr)
    for problem in [*problems, *(["the peer is missing"] if arguments.check and peers is None else [])]:
        print(problem, file=sys.stderr)
    return 1 if arguments.check and (missed or problems or peers is None) else 0
