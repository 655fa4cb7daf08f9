"""Evaluations beside the training loss: the best one, and what came after it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from palingenesis.findings.trends import above_recent
from palingenesis.runlogs.table import RunLog


class Evaluation(NamedTuple):
    """One evaluation loss over the run."""

    name: str
    times: int
    best_step: float
    best: float
    last_step: float
    last: float
    gap: float | None
    """The last one less the training loss around it; ``None`` where there is none."""

    @property
    def above_best(self) -> float:
        """How far the last one is above the best, as a share of that."""
        return (self.last - self.best) / abs(self.best) if self.best else 0.0


def evaluations_of(log: RunLog) -> list[Evaluation]:
    """Every evaluation loss of a log: ``eval/loss`` first, then by source."""
    names = [name for name in log.columns if name.startswith("eval/") and name.endswith("/loss")]
    found = []
    for name in ["eval/loss", *sorted(set(names) - {"eval/loss"})]:
        column = log.live(name).finite
        if not column:
            continue
        best = int(np.argmin(column.value))
        found.append(
            Evaluation(
                name.removesuffix("/loss").removeprefix("eval/") if name != "eval/loss" else name,
                len(column.value),
                float(column.step[best]),
                float(column.value[best]),
                float(column.step[-1]),
                float(column.value[-1]),
                _gap(log, float(column.step[-1]), float(column.value[-1])),
            )
        )
    return found


def _gap(log: RunLog, step: float, value: float) -> float | None:
    loss = log.live(log.loss_name).finite
    return above_recent(loss.step, loss.value, step, value)
