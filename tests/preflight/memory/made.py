"""Small models by their configuration, and what a run with them is told."""

from __future__ import annotations

from typing import Any

from palingenesis.sft.config import TrainConfig

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(**changed: Any) -> Any:
    return made("llama", **changed)


def made(kind: str, **changed: Any) -> Any:
    from transformers import AutoConfig

    sizes = {} if kind == "gpt2" else SIZES
    return AutoConfig.for_model(kind, **{**sizes, **changed})


def config(**options: Any) -> TrainConfig:
    """fp32, two micro-batches of one row of 256 tokens, no checkpointing; options as ``section__name``."""
    settings: dict[str, dict[str, Any]] = {
        "model": {"name_or_path": "made here", "torch_dtype": "float32"},
        "data": {"dataset": "none", "max_seq_length": 256},
        "train": {"gradient_checkpointing": False, "gradient_accumulation_steps": 2},
    }
    for name, value in options.items():
        section, option = name.split("__")
        settings.setdefault(section, {})[option] = value
    return TrainConfig(**settings)
