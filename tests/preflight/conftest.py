"""What tests of the commands before a run share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
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


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A real Chromium."""
    import shutil

    sync_api = pytest.importorskip("playwright.sync_api")
    found = (shutil.which(n) for n in ("chromium", "chromium-browser", "google-chrome", "chrome"))
    path = next((p for p in found if p), None)
    with sync_api.sync_playwright() as playwright:
        if path is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("no Chromium is installed")
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()
