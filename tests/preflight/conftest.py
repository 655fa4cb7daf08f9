"""What tests of the commands before a run share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

MODEL = "demo:tiny-chat"
ASKED = {"role": "user", "content": "What is two plus two?"}
FOUR = {"role": "assistant", "content": "It is four."}


def conversation(*turns: str) -> dict[str, Any]:
    """Turns of user and assistant."""
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[at % 2], "content": turn} for at, turn in enumerate(turns)],
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file of rows; text and bytes are written as they are."""

    def rows(*made: Mapping[str, Any] | str | bytes, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        lines = [
            row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
            for row in made
        ]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return rows
