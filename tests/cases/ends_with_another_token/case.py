"""Never stops: answers end with one token, and generation stops at another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows, save_model

EXPECTED = ("tokenizer.end_of_turn_is_no_stop",)


def run(folder: Path, *, healthy: bool) -> Any:
    save_model(folder / "model", eos="<|im_end|>" if healthy else "<|endoftext|>")
    return checked(folder, rows())
