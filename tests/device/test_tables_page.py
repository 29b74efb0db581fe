"""Claims about docs/tables.md."""

from __future__ import annotations

import pytest

from benchmarks import tables_page


def test_the_page_shows_what_the_code_gives(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    """Example, dialects and bytes of the page are those of today's code; a page with others is found."""
    assert tables_page.main(["--check"]) == 0
    page = tmp_path / "tables.md"
    page.write_text(tables_page.DOCS.read_text().replace("= 920", "= 921"))
    monkeypatch.setattr(tables_page, "DOCS", page)
    assert tables_page.main(["--check"]) == 1
    assert "--write-docs" in capsys.readouterr().err
    assert tables_page.main(["--write-docs"]) == 0
    assert tables_page.main(["--check"]) == 0
