"""What cases are built from: a folder with a tokenizer and a small model, a file of rows, a configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.sft.data.chats import CHATML, make_tokenizer

from palingenesis.preflight.target import target_of
from palingenesis.sft.config import TrainConfig

IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|pad|>")
TEXT = "the quick brown fox jumps over a lazy dog while it is raining in Paris today"
WORDS = TEXT.split()
#: Few tokens, but of every kind; and a context that no row of these cases fills.
POSITIONS = 512


def rows(count: int = 12, *, first: int = 0, turns: int = 1) -> list[dict[str, Any]]:
    """Conversations, no two alike."""
    return [
        {
            "messages": [
                message
                for turn in range(turns)
                for message in (
                    {"role": "user", "content": sentence(first + number, 3 + (number + turn) % 4) + "?"},
                    {
                        "role": "assistant",
                        "content": f"Answer {first + number}: {sentence(number + turn, 6)}.",
                    },
                )
            ]
        }
        for number in range(count)
    ]


def sentence(start: int, count: int) -> str:
    """Words in an order of its own, with the number that makes it one of a kind."""
    return " ".join([str(start), *(WORDS[(7 * start + at) % len(WORDS)] for at in range(count))])


def write_rows(path: Path, made: Sequence[Any]) -> Path:
    """A file of rows; a text is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in made]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def save_model(
    folder: Path,
    *,
    template: str | None = CHATML,
    tokens: tuple[str, ...] = IM,
    bos: str | None = None,
    eos: str = "<|im_end|>",
    pad: str | None = "<|pad|>",
    adds_bos: bool = False,
    vocabulary: int | None = None,
    tied: bool = False,
    weights: bool = False,
) -> Any:
    """A folder with a tokenizer and a model's configuration, with random weights if ``weights``."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    made = make_tokenizer(template, tokens, bos=bos, eos=eos, adds_bos=adds_bos)
    made.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if pad is not None:
        tokenizer.pad_token = pad
        tokenizer.save_pretrained(folder)
    described = LlamaConfig(
        vocab_size=vocabulary or len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    described.save_pretrained(folder)
    if weights:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            LlamaForCausalLM(described).save_pretrained(folder)
    return tokenizer


def target(folder: Path, **options: Any) -> TrainConfig:
    """For ``folder/model`` and ``folder/rows.jsonl``; ``section__option=value`` changes the configuration."""
    given = [(name.replace("__", "."), json.dumps(value)) for name, value in options.items()]
    texts = [(name, json.loads(text) if text.startswith('"') else text) for name, text in given]
    return target_of(None, texts, str(folder / "model"), str(folder / "rows.jsonl"))


def checked(folder: Path, made: Sequence[Any], *, check: dict[str, Any] | None = None, **options: Any) -> Any:
    """The report of ``pgs validate`` on rows, with the model in the folder or the usual one."""
    from palingenesis.preflight.validate import validate

    if not (folder / "model").exists():
        save_model(folder / "model")
    write_rows(folder / "rows.jsonl", made)
    return validate(target(folder, **options), **(check or {}))
