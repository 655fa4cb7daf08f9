"""Labels vanish: the answers of long rows are cut off, some of them whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

EXPECTED = ("data.answers_cut", "masking.no_loss_tokens")


def run(folder: Path, *, healthy: bool) -> Any:
    made: list[Any] = rows()
    if not healthy:
        made[3]["messages"][0]["content"] = "word " * 300
        made[5]["messages"][1]["content"] = "word " * 300
    return checked(folder, made, data__max_seq_length=200)
