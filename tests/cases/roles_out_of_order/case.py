"""Two answers in a row, and a conversation that ends with a question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

EXPECTED = ("data.role_order",)


def run(folder: Path, *, healthy: bool) -> Any:
    made: list[Any] = rows()
    if not healthy:
        made[2]["messages"].append(made[3]["messages"][1])
        made[4]["messages"].pop()
    return checked(folder, made)
