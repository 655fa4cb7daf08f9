"""The run's own trainer over a few samples, with nothing left behind: no files, no draws, no dropout."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from palingenesis.errors import ConfigError
from palingenesis.preflight.samples import Reader, Refused, Sample, rows_of, sources_of
from palingenesis.sft.data import IGNORED
from palingenesis.sft.stream import mask_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from palingenesis.sft.config import TrainConfig
    from palingenesis.sft.trainer import FineTuner

#: Rows that are read to choose samples from.
ROWS = 64
#: Micro-batches of a step here, at most: two show what any number does.
MICRO_BATCHES = 2


def samples_for(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Samples of the first rows of every source, without those that training leaves out."""
    reader = Reader(tokenizer, mask_options(config))
    found: list[Sample] = []
    for source, row in rows_of(sources_of(config, "train"), ROWS):
        read = reader.read(source, row)
        found += [] if isinstance(read, Refused) else read
    if not any(label != IGNORED for sample in found for label in sample.encoded.labels[1:]):
        raise ConfigError(
            f"none of the first {ROWS} rows of the training data can be trained on: run pgs validate"
        )
    return found


def make_trainer(
    config: TrainConfig,
    tokenizer: Any,
    model: Any,
    samples: Sequence[Sample],
    folder: Path,
    planned: int,
) -> FineTuner:
    """The trainer of a run over some samples, without record, trackers, evaluation and checkpoints."""
    from datasets import Dataset  # type: ignore[import-untyped]
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy

    from palingenesis.sft.arguments import objective_options, trainer_arguments
    from palingenesis.sft.data import collator, pack
    from palingenesis.sft.trainer import FineTuner

    arguments = trainer_arguments(config, folder, planned, evaluates=False)
    arguments.max_steps = planned
    arguments.gradient_accumulation_steps = min(MICRO_BATCHES, config.train.gradient_accumulation_steps)
    arguments.save_strategy, arguments.logging_strategy = SaveStrategy.NO, IntervalStrategy.NO
    arguments.dataloader_num_workers = 0
    arguments._n_gpu = min(1, arguments.n_gpu)
    dataset = Dataset.from_dict(
        {
            "input_ids": [list(sample.encoded.input_ids) for sample in samples],
            "labels": [list(sample.encoded.labels) for sample in samples],
        }
    )
    if config.data.packing:
        dataset = pack(dataset, int(config.data.max_seq_length or 0))
    return FineTuner(
        **objective_options(config),
        evaluation=None,
        on_numbers=lambda step, logs: dict(logs),
        model=model,
        args=arguments,
        train_dataset=dataset,
        processing_class=tokenizer,
        data_collator=collator(tokenizer.pad_token_id, packed=config.data.packing),
    )


def batches_of_ranks(trainer: FineTuner, world_size: int) -> list[list[int]]:
    """Fingerprints of the batches that each process of a run would get, shared out as accelerate does."""
    from accelerate.data_loader import prepare_data_loader  # type: ignore[import-untyped]
    from torch.utils.data import DataLoader

    from palingenesis.sft.stream import fingerprint

    dataset: Any = trainer.train_dataset
    found = []
    for rank in range(world_size if world_size > 1 else 0):
        loader: Any = DataLoader(
            dataset,
            batch_size=trainer.args.per_device_train_batch_size,
            sampler=trainer._get_train_sampler(dataset),
            collate_fn=fingerprint,
        )
        shared = prepare_data_loader(
            loader, num_processes=world_size, process_index=rank, put_on_device=False
        )
        found.append([int(each) for each in shared.base_dataloader])
    return found


def row_of(sample: Sample, *, packed: bool) -> dict[str, Any]:
    """A sample as the collator takes it."""
    ids = list(sample.encoded.input_ids)
    row: dict[str, Any] = {"input_ids": ids, "labels": list(sample.encoded.labels)}
    return row | {"seq_lengths": [len(ids)]} if packed else row


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """The time in which two passes over the same rows give the same numbers."""
    kept: list[tuple[Any, str, float]] = []
    for module in model.modules():
        names = ("p",) if "Dropout" in type(module).__name__ else ("attention_dropout", "dropout")
        for name in names:
            value = getattr(module, name, None)
            if isinstance(value, float) and value > 0:
                kept.append((module, name, value))
                setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


@contextmanager
def untouched_random_numbers() -> Iterator[None]:
    """Python's, numpy's and torch's random numbers go on as if nothing had been drawn in between."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
