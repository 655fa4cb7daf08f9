"""Rows are longer than the model has positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import POSITIONS, checked, rows

EXPECTED = ("data.longer_than_model",)


def run(folder: Path, *, healthy: bool) -> Any:
    made = rows()
    if not healthy:
        made[2]["messages"][1]["content"] = "word " * POSITIONS
    return checked(folder, made)
