"""A token was added to the tokenizer, and the embedding was not enlarged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows, save_model

EXPECTED = ("tokenizer.ids_outside_embedding", "tokenizer.larger_than_embedding")


def run(folder: Path, *, healthy: bool) -> Any:
    tokenizer = save_model(folder / "model")
    if not healthy:
        tokenizer.add_tokens(["lazy dog"])
        tokenizer.save_pretrained(folder / "model")
    return checked(folder, rows())
