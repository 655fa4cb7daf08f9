"""An answer that is nothing but blanks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

EXPECTED = ("data.empty_answer",)


def run(folder: Path, *, healthy: bool) -> Any:
    made: list[Any] = rows()
    if not healthy:
        made[2]["messages"][1]["content"] = "  \n"
    return checked(folder, made)
