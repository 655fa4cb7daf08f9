"""HealthCallback in real runs of Lightning's ``Trainer``."""

from __future__ import annotations

import copy
import csv
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from palingenesis import load_run
from palingenesis.errors import ConfigError, RecordExistsError
from palingenesis.integrations.lightning import HealthCallback, _callback_class


class Net(pl.LightningModule):
    def __init__(self, *, poison_at: int | None = None, detach_at: int | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)
        self.drop = nn.Dropout(0.1)
        self.poison_at, self.detach_at = poison_at, detach_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.first(batch).relu()
        if self.detach_at is not None and self.global_step + 1 >= self.detach_at:
            hidden = hidden.detach()
        loss = (self.second(self.drop(hidden)) - batch.sum(-1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss * float("nan") if self.global_step + 1 == self.poison_at else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def batches() -> DataLoader[torch.Tensor]:
    data = torch.randn(400, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(list(data), batch_size=4)  # type: ignore[arg-type]


def health(out: Path, **options: Any) -> HealthCallback:
    return HealthCallback(out=out, **{"check_every": 1, "warmup": 3, **options})


def fit(folder: Path, module: pl.LightningModule, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "max_steps": 12,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    checkpoint = options.pop("ckpt_path", None)
    trainer = pl.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**defaults, **options})
    trainer.fit(module, batches(), ckpt_path=checkpoint)
    return trainer


class Norms(pl.Callback):
    """Layer norms and losses computed without the monitor, where nothing is clipped."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        squares = [
            float(p.grad.double().square().sum()) for p in module.second.parameters() if p.grad is not None
        ]
        self.norms.append(sum(squares) ** 0.5)


def test_gradients_are_read_before_clipping_and_weights_are_bit_identical(tmp_path: Path) -> None:
    finals = []
    for watched in (False, True):
        module = net()
        callbacks = [health(tmp_path / "run")] if watched else []
        fit(tmp_path, module, *callbacks, max_steps=50, gradient_clip_val=0.1)
        finals.append(module.state_dict())
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
    run = load_run(tmp_path / "run")
    assert run.verdict == "HEALTHY"
    assert run.metrics["train/grad_norm_raw"].min() > 2 * 0.1

    seen = Norms()
    fit(tmp_path, net(), seen, health(tmp_path / "unclipped"))
    run = load_run(tmp_path / "unclipped")
    np.testing.assert_allclose(run.layers["second"][:-1], seen.norms[1:], rtol=1e-5)
    np.testing.assert_allclose(run.metrics["train/loss"], seen.losses, rtol=1e-6)


def test_four_micro_batches_are_one_step_with_the_loss_of_all(tmp_path: Path) -> None:
    seen = Norms()
    trainer = fit(tmp_path, net(), seen, health(tmp_path / "run"), accumulate_grad_batches=4, max_steps=5)
    run = load_run(tmp_path / "run")
    assert run.metrics["step"].tolist() == [1, 2, 3, 4, 5]
    assert trainer.global_step == 5
    # Lightning has divided each by 4 already.
    np.testing.assert_allclose(run.metrics["train/loss"], np.reshape(seen.losses, (5, 4)).sum(1), rtol=1e-6)


def test_a_nan_stops_training_through_the_trainer(tmp_path: Path) -> None:
    trainer = fit(tmp_path, net(poison_at=5), health(tmp_path / "run", stop_on="critical"))
    assert trainer.global_step == 5
    run = load_run(tmp_path / "run")
    (event,) = [e for e in run.events if e.event == "nonfinite"]
    assert (event.step, event.source) == (5, "loss and gradients")
    assert (run.verdict, run.info["end"]["reason"]) == ("CRITICAL", "completed")


def test_a_layer_that_is_detached_in_mid_run_is_named_and_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="csv", version="")
    callback = health(tmp_path / "run")
    fit(tmp_path, net(detach_at=8), callback, logger=logger, log_every_n_steps=2)
    alarms = [e for e in load_run(tmp_path / "run").events if e.event == "alarm"]
    assert [(e.layer, e.diagnosis) for e in alarms] == [("first", "no_gradient")]
    with (tmp_path / "csv" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    ours = [row for row in rows if row["health/checks"]]
    assert [int(float(row["health/checks"])) for row in ours] == [2, 4, 6, 8, 10, 12]
    assert [row["step"] for row in ours] == [row["step"] for row in rows if row["loss"]]
    assert [int(float(row["health/alarms_active"])) for row in ours] == [0, 0, 0, 0, 1, 1]
    norms = load_run(tmp_path / "run").metrics["train/grad_norm_raw"][1::2]
    np.testing.assert_allclose([float(row["train/grad_norm_raw"]) for row in ours], norms, rtol=1e-5)


class Fails(pl.Callback):
    def __init__(self, error: BaseException, step: int) -> None:
        self.error, self.step = error, step

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step == self.step:
            raise self.error


def test_an_exception_ends_the_record_with_its_name_and_passes_unchanged(tmp_path: Path) -> None:
    mine = RuntimeError("the disk is on fire")
    with pytest.raises(RuntimeError) as caught:
        fit(tmp_path, net(), health(tmp_path / "run"), Fails(mine, 5))
    assert caught.value is mine
    run = load_run(tmp_path / "run")
    assert run.verdict == "INTERRUPTED"
    assert "RuntimeError: the disk is on fire" in run.verdict_sentence
    assert run.info["end"]["steps"] == 5
    assert run.verify().ok


def test_resuming_goes_on_with_steps_baselines_and_record(tmp_path: Path) -> None:
    whole = health(tmp_path / "whole")
    fit(tmp_path, net(), whole)
    trainer = fit(tmp_path, net(), health(tmp_path / "run"), max_steps=6)
    trainer.save_checkpoint(tmp_path / "six.ckpt")
    again = health(tmp_path / "run")
    fit(tmp_path, net(), again, ckpt_path=tmp_path / "six.ckpt")
    run = load_run(tmp_path / "run")
    assert run.info["resumed_from"] == [6]
    assert run.metrics["step"].tolist() == list(range(1, 13))
    assert run.judged.tolist()[6] > 0
    assert run.verdict == "HEALTHY"
    assert whole.monitor is not None
    assert again.monitor is not None
    assert again.monitor.global_step == whole.monitor.global_step == 12


def test_the_same_callback_twice(tmp_path: Path) -> None:
    callback = health(tmp_path / "run", overwrite=True)
    for steps in (4, 6):
        fit(tmp_path, net(), callback, max_steps=steps)
        assert load_run(tmp_path / "run").info["end"]["steps"] == steps
    with pytest.raises(RecordExistsError, match="already holds the run"):
        fit(tmp_path, net(), health(tmp_path / "run"))


class Adversaries(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(8, 8), nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (-1, 1), strict=True):  # type: ignore[arg-type]
            optimizer.zero_grad()
            self.manual_backward(sign * self.discriminator(self.generator(batch)).mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (self.generator, self.discriminator)]


def test_of_several_optimizers_each_callback_watches_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folders = {0: tmp_path / "generator", 1: tmp_path / "discriminator"}
    trainer = fit(
        tmp_path, Adversaries(), *[health(out, optimizer=i) for i, out in folders.items()], max_steps=24
    )
    assert trainer.global_step == 24
    losses = []
    for out in folders.values():
        run = load_run(out)
        assert run.info["layers"] == [out.name]
        assert run.metrics["step"].tolist() == list(range(1, 13))
        losses.append(run.metrics["train/loss"])
    # One backward pass each, with opposite signs, one step of the generator in between.
    np.testing.assert_allclose(losses[0], -losses[1], atol=0.1)
    with pytest.raises(ConfigError, match="optimizer=2 does not exist"):
        fit(tmp_path, Adversaries(), health(tmp_path / "none", optimizer=2))


def test_loss_and_gradients_under_mixed_precision_are_without_the_scale(tmp_path: Path) -> None:
    runs = []
    for name, plugins in (("plain", []), ("mixed", [_half_precision()])):
        fit(tmp_path, net(), health(tmp_path / name), plugins=plugins, max_steps=8)
        runs.append(load_run(tmp_path / name))
    plain, mixed = runs
    for column in ("train/loss", "train/grad_norm_raw"):
        np.testing.assert_allclose(mixed.metrics[column], plain.metrics[column], rtol=0.05)


def _half_precision() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))


def test_a_closure_that_is_evaluated_again_counts_one_step(tmp_path: Path) -> None:
    class Repeated(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=1e-3, max_iter=3)

    torch.manual_seed(0)
    trainer = fit(tmp_path, Repeated(), health(tmp_path / "run"), max_steps=4)
    assert trainer.global_step == 4
    assert load_run(tmp_path / "run").metrics["step"].tolist() == [1, 2, 3, 4]


def test_the_callback_can_be_copied_and_pickled(tmp_path: Path) -> None:
    callback = health(tmp_path / "run", stop_on="warning", optimizer=0)
    fit(tmp_path, net(), callback, max_steps=3)
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert (twin.out, twin.stop_on, twin.monitor) == (tmp_path / "run", "warning", None)


def test_bad_options_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="stop_on=True cannot be used"):
        HealthCallback(stop_on=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="optimizer=-1 cannot be used"):
        HealthCallback(optimizer=-1)


def test_the_other_package_of_the_same_name_is_used_when_it_is_the_one_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert issubclass(HealthCallback, pl.Callback)
    other = types.SimpleNamespace(Callback=type("Callback", (), {}))
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    monkeypatch.setitem(sys.modules, "pytorch_lightning", other)
    assert _callback_class() is other.Callback
