"""Patterns that come back every so many rows: accumulation, epochs, a sampler's order."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from palingenesis.findings.curve.limits import CurveLimits
from palingenesis.findings.curve.noise import centred, logarithmic, running_median, spread_without_trend
from palingenesis.record.columns import Bools, Floats

#: Lines of the spectrum among which each is judged: noise that remembers makes low ones high together.
_AROUND = 33
#: Of a pattern's lines in the spectrum, so many may be the strongest; lengths that are tried for each.
_HARMONICS = 8
_CANDIDATES = 200
#: The median of an exponential value, which is what a line of noise is.
_MEDIAN = math.log(2)
#: A residual beyond this many standard deviations counts as this many: one spike is no pattern.
_CLIP = 4.0


class Period(NamedTuple):
    """A pattern in the losses."""

    rows: int
    steps: float
    size: float
    """From its lowest to its highest place, as a share of the loss; of the noise's scale otherwise."""
    noise: float
    """The same in standard deviations of the noise."""


def period_of(step: Floats, loss: Floats, use: Bools, limits: CurveLimits) -> Period | None:
    """The strongest pattern of a curve, if there is one. Rows must be evenly spaced."""
    count = len(loss)
    apart = np.diff(step)
    if count < limits.period_rows or np.mean(apart == np.median(apart)) < 0.99:
        return None
    log = logarithmic(loss)
    values = np.log(loss) if log else loss
    longest = count // limits.period_least
    wide = min(4 * longest + 1, count // 2 * 2 - 1)
    residual = values - centred(values, wide | 1)
    spread = spread_without_trend(residual, values, min(wide, 201), 101, 31)
    scaled = np.clip(residual / np.maximum(spread, 1e-12), -_CLIP, _CLIP)
    scaled = np.where(use, scaled, 0.0)
    power = np.abs(np.fft.rfft(scaled - scaled.mean())) ** 2
    first = limits.period_least
    if len(power) <= first + _AROUND:
        return None
    relative = power / np.maximum(_background(power), 1e-300) * _MEDIAN
    relative[:first] = 0
    bar = limits.period_power * math.log(len(power) / limits.period_alpha)
    if relative.max() < bar:
        return None
    return _folded(step, scaled, spread, values, loss, int(np.argmax(relative)), relative, bar, limits)


def _background(power: Floats) -> Floats:
    """The median of the lines around each."""
    half = _AROUND // 2
    padded = np.concatenate([power[1 : half + 1][::-1], power, power[-half - 1 : -1][::-1]])
    return running_median(padded, _AROUND)


def _folded(
    step: Floats,
    scaled: Floats,
    spread: Floats,
    values: Floats,
    loss: Floats,
    line: int,
    relative: Floats,
    bar: float,
    limits: CurveLimits,
) -> Period | None:
    """The period whose folded means explain most, among those that the strongest line is a harmonic of."""
    count = len(scaled)
    best: tuple[float, int] | None = None
    for multiple in range(1, 1 + min(_HARMONICS, line // limits.period_least)):
        # The line lies somewhere between its neighbours.
        low, high = math.floor(count * multiple / (line + 1)), math.ceil(count * multiple / (line - 1))
        for rows in range(max(low, 2), min(high, count // limits.period_least, low + _CANDIDATES) + 1):
            # More places explain more by chance.
            score = _explained(scaled, rows) - 3 * (rows - 1)
            if best is None or score > best[0] * 1.05:
                best = score, rows
    if best is None or best[0] < bar:
        return None
    rows = best[1]
    means = _means(scaled, rows)
    noise = float(np.ptp(means))
    scale = float(np.median(spread)) * noise
    size = math.expm1(scale) if values is not loss else scale / max(float(np.ptp(loss)), 1e-300)
    if size < limits.period_size:
        return None
    return Period(rows, rows * float(np.median(np.diff(step))), size, noise)


def _means(scaled: Floats, rows: int) -> Floats:
    whole = len(scaled) // rows * rows
    return np.asarray(scaled[:whole].reshape(-1, rows).mean(axis=0), dtype=np.float64)


def _explained(scaled: Floats, rows: int) -> float:
    """Sum of squares between the places of a pattern, in the variance of one value."""
    means = _means(scaled, rows)
    return float(
        len(scaled) // rows * np.sum((means - means.mean()) ** 2) / max(float(np.var(scaled)), 1e-300)
    )
