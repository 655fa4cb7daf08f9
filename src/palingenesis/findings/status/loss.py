"""The loss and the evaluations of a status: where they are and where they go."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from palingenesis.findings.status.limits import StatusLimits
from palingenesis.findings.trends import above_recent, spread, trend
from palingenesis.record.columns import Floats
from palingenesis.runlogs.table import Column, RunLog

Direction = Literal["falling", "rising", "flat", "unclear"]
_EVAL, _LOSS = "eval/", "loss"


@dataclass(frozen=True)
class LossNow:
    """The training loss. ``least`` and ``most`` bound its change over the window."""

    metric: str
    value: float
    """Of the last row; may be no number."""
    level: float
    """Median of the last few."""
    middle: float
    """Median over the window."""
    direction: Direction
    change: float
    """Over the window, along a robust line; NaN below two losses."""
    least: float
    most: float
    steps: float
    """Length of the window."""
    losses: int
    """In the window."""


@dataclass(frozen=True)
class Setback:
    """The loss has been surely and clearly lower."""

    lowest: float
    at_step: float
    now: float


@dataclass(frozen=True)
class Evaluations:
    """Of the evaluation loss."""

    last: float
    step: float
    best: float
    best_step: float
    count: int
    gap: float | None
    """The last one less the training loss at that time."""
    sources: dict[str, float]
    """The last loss of each source that is evaluated by itself."""


def loss_now(log: RunLog, limits: StatusLimits) -> LossNow | None:
    """Where the loss is; ``None`` where the log has none."""
    logged = log.live(log.loss_name)
    if not logged:
        return None
    finite = logged.finite
    count = min(len(finite.value), max(limits.window_least, int(limits.window_share * len(finite.value))))
    step, value = (finite.step[-count:], finite.value[-count:]) if count else (np.empty(0), np.empty(0))
    line = trend(step, value, limits.alpha)
    return LossNow(
        metric=log.loss_name,
        value=float(logged.value[-1]),
        level=float(np.median(value[-limits.level_losses :])) if count else math.nan,
        middle=line.middle,
        direction=_direction(line.least, line.most, line.middle, log.resolution, limits),
        change=line.change if count > 1 else math.nan,
        least=line.least if count > 1 else -math.inf,
        most=line.most if count > 1 else math.inf,
        steps=line.span,
        losses=count,
    )


def _direction(
    least: float, most: float, middle: float, resolution: float | None, limits: StatusLimits
) -> Direction:
    if math.isnan(middle) or math.isnan(least):
        return "unclear"
    if most < 0:
        return "falling"
    if least > 0:
        return "rising"
    # What is below the last digit of the log cannot be told from nothing.
    band = max(limits.flat * abs(middle), resolution or 0.0)
    return "flat" if -band <= least and most <= band else "unclear"


def diverging(now: LossNow, limits: StatusLimits) -> bool:
    """Whether the loss surely rose over the window by more than a fluctuation."""
    return now.least > limits.rise * abs(now.middle)


def setback(log: RunLog, limits: StatusLimits) -> Setback | None:
    """The lowest that the loss has been, if it is surely and clearly above that now."""
    loss = log.live(log.loss_name).finite
    count = min(limits.blocks, len(loss.value) // limits.block_least)
    if count < limits.least_blocks:
        return None
    step, value = _medians(loss, count)
    lowest = int(np.argmin(value))
    up = float(value[-1] - value[lowest])
    noise = spread(np.diff(value))  # of a difference of two blocks, whatever hangs together within them
    if up <= limits.back * abs(value[lowest]) or up <= limits.back_noise * noise:
        return None
    return Setback(float(value[lowest]), float(step[lowest]), float(value[-1]))


def _medians(column: Column, count: int) -> tuple[Floats, Floats]:
    """Steps and values of equal parts; what is left over belongs to the beginning and is not used."""
    size = len(column.value) // count
    used = size * count
    parts = (each[-used:].reshape(count, size) for each in (column.step, column.value))
    step, value = (np.median(part, axis=1) for part in parts)
    return step, value


def zero_loss(log: RunLog, limits: StatusLimits) -> float | None:
    """The step from which on the loss is exactly 0 to the end, if it fell there from a real one."""
    loss = log.live(log.loss_name)
    if not loss or loss.value[-1] != 0:
        return None
    other = np.flatnonzero(loss.value != 0)
    if not len(other):
        return float(loss.step[0])
    before = loss.value[other[-1]]
    smallest = log.resolution or np.finfo(np.float64).tiny
    if np.isfinite(before) and abs(before) < limits.zero_drop * smallest:
        return None  # it may have become too small to be written
    return float(loss.step[other[-1] + 1])


def evaluations(log: RunLog, now: LossNow | None, limits: StatusLimits) -> Evaluations | None:
    """Where evaluations are; ``None`` where the log has none."""
    sources = {
        name.removeprefix(_EVAL).removesuffix(f"/{_LOSS}"): log.live(name)
        for name in log.columns
        if name.startswith(_EVAL) and name.endswith(f"/{_LOSS}") and name != _EVAL + _LOSS and log.live(name)
    }
    whole = log.live(_EVAL + _LOSS)
    if not whole:
        if not sources:
            return None
        # Without a loss over all of them, the one that was evaluated most.
        whole = max(sources.values(), key=lambda column: len(column.value))
    finite = whole.finite
    best = int(np.argmin(finite.value)) if finite else 0
    return Evaluations(
        last=float(whole.value[-1]),
        step=float(whole.step[-1]),
        best=float(finite.value[best]) if finite else math.nan,
        best_step=float(finite.step[best]) if finite else math.nan,
        count=len(whole.value),
        gap=_gap(log, whole, now),
        sources={name: float(column.value[-1]) for name, column in sorted(sources.items())},
    )


def _gap(log: RunLog, evaluated: Column, now: LossNow | None) -> float | None:
    if now is None or not math.isfinite(float(evaluated.value[-1])):
        return None
    loss = log.live(log.loss_name).finite
    return above_recent(loss.step, loss.value, float(evaluated.step[-1]), float(evaluated.value[-1]))
