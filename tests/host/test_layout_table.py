"""Claims about the tables of docs/layouts.md."""

from __future__ import annotations

import pytest

from benchmarks import layout_table
from hybridkv.report import PlanOptions, plan_report
from hybridkv.specs import ModelSpec

PAGE = layout_table.DOCS.read_text()


@pytest.mark.parametrize("name", ["gemma-3-27b", "Bamba-9B-v1", "Qwen3-Next-80B-A3B", "mamba2-2.7b-hf"])
def test_the_page_holds_what_the_planner_says(name: str) -> None:
    """Each context's row of a model is in the page as the benchmark makes it now."""
    rows = layout_table.model_rows(name)
    assert len(rows) == 3
    for row in rows:
        assert row in PAGE


def test_a_cell_says_sequences_tokens_and_waste() -> None:
    """A cell is what the report says of that context and layout; lengths beyond the model's own are marked."""
    report = plan_report(ModelSpec.load("Bamba-9B-v1"), 40 * 2**30, PlanOptions(contexts=(8192, 32768, 131072)))
    uniform, *_, last, own = report.layouts[:5]
    cells = layout_table.model_rows("Bamba-9B-v1")[0].strip("| ").split(" | ")
    assert cells[0] == "Bamba-9B-v1*"
    assert cells[1] == f"{uniform.max_concurrency:,} / {uniform.num_tokens:,} / {uniform.waste_fraction:.2%}".replace(
        "%", " %"
    )
    assert (last.max_concurrency, cells[4]) == (0, "0")
    assert cells[5].startswith(f"{own.max_concurrency:,} / ")


def test_the_check_finds_a_page_that_differs(tmp_path, monkeypatch, capsys) -> None:
    """`--write-docs` makes a page that `--check` accepts; a changed figure or another model is found."""
    page = tmp_path / "layouts.md"
    page.write_text(f"before\n{layout_table.BEGIN}\n{layout_table.END}\nafter\n")
    monkeypatch.setattr(layout_table, "DOCS", page)
    monkeypatch.setattr(layout_table, "known_models", lambda: ["gemma-3-1b", "LFM2-350M"])
    assert layout_table.main(["--check"]) == 1
    assert "--write-docs" in capsys.readouterr().err
    assert layout_table.main(["--write-docs"]) == 0
    assert layout_table.main(["--check"]) == 0
    written = page.read_text()
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")
    assert layout_table.main([]) == 0
    assert capsys.readouterr().out.strip() in written
    page.write_text(written.replace(" / ", " / 1", 1))
    assert layout_table.main(["--check"]) == 1
