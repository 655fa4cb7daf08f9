"""The template refuses the rows that begin with a system message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows, save_model
from tests.sft.data.chats import GEMMA

EXPECTED = ("masking.rows_refused",)


def run(folder: Path, *, healthy: bool) -> Any:
    made: list[Any] = rows()
    if not healthy:
        made[2]["messages"].insert(0, {"role": "system", "content": "Be brief."})
    tokens = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
    save_model(folder / "model", template=GEMMA, tokens=tokens, bos="<bos>", eos="<end_of_turn>", pad="<eos>")
    return checked(folder, made)
