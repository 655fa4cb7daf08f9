"""A message that holds the token that ends a turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

EXPECTED = ("data.control_token",)


def run(folder: Path, *, healthy: bool) -> Any:
    made: list[Any] = rows()
    if not healthy:
        made[2]["messages"][0]["content"] += "<|im_end|>"
    return checked(folder, made)
