"""Models, data and trainers small enough that a whole run takes a fraction of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import BpeTrainer
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

VOCABULARY = 64
SENTENCES = [
    f"the {a} {b} the {c}" for a in ("cat", "dog") for b in ("sees", "hears") for c in ("sun", "sea")
]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def gpt2() -> GPT2LMHeadModel:
    """With dropout, so that a disturbed random number generator shows."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def token_rows(count: int = 64, length: int = 12) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, VOCABULARY, (count, length), generator=generator).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **{**defaults, **options})


def trainer(
    folder: Path,
    *callbacks: TrainerCallback,
    model: nn.Module | None = None,
    kind: type[Trainer] = Trainer,
    **options: Any,
) -> Trainer:
    return kind(
        llama() if model is None else model,
        arguments(folder, **options),
        train_dataset=token_rows(),
        eval_dataset=token_rows(4),
        callbacks=list(callbacks),
    )


def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = Whitespace()
    bpe.train_from_iterator(
        SENTENCES, BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<unk>", "<pad>", "</s>"])
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, unk_token="<unk>", pad_token="<pad>", eos_token="</s>", model_max_length=16
    )


class At(TrainerCallback):
    """Does something at the beginning or the end of one step."""

    def __init__(self, step: int, action: Any, *, end: bool = False) -> None:
        self.step, self.action, self.end = step, action, end

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.end and state.global_step + 1 == self.step:
            self.action(**kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.end and state.global_step == self.step:
            self.action(**kwargs)


def poison(model: nn.Module, **_: Any) -> None:
    """Make everything not a number."""
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
