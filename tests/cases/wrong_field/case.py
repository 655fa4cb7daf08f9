"""Some rows have their messages under another name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

EXPECTED = ("data.missing_field",)


def run(folder: Path, *, healthy: bool) -> Any:
    made: list[Any] = rows()
    if not healthy:
        made[2] = {"dialogue": made[2]["messages"]}
    return checked(folder, made)
