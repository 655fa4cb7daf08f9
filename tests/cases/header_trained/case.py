"""The header of the answer is trained with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

from palingenesis.sft.data import collator

EXPECTED = ("masking.header_trained",)


def run(folder: Path, *, healthy: bool) -> Any:
    def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = collator(0, packed=False)(samples)
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            first = int((labels != -100).nonzero()[0])
            labels[first - 4 : first] = ids[first - 4 : first]
        return batch

    return checked(folder, rows(), check={} if healthy else {"collate": collate})
