"""A tokenizer that puts a BOS before every text, and a template that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import IM, checked, rows, save_model
from tests.sft.data.chats import CHATML

EXPECTED = ("tokenizer.missing_bos",)


def run(folder: Path, *, healthy: bool) -> Any:
    begins = "{{ bos_token }}" if healthy else ""
    save_model(folder / "model", template=begins + CHATML, tokens=(*IM, "<s>"), bos="<s>", adds_bos=True)
    return checked(folder, rows())
