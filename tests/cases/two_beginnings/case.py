"""Two BOS: the template writes one, and the collator has the tokenizer add another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cases.build import IM, checked, rows, save_model
from tests.sft.data.chats import CHATML

from palingenesis.sft.data import collator

EXPECTED = ("tokenizer.double_bos",)


TEMPLATE = "{{ bos_token }}" + CHATML


def run(folder: Path, *, healthy: bool) -> Any:
    tokenizer = save_model(folder / "model", template=TEMPLATE, tokens=(*IM, "<s>"), bos="<s>", adds_bos=True)

    def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        begin = [] if healthy else [tokenizer.bos_token_id]
        given = [
            {
                "input_ids": [*begin, *sample["input_ids"]][: len(sample["input_ids"])],
                "labels": [*[-100] * len(begin), *sample["labels"]][: len(sample["input_ids"])],
            }
            for sample in samples
        ]
        return collator(0, packed=False)(given)

    return checked(folder, rows(), check={"collate": collate})
