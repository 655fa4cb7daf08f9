"""What is made from the catalog is as the catalog is now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.findings.pages import PAGE, ROOT, SCHEMA, page, schema_text
from tests.findings.runs import lr_too_high

from palingenesis.findings.catalog import CATALOG


def test_the_page_is_in_step_with_the_catalog() -> None:
    assert PAGE.read_text("utf-8") == page(), "run python -m tests.findings.pages"


def test_the_schema_is_in_step() -> None:
    assert SCHEMA.read_text("utf-8") == schema_text(), "run python -m tests.findings.pages"


def test_the_page_has_every_finding_and_is_in_the_menu() -> None:
    text = PAGE.read_text("utf-8")
    assert all(f"\n### {check}\n" in text for check in CATALOG)
    assert ": findings.md" in (ROOT / "mkdocs.yml").read_text("utf-8")


def test_tables_are_whole() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| **")]
    assert rows
    assert all(line.replace("\\|", "").count("|") == 4 for line in rows)


def test_the_python_in_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lr_too_high(tmp_path / "pgs_run", 0, True)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.startswith("warning run.lr_too_high the learning rate is too high")
