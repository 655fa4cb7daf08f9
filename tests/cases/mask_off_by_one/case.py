"""The mask begins one token late: the first word of every answer is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

from palingenesis.sft.data import collator

EXPECTED = ("masking.round_trip",)


def run(folder: Path, *, healthy: bool) -> Any:
    def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = collator(0, packed=False)(samples)
        for labels in batch["labels"]:
            labels[(labels != -100).nonzero()[0]] = -100
        return batch

    return checked(folder, rows(), check={} if healthy else {"collate": collate})
