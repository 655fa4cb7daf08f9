"""Next to nothing bears loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

EXPECTED = ("masking.little_loss",)


def run(folder: Path, *, healthy: bool) -> Any:
    made: list[Any] = rows()
    if not healthy:
        for row in made:
            row["messages"][0]["content"] = "word " * 90
            row["messages"][1]["content"] = "a"
    return checked(folder, made)
