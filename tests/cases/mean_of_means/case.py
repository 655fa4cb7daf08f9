"""A custom loss that averages each micro-batch: tokens of short answers weigh more than others."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from tests.cases.tried import tried

from palingenesis.sft.trainer import FineTuner

EXPECTED = ("first_step.accumulation",)


def _mean(self: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    value, _output = self._value(model, inputs, None)
    return value.loss_sum / value.tokens / 2


def run(folder: Path, *, healthy: bool) -> Any:
    if healthy:
        return tried(folder)
    with mock.patch.object(FineTuner, "compute_loss", _mean):
        return tried(folder)
