"""Escape codes of a terminal in the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

EXPECTED = ("data.control_characters",)


def run(folder: Path, *, healthy: bool) -> Any:
    made: list[Any] = rows()
    made[1]["messages"][1]["content"] = "def f():\n\treturn 1\r\n"
    if not healthy:
        made[2]["messages"][1]["content"] = "\x1b[31mred\x1b[0m"
    return checked(folder, made)
