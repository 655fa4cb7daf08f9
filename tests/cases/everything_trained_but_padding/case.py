"""Labels are the input, but for what pads, which also ends turns: the plain-text collator of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows, save_model

from palingenesis.sft.data import collator

EXPECTED = ("masking.all_loss", "masking.end_of_turn_untrained")


def run(folder: Path, *, healthy: bool) -> Any:
    tokenizer = save_model(folder / "model", pad="<|im_end|>")

    def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = collator(tokenizer.pad_token_id, packed=False)(samples)
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][batch["input_ids"] == tokenizer.pad_token_id] = -100
        return batch

    check = {} if healthy else {"collate": collate}
    return checked(folder, rows(), check=check, train__per_device_batch_size=2)
