"""A role that nobody knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

EXPECTED = ("data.bad_value",)


def run(folder: Path, *, healthy: bool) -> Any:
    made: list[Any] = rows()
    if not healthy:
        made[2]["messages"][0]["role"] = "narrator"
    return checked(folder, made)
