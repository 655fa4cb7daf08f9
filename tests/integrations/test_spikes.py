"""Batches of spikes in real runs of trainers: the samples that are told are those that were trained on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from datasets import Dataset, IterableDataset
from tests.integrations.tiny import SENTENCES, arguments, gpt2, llama, token_rows, tokenizer
from tests.test_batches import Counted
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer
from trl import SFTConfig, SFTTrainer

from palingenesis import MonitorConfig, load_run
from palingenesis.integrations import lightning, transformers
from palingenesis.record.spikes import Spike, read_spikes

FAULT = 33  # the last of an epoch's steps in most of these runs, and a short one


def health(out: Path, **options: Any) -> transformers.HealthCallback:
    return transformers.HealthCallback(out=out, **{"check_every": 4, "warmup": 3, **options})


class Faulty(Trainer):
    """Multiplies the loss of one step, and remembers what each micro-batch was made of."""

    factor = 100.0

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        step = self.state.global_step + 1
        self.seen = getattr(self, "seen", {})
        self.seen.setdefault(step, []).append(inputs["input_ids"].clone())
        loss = super().training_step(model, inputs, *rest)
        return loss * self.factor if step == FAULT else loss


class FaultySFT(Faulty, SFTTrainer):
    """The same with TRL's."""


def only(folder: Path) -> Spike:
    (found,) = read_spikes(folder)
    return found


def rows_of(seen: list[torch.Tensor]) -> list[list[int]]:
    return [row for batch in seen for row in batch.tolist()]


def run(folder: Path, *, data: Any = None, kind: type[Faulty] = Faulty, **options: Any) -> Faulty:
    made = {"max_steps": FAULT + 3, "gradient_accumulation_steps": 3, **options}
    trained = kind(
        llama(),
        arguments(folder / "t", **made),
        train_dataset=token_rows() if data is None else data,
        callbacks=[health(folder / "run")],
        processing_class=tokenizer(),
    )
    trained.train()
    return trained


# -- transformers ------------------------------------------------------------------------------------------


def test_shuffled_samples_are_found_in_the_data_set(tmp_path: Path) -> None:
    # 31 micro-batches an epoch, 3 a step: the eleventh step of an epoch has one.
    trained = run(tmp_path, data=token_rows(62))
    spike, rows = only(tmp_path / "run"), token_rows(62)
    assert (spike.step, spike.notes) == (FAULT, ())
    for step, told in ((FAULT, spike.samples), (FAULT - 1, spike.samples_before)):
        assert [rows[sample.index or 0]["input_ids"] for sample in told] == rows_of(trained.seen[step])
    assert [sample.text for sample in spike.samples] == [
        tokenizer().decode(row) for row in rows_of(trained.seen[FAULT])
    ]
    assert [len(micro.samples) for micro in spike.microbatches] == [2]
    assert [len(micro.samples) for micro in spike.before] == [2, 2, 2]
    # The micro-batches' losses are the step's.
    assert spike.loss == pytest.approx(sum(micro.loss or math.nan for micro in spike.microbatches), rel=1e-5)


def test_a_resumed_run_finds_them_too(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 20}
    run(tmp_path, **{**options, "max_steps": 20})
    again = Faulty(
        llama(),
        arguments(tmp_path / "t", max_steps=FAULT + 3, gradient_accumulation_steps=3, **options),
        train_dataset=token_rows(),
        callbacks=[health(tmp_path / "run")],
    )
    again.train(resume_from_checkpoint=True)
    spike, rows = only(tmp_path / "run"), token_rows()
    assert [rows[one.index or 0]["input_ids"] for one in spike.samples] == rows_of(again.seen[FAULT])
    assert spike.samples[0].text is None


def test_columns_that_training_does_not_use_are_told(tmp_path: Path) -> None:
    rows = [{**row, "source": f"s{i % 3}", "score": i / 64} for i, row in enumerate(token_rows())]
    run(tmp_path, data=Dataset.from_list(rows))
    for sample in only(tmp_path / "run").samples:
        assert sample.index is not None and sample.source == f"s{sample.index % 3}"
        assert sample.values == {"score": sample.index / 64}


@pytest.mark.parametrize("how", [pytest.param("stream", marks=pytest.mark.slow), "by length"])
def test_where_the_order_is_lost_the_batch_itself_is_told(tmp_path: Path, how: str) -> None:
    def stream() -> Any:
        yield from token_rows(400)

    data: Any = IterableDataset.from_generator(stream) if how == "stream" else token_rows()
    options = {} if how == "stream" else {"train_sampling_strategy": "group_by_length"}
    trained = run(tmp_path, data=data, **options)
    spike = only(tmp_path / "run")
    assert [list(one.first_tokens) for one in spike.samples] == rows_of(trained.seen[FAULT])
    assert {one.index for one in spike.samples} == {None}


