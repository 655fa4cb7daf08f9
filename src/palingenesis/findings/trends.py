"""Trends and medians that a few wild values do not move, with intervals from ranks and no assumed noise."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from palingenesis.record.columns import Floats

#: Losses whose median stands for the training loss at an evaluation: a single one is noise.
RECENT = 20
#: A long series is first made this many medians: fewer pairs, and noise that hangs together counts once.
MOST_BLOCKS = 64


class Trend(NamedTuple):
    """A straight line through a series: the median of all slopes between two points (Theil–Sen)."""

    slope: float
    low: float
    """The slope is above this, but for a chance of ``alpha``; minus infinity where the points are too few."""
    high: float
    span: float
    """From the first x to the last."""
    middle: float
    """The series' median, to compare a change with."""

    @property
    def change(self) -> float:
        """From the first x to the last, along the line."""
        return self.slope * self.span

    @property
    def least(self) -> float:
        """The change is above this, but for a chance of ``alpha``."""
        return self.low * self.span

    @property
    def most(self) -> float:
        return self.high * self.span


def trend(x: Floats, y: Floats, alpha: float) -> Trend:
    """The line through a series, in order of x.

    Args:
        x: where, increasing.
        y: finite values.
        alpha: chance that the slope is below ``low``, and that it is above ``high``.

    The interval is Sen's (1968): ranks of the pairs' slopes, by the variance of Kendall's statistic.
    """
    if len(x) < 2:
        return Trend(math.nan, -math.inf, math.inf, 0.0, float(np.median(y)) if len(y) else math.nan)
    middle, span = float(np.median(y)), float(x[-1] - x[0])
    x, y = _blocks(x, y)
    first, second = np.triu_indices(len(x), k=1)
    apart = x[second] - x[first]
    slopes = np.sort((y[second] - y[first])[apart > 0] / apart[apart > 0])
    if not len(slopes):
        return Trend(math.nan, -math.inf, math.inf, span, middle)
    points = len(x)
    deviation = math.sqrt(points * (points - 1) * (2 * points + 5) / 18)
    reach = NormalDist().inv_cdf(1 - alpha) * deviation
    low, high = -math.inf, math.inf
    if reach < len(slopes):
        place = max(int((len(slopes) - reach) / 2) - 1, 0)
        low, high = float(slopes[place]), float(slopes[-1 - place])
    return Trend(float(np.median(slopes)), low, high, span, middle)


def _blocks(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Medians of equal parts, odd in size: those of even parts would be off where values are skewed."""
    size = -(-len(x) // MOST_BLOCKS)
    size += 1 - size % 2
    parts = len(x) // size
    if size == 1:
        return x, y
    left = len(x) - parts * size  # some of the first points are not used
    first, second = (np.median(each[left:].reshape(parts, size), axis=1) for each in (x, y))
    return first, second


class Middle(NamedTuple):
    """A median and the interval that holds the true one (the sign test's)."""

    value: float
    low: float
    high: float


def median(values: Floats, alpha: float) -> Middle:
    """The median of values; the true one is below ``low`` with a chance of ``alpha`` at most."""
    count = len(values)
    if not count:
        return Middle(math.nan, -math.inf, math.inf)
    ordered = np.sort(values)
    place, below = -1, 0.0
    while place + 1 < count // 2:
        below += math.exp(_log_chance(count, place + 1))
        if below > alpha:
            break
        place += 1
    low, high = (float(ordered[place]), float(ordered[-1 - place])) if place >= 0 else (-math.inf, math.inf)
    return Middle(float(np.median(ordered)), low, high)


def _log_chance(count: int, heads: int) -> float:
    """Logarithm of the chance of so many heads in ``count`` throws."""
    ways = math.lgamma(count + 1) - math.lgamma(heads + 1) - math.lgamma(count - heads + 1)
    return ways - count * math.log(2)


def spread(values: Floats) -> float:
    """A standard deviation from the median distance to the median."""
    return float(1.4826 * np.median(np.abs(values - np.median(values)))) if len(values) else math.nan


def above_recent(steps: Floats, losses: Floats, step: float, value: float) -> float | None:
    """How far an evaluation lies above the training losses just before it; ``None`` where there is none."""
    before = losses[steps <= step][-RECENT:]
    return value - float(np.median(before)) if len(before) else None
