"""Short rows padded to long ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

EXPECTED = ("data.padding",)


def run(folder: Path, *, healthy: bool) -> Any:
    made: list[Any] = rows()
    if not healthy:
        for row in made[::3]:
            row["messages"][1]["content"] += " word" * 80
    return checked(folder, made, train__per_device_batch_size=4)
