"""What every test shares. torch is imported late: many tests need none."""

from __future__ import annotations

import os

# Two threads on two busy cores cost several times the CPU of one. Set before torch is first imported, and
# inherited by every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing in the tests may reach for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def torch_seed() -> int:
    """Seeds torch's global generator, for tests that need the same numbers every time."""
    import torch

    seed = 0
    torch.manual_seed(seed)
    return seed


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A real Chromium. One for all tests: a process can start playwright only once at a time."""
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
