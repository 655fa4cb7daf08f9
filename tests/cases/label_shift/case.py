"""Labels shifted by the collator, and again by the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

from palingenesis.sft.data import collator

EXPECTED = ("masking.labels_shifted",)


def run(folder: Path, *, healthy: bool) -> Any:
    def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = collator(0, packed=False)(samples)
        batch["labels"] = batch["labels"].roll(-1, -1)
        return batch

    return checked(folder, rows(), check={} if healthy else {"collate": collate})
