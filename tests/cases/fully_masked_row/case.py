"""Loss 0 and norm 0 at batch size 1: a row in which no answer is to be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

EXPECTED = ("masking.no_loss_tokens",)


def run(folder: Path, *, healthy: bool) -> Any:
    made: list[Any] = rows()
    if not healthy:
        made[4]["messages"][1]["weight"] = 0
    return checked(folder, made)
