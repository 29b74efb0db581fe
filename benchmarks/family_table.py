"""What of every family was compared with Hugging Face's own generation, as the table of docs/families.md.

Without an option the table is printed; `--write-docs` puts it into the page. `--check` compares everything again and
exits 1 if a family is unequal or the page lists other families, caches or runs; ties and differences of logits, which
vary with the machine, are not compared with the page.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- family table: begin -->", "<!-- family table: end -->"
HEAD = "| family | caches | token budgets | preemptions | ties | largest logit difference |\n|---|---|---|--:|---|--:|"
BLOCK_SIZE = 4
PREEMPTED_BUDGET = 16


@dataclass(frozen=True)
class Row:
    """One family's outcome."""

    family: str
    caches: str
    budgets: str
    num_preemptions: int
    ties: str
    logit_difference: float
    problem: str | None

    @property
    def fixed(self) -> tuple[str, ...]:
        """The columns that do not depend on the machine."""
        return self.family, self.caches, self.budgets

    def __str__(self) -> str:
        cells = (*self.fixed, str(self.num_preemptions), self.ties or "none", f"{self.logit_difference:.0e}")
        return f"| {' | '.join(cells)} |"


def measure(family: str) -> Row:
    """Run a family at every budget, then preempted at random steps."""
    # Late: as a script this file finds the tests only once the root is on the path.
    import torch
    from transformers import logging

    from hybridkv.runner import EngineConfig
    from tests.run.parity import BUDGETS, MEMORY, TinyFamily, logit_tolerance, windowed

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    problem, ties, difference, num_preemptions = None, [], 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        tiny = TinyFamily(family, Path(folder), "float32", windowed(family))
        for budget, preempt_every in [*((budget, 0) for budget in BUDGETS), (PREEMPTED_BUDGET, 1)]:
            run = tiny.run(EngineConfig(MEMORY, BLOCK_SIZE, max_num_batched_tokens=budget, preempt_every=preempt_every))
            difference = max(difference, run.max_logit_difference)
            num_preemptions += run.stats.num_preemptions
            ties += [f"prompt {t.prompt_idx} token {t.token_idx} ({t.gap:.0e})" for t in run.verification.ties]
            if not run.verification.equal:
                problem = f"budget {budget}: {run.verification.first_difference}"
            elif run.max_logit_difference >= logit_tolerance(family):
                problem = f"budget {budget}: logits differ by {run.max_logit_difference:.1e}"
    kinds = ", ".join(caches(tiny.spec))
    return Row(
        family, kinds, " ".join(map(str, BUDGETS)), num_preemptions, ", ".join(dict.fromkeys(ties)), difference, problem
    )


def measure_all(families: Sequence[str], num_jobs: int) -> list[Row]:
    """Measure families in processes of their own."""
    with ProcessPoolExecutor(num_jobs, get_context("spawn"), sys.path.insert, (0, str(ROOT))) as pool:
        return list(pool.map(measure, families))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, write or check the table; return the exit code."""
    sys.path.insert(0, str(ROOT))
    from hybridkv.runner.tiny_configs import TINY_CONFIGS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="print these only")
    parser.add_argument("--write-docs", action="store_true", help=f"put the table into {DOCS.name}")
    parser.add_argument("--check", action="store_true", help=f"exit 1 if {DOCS.name} is outdated or a family unequal")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    options = parser.parse_args(arguments)
    families = options.families or list(TINY_CONFIGS)
    rows = measure_all(families, options.jobs)
    for row in rows:
        if row.problem is not None:
            print(f"{row.family}: {row.problem}", file=sys.stderr)
    failed = any(row.problem is not None for row in rows)
    table = "\n".join([HEAD, *map(str, rows)])
    if options.write_docs and not failed and not options.families:
        before, rest = DOCS.read_text().split(BEGIN)
        DOCS.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")
    elif options.check and fixed_columns(DOCS.read_text()) != [row.fixed for row in rows]:
        print(f"{DOCS}: differs; run benchmarks/family_table.py --write-docs", file=sys.stderr)
        return 1
    elif not options.check:
        print(table)
    return int(failed)


def fixed_columns(page: str) -> list[tuple[str, ...]]:
    """Return the columns of a page's table that do not depend on the machine."""
    table = page.split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|"))[:3] for line in table]


def caches(spec) -> Iterator[str]:
    """Yield what the layers of a spec keep, each kind with its number of layers."""
    kinds: dict[str, int] = {}
    for layer in spec.layers:
        for cache in layer.caches:
            lifecycle = cache.lifecycle
            if lifecycle.kind == "state":
                kind = f"{lifecycle.family} state"
            else:
                latent = cache.shares_kv_with is None and any(tensor.name == "latent" for tensor in cache.tensors)
                kind = lifecycle.kind.replace("_", " ") + (" (latents)" if latent else "")
            kind += " (shared)" if cache.shares_kv_with is not None else ""
            kinds[kind] = kinds.get(kind, 0) + 1
    return (f"{count} {kind}" for kind, count in sorted(kinds.items()))


if __name__ == "__main__":
    sys.exit(main())
