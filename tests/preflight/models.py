"""Models that were saved as a careful person saves them."""

from __future__ import annotations

import json
from pathlib import Path


def agree(folder: Path) -> None:
    """Let a model's configuration name the tokens that its tokenizer has."""
    from transformers import AutoTokenizer

    stop = AutoTokenizer.from_pretrained(folder).eos_token_id
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        values = json.loads(path.read_text("utf-8")) | {"bos_token_id": None, "eos_token_id": stop}
        path.write_text(json.dumps(values), encoding="utf-8")
