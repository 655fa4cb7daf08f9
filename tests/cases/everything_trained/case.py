"""The user is trained as well: labels are the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

from palingenesis.sft.data import collator

EXPECTED = ("masking.all_loss",)


def run(folder: Path, *, healthy: bool) -> Any:
    def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = collator(0, packed=False)(samples)
        batch["labels"] = batch["input_ids"].clone()
        return batch

    return checked(folder, rows(), check={} if healthy else {"collate": collate})
