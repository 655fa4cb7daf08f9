"""Every problem that people hit, as a small case: found where the fault is, and nothing found in its twin.

A case is a folder with ``case.py``, which has

    EXPECTED   the ids of the findings that the fault must make
    run        ``run(folder, healthy=…)``: makes data, template, tokenizer and configuration in ``folder``,
               with the fault or without, and returns the report of the command that looks at it
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from palingenesis.findings import Report
from palingenesis.findings.catalog import CATALOG

HERE = Path(__file__).parent
CASES = sorted(path.parent.name for path in HERE.glob("*/case.py"))


def run(name: str, folder: Path, *, healthy: bool) -> tuple[Report, tuple[str, ...]]:
    case: Any = import_module(f"tests.cases.{name}.case")
    return case.run(folder, healthy=healthy), case.EXPECTED


@pytest.mark.parametrize("name", CASES)
def test_the_fault_is_found_and_its_twin_is_silent(name: str, tmp_path: Path) -> None:
    broken, expected = run(name, tmp_path / "broken", healthy=False)
    found = {finding.check: finding for finding in broken.findings}
    assert set(expected) <= set(found), broken.findings
    assert broken.code == 1 or all(found[check].severity == "info" for check in expected)
    for finding in broken.findings:
        assert finding.check in CATALOG
        assert finding.evidence or finding.check in ("masking.template_refused", "tokenizer.double_bos")

    twin, _ = run(name, tmp_path / "healthy", healthy=True)
    assert twin.findings == ()
    assert twin.code == 0
