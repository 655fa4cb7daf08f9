"""Padding bears loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

from palingenesis.sft.data import collator

EXPECTED = ("masking.pad_trained",)


def run(folder: Path, *, healthy: bool) -> Any:
    def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = collator(0, packed=False)(samples)
        batch["labels"][batch["attention_mask"] == 0] = 0
        return batch

    check = {} if healthy else {"collate": collate}
    return checked(folder, rows(), check=check, train__per_device_batch_size=3)
