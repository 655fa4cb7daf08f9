"""A pretrained model whose weights were left at random: its first loss is about ln(vocabulary)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.cases.tried import configured, tried

from palingenesis.preflight.first_steps_trainer import samples_for
from palingenesis.sft.data import collator
from palingenesis.sft.model import load_model, load_tokenizer

EXPECTED = ("first_step.loss_at_random",)


def run(folder: Path, *, healthy: bool) -> Any:
    if healthy:
        _pretrain(folder)
    return tried(folder, pretrained=True)


def _pretrain(folder: Path) -> None:
    """Let the model learn something of its rows, and save it."""
    config = configured(folder)
    tokenizer = load_tokenizer(config)
    model: Any = load_model(config, tokenizer).train()
    rows = [
        {"input_ids": list(sample.encoded.input_ids), "labels": list(sample.encoded.labels)}
        for sample in samples_for(config, tokenizer)[:32]
    ]
    batch = collator(int(tokenizer.pad_token_id), packed=False)(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.save_pretrained(folder / "model")
