"""A scheduler that is stepped for every micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from tests.cases.tried import tried

from palingenesis.sft.trainer import FineTuner

EXPECTED = ("first_step.schedule",)


def run(folder: Path, *, healthy: bool) -> Any:
    plain = FineTuner.create_scheduler

    def fast(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        scheduler = plain(self, num_training_steps, optimizer)
        step = scheduler.step
        scheduler.step = lambda *_: [step() for _ in range(self.args.gradient_accumulation_steps)]
        return scheduler

    if healthy:
        return tried(folder)
    with mock.patch.object(FineTuner, "create_scheduler", fast):
        return tried(folder)
