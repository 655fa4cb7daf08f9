"""A tokenizer that is another model's is found out, and a model's own is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from palingenesis.preflight.tokenizer_checks import check_tokenizer
from palingenesis.sft.builtin import build_tokenizer
from palingenesis.sft.config import TrainConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer("demo:tiny-chat")
    tokenizer.save_pretrained(folder)
    LlamaForCausalLM(described(len(tokenizer), tokenizer)).save_pretrained(folder)
    return folder


def described(rows: int, tokenizer: Any, **changes: Any) -> LlamaConfig:
    options = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(vocab_size=rows, **{**options, **changes})


def checks(folder: Path, rows: int | None = None, **changes: Any) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = TrainConfig(model={"name_or_path": str(folder)}, data={"dataset": "d"})
    found = check_tokenizer(config, tokenizer, described(rows or len(tokenizer), tokenizer, **changes))
    assert all(finding.fix for finding in found)
    return [finding.check for finding in found]


def test_a_model_and_its_own_tokenizer(folder: Path) -> None:
    assert checks(folder) == []
    # Rounded up to a multiple of 128, with room for tokens to come.
    assert checks(folder, 2048) == []


def test_an_end_of_text_that_is_a_word(folder: Path) -> None:
    assert checks(folder, eos_token_id=300) == ["config.special_tokens"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert checks(folder, eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id]) == []
    assert checks(folder, eos_token_id=[tokenizer.eos_token_id, 301]) == ["config.special_tokens"]


def test_a_far_larger_vocabulary(folder: Path) -> None:
    assert checks(folder, 32_000) == ["config.tokenizer_smaller"]


def test_a_head_that_was_not_saved(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors")
    assert checks(tmp_path) == []
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    assert checks(tmp_path) == ["config.head_missing"]
    assert checks(tmp_path, tie_word_embeddings=True) == []
