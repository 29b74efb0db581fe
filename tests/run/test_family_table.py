"""Claims about the table of docs/families.md."""

import pytest

from benchmarks import family_table
from hybridkv.runner.tiny import FAMILIES
from tests.run.live_engines import tiny_spec
from tests.run.parity import BUDGETS

PAGE = family_table.DOCS.read_text()


def test_the_page_lists_every_family_once() -> None:
    """The page has a row for each family that can be made and run, with the caches of its layers and all budgets."""
    budgets = " ".join(map(str, BUDGETS))
    expected = [(family, ", ".join(family_table.caches(tiny_spec(family))), budgets) for family in FAMILIES]
    assert family_table.fixed_columns(PAGE) == expected


def test_a_family_is_measured_as_the_page_says() -> None:
    """Measuring a family again finds it equal, with preemptions, and the columns of the page."""
    row = family_table.measure("lfm2")
    assert row.problem is None
    assert row.num_preemptions >= 3
    assert 0 < row.logit_difference < 5e-3
    assert row.fixed in family_table.fixed_columns(PAGE)


def test_the_check_finds_a_page_that_differs(tmp_path, monkeypatch, capsys) -> None:
    """`--write-docs` makes a page that `--check` accepts; a page that lists something else, or a problem, is found."""
    page = tmp_path / "families.md"
    page.write_text(f"before\n{family_table.BEGIN}\n{family_table.END}\nafter\n")
    row = family_table.Row("lfm2", "2 full attention", "1 7", 4, "", 1e-5, None)
    rows = [row]
    monkeypatch.setattr(family_table, "DOCS", page)
    monkeypatch.setattr(family_table, "measure_all", lambda _families, _jobs: rows)
    assert family_table.main(["--check"]) == 1
    assert "--write-docs" in capsys.readouterr().err
    assert family_table.main(["--write-docs"]) == 0
    assert family_table.main(["--check"]) == 0
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("\nafter\n")
    assert family_table.main([]) == 0
    assert str(row) in capsys.readouterr().out
    page.write_text(page.read_text().replace("2 full", "3 full"))
    assert family_table.main(["--check"]) == 1
    written = page.read_text()
    rows[0] = family_table.Row("lfm2", "2 full attention", "1 7", 4, "", 1.0, "budget 7: logits differ by 1.0e+00")
    assert family_table.main(["--write-docs"]) == 1
    assert "lfm2: budget 7: logits differ" in capsys.readouterr().err
    assert page.read_text() == written


@pytest.mark.full
def test_the_whole_table_is_right() -> None:
    """Every family of the page is measured again and equal."""
    assert family_table.main(["--check"]) == 0
