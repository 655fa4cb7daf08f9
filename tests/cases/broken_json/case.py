"""A line that is no JSON; the others are still checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

EXPECTED = ("data.broken_json",)


def run(folder: Path, *, healthy: bool) -> Any:
    made: list[Any] = rows()
    if not healthy:
        made[2] = '{"messages": [{"role": "user"'
    return checked(folder, made)
