"""Garbage after reload: tied weights that were saved as two, and had drifted apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tests.cases.build import checked, rows, save_model

EXPECTED = ("tokenizer.tied_weights_differ",)


def run(folder: Path, *, healthy: bool) -> Any:
    save_model(folder / "model", tied=True, weights=True)
    path = folder / "model" / "model.safetensors"
    weights = load_file(path)
    head = weights["model.embed_tokens.weight"].clone()
    if not healthy:
        head[5] += 0.25
    save_file({**weights, "lm_head.weight": head}, path, metadata={"format": "pt"})
    return checked(folder, rows())
