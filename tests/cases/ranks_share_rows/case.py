"""Batches that nobody shares out: every process trains on the same rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.cases.tried import tried

EXPECTED = ("first_step.same_rows",)


def run(folder: Path, *, healthy: bool) -> Any:
    if healthy:
        return tried(folder, world_size=2)
    whole = "accelerate.data_loader.prepare_data_loader"
    with mock.patch(whole, lambda loader, **_: SimpleNamespace(base_dataloader=loader)):
        return tried(folder, world_size=2)
