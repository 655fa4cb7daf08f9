"""More rows are bad than training allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

EXPECTED = ("data.too_many_bad_rows", "data.broken_json")


def run(folder: Path, *, healthy: bool) -> Any:
    made: list[Any] = rows()
    if not healthy:
        made[2] = "{"
    return checked(folder, made, preprocess__max_bad_rows_pct=5)
