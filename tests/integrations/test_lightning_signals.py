"""What Lightning's ``HealthCallback`` feeds: tokens, weights, entropy, the last step, and no harm."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger
from tests.integrations.looks import Readings, check_entropy, monitor_of, options, plainly, uneven
from tests.integrations.tiny import VOCABULARY, gpt2, llama
from torch import nn
from torch.utils.data import DataLoader

from palingenesis.integrations.lightning import HealthCallback
from palingenesis.signals.entropy import NAME
from palingenesis.signals.tokens import EFFICIENCY

pytestmark = pytest.mark.usefixtures("noting")


def data() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, VOCABULARY, (32, 12), generator=torch.Generator().manual_seed(2))
    return [uneven([{"input_ids": row} for row in pair.tolist()]) for pair in ids.split(2)]


def hooks(module: nn.Module) -> int:
    return sum(len(one._forward_hooks) for one in module.modules())


class Net(pl.LightningModule):
    """A language model whose loss is its own; looks at every batch apart."""

    def __init__(self, make: Any = llama) -> None:
        super().__init__()
        self.model = make()
        self.found: list[list[float]] = []
        self.means: list[float] = []
        self.hooks: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            logits = self.logits(batch)
        found, mean = plainly(logits, batch["labels"], shifted=False)
        self.found.append(found)
        self.means.append(mean)

    def logits(self, batch: Any) -> torch.Tensor:
        given = {name: value for name, value in batch.items() if name != "labels"}
        logits: torch.Tensor = self.model(**given).logits
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.hooks.append(hooks(self))
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert hooks(self) == 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(**batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def steps(self, size: int) -> list[float]:
        groups = [self.found[at : at + size] for at in range(0, len(self.found), size)]
        return [float(np.mean(np.concatenate(group))) for group in groups]


def health(readings: Readings, **config: Any) -> HealthCallback:
    return HealthCallback(**options(readings, **config))


def fit(folder: Path, module: pl.LightningModule, *callbacks: pl.Callback, **chosen: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**defaults, **chosen})
    trainer.fit(module, DataLoader(data(), batch_size=None), DataLoader(data()[:2], batch_size=None))  # type: ignore[arg-type]
    return trainer


def test_tokens_weights_and_entropy_of_every_step(tmp_path: Path) -> None:
    readings = Readings()
    callback, module = health(readings), Net()
    fit(tmp_path, module, callback, accumulate_grad_batches=2)
    check_entropy(readings, module.steps(2))
    noted = monitor_of(callback)
    assert [one.tokens for one in noted.counted] == [len(found) for found in module.found]
    assert [one.step for one in noted.counted] == [1 + i // 2 for i in range(16)]
    assert {one.weight for one in noted.counted} == {1.0}
    every = 16 * 2 * 12
    assert readings[-1].scalars[EFFICIENCY] == pytest.approx(sum(map(len, module.found)) / every)
    assert hooks(module) == 0


def test_losses_are_means_of_means(tmp_path: Path) -> None:
    """What the weight 1 says."""
    module = Net()
    losses: list[float] = []

    class Losses(pl.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
            losses.append(float(loss))

    fit(tmp_path, module, Losses(), accumulate_grad_batches=2)
    np.testing.assert_allclose(losses, np.array(module.means) / 2, rtol=1e-5)


def test_weights_are_bit_identical(tmp_path: Path) -> None:
    finals = []
    readings = Readings()
    for callbacks in ([], [health(readings, entropy_positions=8)]):
        torch.manual_seed(0)
        module = Net(gpt2)
        fit(tmp_path, module, *callbacks)
        finals.append(module.state_dict())
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
    assert not np.isnan(readings.series(NAME)).any()


def test_hooks_stand_only_in_steps_that_are_logged(tmp_path: Path) -> None:
    callback, module = health(Readings(), logging_steps=4), Net()
    fit(tmp_path, module, callback, max_steps=8, accumulate_grad_batches=2)
    assert module.hooks == [0] * 6 + [2, 1] + [0] * 6 + [1] * 2
    plain = Net()
    fit(tmp_path, plain, health(Readings(), entropy=False))
    assert plain.hooks == [0] * 16


class OwnLoss(Net):
    """Shifts its labels itself, so that nobody else can know which output they belong to."""

    callback: HealthCallback | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits, labels = self.logits(batch)[:, :-1], batch["labels"][:, 1:]
        if self.callback is not None and self.callback.monitor is not None:
            self.callback.monitor.observe_output(logits=logits, labels=labels, shifted=True)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("told", [False, True])
def test_a_module_that_takes_its_loss_itself_says_what_it_puts_out(tmp_path: Path, told: bool) -> None:
    readings = Readings()
    callback, module = health(readings), OwnLoss()
    module.callback = callback if told else None
    fit(tmp_path, module, callback)
    if told:
        check_entropy(readings, module.steps(1))
    else:
        assert not any(NAME in reading.scalars for reading in readings)
    assert len(monitor_of(callback).counted) == 16


def test_a_compiled_model_is_hooked_from_outside(tmp_path: Path) -> None:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    counts = []
    readings = Readings()
    for callbacks in ([], [health(readings, logging_steps=2)]):
        torch._dynamo.reset()
        graphs.clear()
        module = Net()
        module.model = torch.compile(module.model, backend=backend)  # type: ignore[assignment]
        fit(tmp_path, module, *callbacks, max_steps=4)
        counts.append(len(graphs))
    torch._dynamo.reset()
    assert counts[0] == counts[1] > 0
    found = {reading.step: reading.scalars[NAME] for reading in readings if NAME in reading.scalars}
    assert found.keys() == {2, 4}
    np.testing.assert_allclose(list(found.values()), np.array(module.steps(1))[1::2], rtol=1e-5)


def test_nothing_stands_where_the_whole_step_is_compiled(tmp_path: Path) -> None:
    class Counting(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

    readings = Readings()
    module = Counting()
    compiled = torch.compile(module, backend="eager")
    callback = health(readings)
    fit(tmp_path, compiled, callback, max_steps=2)  # type: ignore[arg-type]
    torch._dynamo.reset()
    assert len(monitor_of(callback).counted) == 2
    assert monitor_of(callback).observed == []


def test_batches_of_another_kind_are_left_alone(tmp_path: Path) -> None:
    class Plain(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for batch in (torch.ones(2, 12), [torch.ones(2, 12)], {"x": torch.ones(2, 12)}):
        callback = health(Readings())

        class Taking(Plain):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                return super().training_step(torch.ones(2, 12), batch_idx)

        trainer = pl.Trainer(
            default_root_dir=tmp_path,
            max_steps=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
        )
        trainer.fit(Taking(), DataLoader([batch] * 4, batch_size=None))  # type: ignore[arg-type]
        assert monitor_of(callback).counted == []


# -- the last step -----------------------------------------------------------------------------------------


class Manual(Net):
    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.count = optimizers

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        chosen = self.optimizers()
        loss = self.model(**batch).loss
        self.manual_backward(loss)
        for optimizer in chosen if isinstance(chosen, list) else [chosen]:
            optimizer.step()  # type: ignore[union-attr]
            optimizer.zero_grad()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [torch.optim.SGD(parameters[i :: self.count], lr=0.1) for i in range(self.count)]


@pytest.mark.parametrize(
    ("make", "chosen", "last"),
    [
        (Net, {"max_steps": 3}, 3),
        (Net, {"max_epochs": 2, "accumulate_grad_batches": 3}, 12),
        (Net, {"max_epochs": 2, "max_steps": 40, "limit_train_batches": 4}, 8),
        (Net, {"max_epochs": -1, "max_steps": 5}, 5),
        (Manual, {"max_steps": 4}, 4),
        (Manual, {"limit_train_batches": 2}, None),
        (lambda: Manual(2), {"max_steps": 4}, None),
    ],
)
def test_the_monitor_knows_the_last_step_where_it_is_known(
    tmp_path: Path, make: Any, chosen: dict[str, Any], last: int | None
) -> None:
    callback = health(Readings())
    trainer = fit(tmp_path, make(), callback, **chosen)
    assert monitor_of(callback).last_step == last
    assert last is None or trainer.global_step == last


def test_an_accumulation_that_changes_does_not_keep_training_from_starting(tmp_path: Path) -> None:
    callback = health(Readings())
    schedule = GradientAccumulationScheduler({0: 4, 1: 2})
    trainer = fit(tmp_path, Net(), callback, schedule, max_epochs=2)
    assert trainer.global_step == 12
    assert len(monitor_of(callback).counted) == 32


def test_readings_reach_the_loggers(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="csv", version="")
    module = Net()
    fit(tmp_path, module, health(Readings()), logger=logger, log_every_n_steps=2, max_steps=6)
    with (tmp_path / "csv" / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["health/checks"]]
    exact = module.steps(1)
    assert len(rows) == 3
    assert all(float(row[EFFICIENCY]) > 0.3 for row in rows)
    np.testing.assert_allclose([float(row[NAME]) for row in rows], exact[1::2], rtol=1e-5)
