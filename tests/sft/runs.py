"""A small model, conversations of very unequal lengths, and configurations of runs over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from palingenesis.sft.builtin import build_tokenizer

TEXT = "the cat sat on a mat and then it ran over the hill to see what was there"
WORDS = TEXT.split()
LENGTH = 64


def make_model(folder: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """A Llama of two layers that has learned nothing, with the tokenizer of ``demo:tiny-chat``."""
    tokenizer = build_tokenizer("demo:tiny-chat")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * LENGTH,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # opinions strong enough for gates to differ
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_rows(path: Path, count: int, *, first: int = 0) -> Path:
    """Conversations whose answers have one to fifteen words."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(first, first + count):
            question = " ".join(WORDS[(number + i) % len(WORDS)] for i in range(1 + number % 4))
            answer = " ".join(WORDS[(3 * number + i) % len(WORDS)] for i in range(1 + (7 * number) % 15))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """A configuration of six steps; ``section__option=value`` changes it."""
    if not (folder / "model").exists():
        make_model(folder / "model")
        make_rows(folder / "rows.jsonl", 90)
        make_rows(folder / "held_out.jsonl", 7, first=500)
    made: dict[str, Any] = {
        "model": {"name_or_path": str(folder / "model"), "torch_dtype": "float32"},
        "data": {"dataset": str(folder / "rows.jsonl"), "max_seq_length": LENGTH},
        "train": {
            "output_dir": str(folder / "run"),
            "max_steps": 6,
            "per_device_batch_size": 3,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "gradient_checkpointing": False,
            "save_steps": 100,
        },
        "logging": {"check_every": 2, "health_tier2_every": 2, "health_tier3_every": 4},
    }
    for name, value in changes.items():
        section, option = name.split("__")
        made.setdefault(section, {})[option] = value
    return made


def write(folder: Path, made: dict[str, Any]) -> Path:
    """The configuration as a file."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(made), encoding="utf-8")
    return path


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics as they stand in the record."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
