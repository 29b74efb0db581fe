"""What every known model holds in 40 GiB under each cache layout, as the tables of docs/layouts.md.

Without an option the tables are printed; `--write-docs` puts them into the page, `--check` exits 1 if the page differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from hybridkv.layouts import LayoutCapacity
from hybridkv.report import PlanOptions, compare_reports
from hybridkv.report.plan import LAYOUT_NAMES
from hybridkv.specs import ModelSpec, known_models

DOCS = Path(__file__).resolve().parents[1] / "docs" / "layouts.md"
BEGIN, END = "<!-- layout tables: begin -->", "<!-- layout tables: end -->"
MEMORY_BYTES = 40 * 2**30
CONTEXTS = (8192, 32768, 131072)


def model_rows(name: str) -> list[str]:
    """Return a model's row of each context's table."""
    spec = ModelSpec.load(name)
    (report,) = compare_reports([spec], MEMORY_BYTES, PlanOptions(contexts=CONTEXTS))
    rows = []
    for context in CONTEXTS:
        mark = "*" if spec.max_model_len is not None and context > spec.max_model_len else ""
        cells = [_cell(entry) for entry in report.layouts if entry.context == context]
        rows.append(f"| {name}{mark} | {' | '.join(cells)} |")
    return rows


def make_tables(names: Iterable[str]) -> str:
    """Return a table per context with a row per model."""
    rows = [model_rows(name) for name in names]
    head = f"| model | {' | '.join(LAYOUT_NAMES.values())} |\n|---|{'--:|' * len(LAYOUT_NAMES)}"
    tables = []
    for context, column in zip(CONTEXTS, zip(*rows, strict=True), strict=True):
        tables.append(f"### Sequences of {context:,} tokens\n\n{head}\n" + "\n".join(column))
    return "\n\n".join(tables)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, write or check the tables; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-docs", action="store_true", help=f"put the tables into {DOCS.name}")
    parser.add_argument("--check", action="store_true", help=f"exit 1 if {DOCS.name} holds other tables")
    options = parser.parse_args(arguments)
    tables = make_tables(known_models())
    if not options.write_docs and not options.check:
        print(tables)
        return 0
    before, rest = DOCS.read_text().split(BEGIN)
    old, after = rest.split(END)
    if options.write_docs:
        DOCS.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}")
    elif old.strip() != tables:
        print(f"{DOCS}: differs; run benchmarks/layout_table.py --write-docs", file=sys.stderr)
        return 1
    return 0


def _cell(entry: LayoutCapacity) -> str:
    if not entry.max_concurrency:
        return "0"
    return f"{entry.max_concurrency:,} / {entry.num_tokens:,} / {100 * entry.waste_fraction:.2f} %"


if __name__ == "__main__":
    sys.exit(main())
