"""Evaluation rows that are trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows, write_rows

EXPECTED = ("data.eval_leak",)


def run(folder: Path, *, healthy: bool) -> Any:
    held_out = rows(4, first=100)
    if not healthy:
        held_out[1] = rows()[3]
    path = write_rows(folder / "held_out.jsonl", held_out)
    return checked(folder, rows(), data__eval_dataset=str(path))
