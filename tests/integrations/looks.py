"""A second, plain look at what the callbacks feed to the monitor: every position, in double precision."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tests.integrations.tiny import trainer
from torch import nn
from transformers import Trainer

from palingenesis import Monitor, MonitorConfig
from palingenesis.integrations.transformers import HealthCallback
from palingenesis.reading import Reading
from palingenesis.signals.entropy import ERROR, NAME

ALL = 10_000


class Noted(NamedTuple):
    """What one call of ``Monitor.batch`` was given."""

    step: int
    tokens: int
    weight: float | None


class Noting(Monitor):
    """Notes what it is given, and passes it on."""

    @functools.wraps(Monitor.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.counted: list[Noted] = []
        self.observed: list[tuple[int, str]] = []
        self.last_step = kwargs.get("max_steps")
        super().__init__(*args, **kwargs)

    def batch(
        self,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        shifted: bool = False,
        weight: float | None = None,
    ) -> None:
        assert labels is not None
        targets = labels if shifted else labels[..., 1:]
        self.counted.append(Noted(self.global_step + 1, int((targets != -100).sum()), weight))
        super().batch(labels, attention_mask, shifted=shifted, weight=weight)

    def observe_output(self, **given: Any) -> None:
        kind = next(name for name in ("entropies", "logits", "hidden") if name in given)
        self.observed.append((self.global_step + 1, kind))
        super().observe_output(**given)


class Readings(list[Reading]):
    """What ``on_reading`` is called with."""

    def series(self, name: str) -> list[float]:
        return [reading.scalars.get(name, math.nan) for reading in self]


def options(readings: Readings, *, entropy: bool = True, **config: Any) -> dict[str, Any]:
    """Options of a callback that looks at every step, by default with every position's entropy."""
    defaults: dict[str, Any] = {"check_every": 1, "warmup": 3, "entropy_positions": ALL}
    chosen = MonitorConfig(**{**defaults, "rl_readiness": entropy, **config})
    return {"out": None, "config": chosen, "on_reading": readings.append}


def health(readings: Readings, **config: Any) -> HealthCallback:
    return HealthCallback(**options(readings, **config))


def monitor_of(callback: Any) -> Noting:
    assert isinstance(callback.monitor, Noting)
    return callback.monitor


def plainly(
    logits: torch.Tensor, labels: torch.Tensor, *, shifted: bool, smoothing: float = 0.0
) -> tuple[list[float], float]:
    """Every loss-bearing position's entropy, and the mean cross-entropy."""
    if not shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    chosen, targets = logits.detach().double()[labels != -100], labels[labels != -100]
    entropies = torch.distributions.Categorical(logits=chosen).entropy()
    loss = nn.functional.cross_entropy(chosen, targets, label_smoothing=smoothing)
    return entropies.tolist(), float(loss)


class Looks:
    """Mixed into a trainer: looks at every training batch with a forward pass of its own.

    Its models have no dropout.
    """

    shifted = False

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # Not in compute_loss: that is where the callback looks, at the first forward pass.
        with torch.no_grad():
            logits = self.logits(model, inputs)
        smoothing = self.args.label_smoothing_factor  # type: ignore[attr-defined]
        found, mean = plainly(logits, self.labels(inputs), shifted=self.shifted, smoothing=smoothing)
        loss = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        for name, value in (("micro_batches", found), ("means", mean), ("losses", float(loss))):
            vars(self).setdefault(name, []).append(value)
        return loss

    def labels(self, inputs: Any) -> torch.Tensor:
        """What the loss is taken of."""
        labels: torch.Tensor = inputs["labels"]
        return labels

    def logits(self, model: Any, inputs: Any) -> torch.Tensor:
        labels = {"labels": inputs["labels"]} if model.config.is_encoder_decoder else {}
        result: torch.Tensor = model(
            input_ids=inputs["input_ids"], attention_mask=inputs.get("attention_mask"), **labels
        ).logits
        return result

    def steps(self, size: int = 1) -> list[float]:
        """The mean entropy of every step."""
        found = vars(self)["micro_batches"]
        return [float(np.mean(np.concatenate(found[at : at + size]))) for at in range(0, len(found), size)]


class LookingTrainer(Looks, Trainer):
    """Labels are shifted inside the model."""


class UnshiftedTrainer(Looks, Trainer):
    """Labels are targets as they stand."""

    shifted = True


def uneven(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Collates with questions masked, by a length that depends on the row, and the end padded."""
    ids = torch.tensor([row["input_ids"] for row in batch])
    mask = torch.ones_like(ids)
    labels = ids.clone()
    for row, first in zip(range(len(ids)), ids[:, 0].tolist(), strict=True):
        labels[row, : first % 9] = -100
        if first % 3 == 0:
            labels[row, -2:] = -100
            mask[row, -2:] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def uneven_trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    made = trainer(folder, *callbacks, **{"kind": LookingTrainer, **options})
    made.data_collator = uneven
    return made


def check_entropy(readings: Readings, exact: list[float]) -> None:
    """Every step's entropy was read from all positions, and is the exact one."""
    assert [reading.step for reading in readings] == list(range(1, len(exact) + 1))
    np.testing.assert_allclose(readings.series(NAME), exact, rtol=1e-5)
    assert max(readings.series(ERROR)) == 0.0


def check_weights(made: Any, noted: list[Noted], size: int) -> None:
    """Micro-batches count for what they do in the losses that the trainer went backward from."""
    assert len({one.tokens for one in noted}) > 1
    counts_for = np.array([one.tokens if one.weight == "tokens" else one.weight for one in noted])
    ratios = np.array(vars(made)["losses"]) / vars(made)["means"] / counts_for
    for step in ratios.reshape(-1, size):
        np.testing.assert_allclose(step, step[0], rtol=1e-5)
