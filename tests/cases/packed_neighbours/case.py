"""Neighbours leak: documents packed by a collator that lets positions run on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.cases.build import checked, rows

from palingenesis.sft.data import collator

EXPECTED = ("data.packing_leak",)


def run(folder: Path, *, healthy: bool) -> Any:
    def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = collator(0, packed=True)(samples)
        count = batch["input_ids"].shape[-1]
        return {
            "input_ids": batch["input_ids"],
            "labels": batch["labels"],
            "position_ids": torch.arange(count)[None],
        }

    check = {} if healthy else {"collate": collate}
    return checked(folder, rows(), check=check, data__packing=True, data__max_seq_length=256)
