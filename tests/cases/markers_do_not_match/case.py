"""Every label -100: a collator looks for a marker whose ids are others in context than alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows, save_model

from palingenesis.sft.data import collator

EXPECTED = ("masking.no_loss_tokens",)


def run(folder: Path, *, healthy: bool) -> Any:
    tokenizer = save_model(folder / "model")
    # Alone, the marker is tokenised without the line break that precedes it in a conversation.
    marker = "<|im_start|>assistant" if healthy else " assistant:"

    def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        found = [list(sample["input_ids"]) for sample in samples]
        begins = tokenizer(marker, add_special_tokens=False)["input_ids"]
        masked = [after_marker(ids, begins, tokenizer) for ids in found]
        return collator(0, packed=False)(
            [{"input_ids": ids, "labels": labels} for ids, labels in zip(found, masked, strict=True)]
        )

    return checked(folder, rows(), check={"collate": collate})


def after_marker(ids: list[int], marker: list[int], tokenizer: Any) -> list[int]:
    """Labels for what follows the marker and its line break, up to the end of the turn."""
    labels = [-100] * len(ids)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for start in range(len(ids) - len(marker)):
        if ids[start : start + len(marker)] == marker:
            first = start + len(marker) + 1
            last = ids.index(end, first)
            labels[first : last + 1] = ids[first : last + 1]
    return labels