def test_weights_are_bit_identical_though_the_loss_spikes(tmp_path: Path) -> None:
    finals = []
    for callbacks in ([], [health(tmp_path / "run")]):
        trained = Faulty(
            gpt2(),
            arguments(tmp_path / "t", max_steps=FAULT + 3),
            train_dataset=token_rows(),
            callbacks=callbacks,
        )
        trained.train()
        finals.append((trained.model.state_dict(), torch.get_rng_state()))
    assert only(tmp_path / "run").step == FAULT
    assert all(torch.equal(finals[0][0][name], finals[1][0][name]) for name in finals[0][0])
    assert torch.equal(finals[0][1], finals[1][1])


def test_ordinary_steps_run_the_same_operations_with_and_without(tmp_path: Path) -> None:
    seen = []
    for files in (0, 50):
        config = MonitorConfig(spike_files=files, check_every=4, warmup=3)
        trained = Faulty(
            llama(),
            arguments(tmp_path / "t", max_steps=10),
            train_dataset=token_rows(),
            callbacks=[transformers.HealthCallback(out=tmp_path / f"run{files}", config=config)],
        )
        with Counted() as counted:
            trained.train()
        seen.append(counted.seen)
    assert seen[0] == seen[1] != []


def test_the_training_configuration_is_recorded(tmp_path: Path) -> None:
    run(tmp_path, max_steps=5, lr_scheduler_type="cosine", warmup_steps=2, learning_rate=3e-4)
    told = load_run(tmp_path / "run").training
    options = told.pop("options")
    assert told == {
        "by": "transformers",
        "learning_rate": 3e-4,
        "schedule": "cosine",
        "warmup_steps": 2,
        "total_steps": 5,
        "batch_size": 2,
        "accumulation": 3,
        "processes": 1,
        "rows_a_step": 6,
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "optimizer": "AdamW",
        "precision": "float32",
        "attention": "sdpa",
        "seed": 42,
        "logging_steps": 1,
    }
    assert options["adam_beta2"] == 0.999 and options["max_steps"] == 5
    assert not any("token" in name and "num" not in name for name in options if name.startswith("hub_"))


# -- TRL ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_packed_and_plain_rows_of_trl(tmp_path: Path, packing: bool) -> None:
    texts = [f"{first} {second}" for first in SENTENCES for second in SENTENCES]
    config = SFTConfig(
        str(tmp_path / "t"),
        max_steps=FAULT + 2,
        per_device_train_batch_size=2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        packing=packing,
        max_length=48,
    )
    trained = FaultySFT(
        llama(),
        config,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        callbacks=[health(tmp_path / "run")],
    )
    trained.train()
    spike = only(tmp_path / "run")
    rows = list(trained.train_dataset)
    told = [token for sample in spike.samples for token in sample.first_tokens]
    assert told == [token for batch in trained.seen[FAULT] for row in batch.tolist() for token in row]
    for sample in spike.samples:
        row = rows[sample.index or 0]["input_ids"]
        assert " ".join(map(str, sample.first_tokens)) in " ".join(map(str, row))
        assert sample.text is not None and sample.text.removesuffix(" </s>") in texts
    training = load_run(tmp_path / "run").training
    assert (training["by"], training["packing"], training["max_length"]) == ("trl", packing, 48)


# -- Lightning ---------------------------------------------------------------------------------------------


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 8, "api_key": "not for records"})
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch) - batch.sum(-1, keepdim=True)).square().mean()
        return loss * (100.0 if self.global_step + 1 == 26 else 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_lightning(tmp_path: Path, shuffle: bool) -> None:
    data = list(torch.randn(60, 8, generator=torch.Generator().manual_seed(1)))
    loader: Any = DataLoader(data, batch_size=4, shuffle=shuffle)  # type: ignore[arg-type]
    finals = []
    for out in (None, tmp_path / "run"):
        pl.seed_everything(0, verbose=False)
        watch = lightning.HealthCallback(out=out, check_every=4, warmup=3)
        net = Net()
        pl.Trainer(
            default_root_dir=tmp_path,
            callbacks=[watch] if out else [],
            max_steps=35,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        ).fit(net, loader)
        finals.append(net.state_dict())
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
    spike = only(tmp_path / "run")
    # 15 batches an epoch, the last of them a step of its own: 8 steps an epoch, so step 26 is its second.
    wanted = [None] * 8 if shuffle else [8, 9, 10, 11, 12, 13, 14, 15]
    assert (spike.step, [sample.index for sample in spike.samples]) == (26, wanted)
    if not shuffle:
        means = [sample.values["0"]["mean"] for sample in spike.samples]
        assert means == pytest.approx([float(data[i].mean()) for i in range(8, 16)], abs=1e-6)
    told = load_run(tmp_path / "run").training
    assert told["options"] == {"width": 8}
    assert (told["by"], told["schedule"], told["learning_rate"]) == ("lightning", "CosineAnnealingLR", 1e-3)
    assert (told["rows_a_step"], told["total_steps"], told["weight_decay"]) == (8, 35, 0.1)
