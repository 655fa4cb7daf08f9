"""One row in another script and one forty times as long, among many of a kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

EXPECTED = ("data.far_scripts", "data.far_lengths")


def run(folder: Path, *, healthy: bool) -> Any:
    made: list[Any] = rows(120)
    if not healthy:
        made[7]["messages"][1]["content"] = "Съешь же ещё этих мягких французских булок " * 2
        made[9]["messages"][1]["content"] = "word " * 1500
    return checked(folder, made, data__max_seq_length=None)
