"""Scales, ticks and the axes drawn from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from palingenesis.report.svg import element, percent, text
from palingenesis.report.words import number, power_of_ten

Floats = NDArray[np.float64]

_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)
_MARGIN = 0.06
_LOG_FROM_RATIO = 30.0
_OUTLIER_RATIO = 4.0
_CENTRE = (2.0, 98.0)
_EDGE = 0.04
_FEW_DECADES = 2.5
_ROOM_ON_A_PHONE = 5
_READABLE_DECADES = 4
_ROOM_FOR_A_TICK = 0.07
_REPRESENTABLE = 1e300


@dataclass(frozen=True)
class Tick:
    """A value written on an axis, and its place from 0 to 1."""

    at: float
    label: str


@dataclass(frozen=True)
class Scale:
    """A stretch of values on an axis; logarithmic ones hold log10 of their ends."""

    low: float
    high: float
    log: bool = False

    def __call__(self, values: Floats) -> Floats:
        """Places from 0 to 1; values beyond the ends get places beyond them."""
        usable = (
            np.log10(values, out=np.full(np.shape(values), np.nan), where=values > 0) if self.log else values
        )
        return np.asarray((usable - self.low) / ((self.high - self.low) or 1.0), dtype=np.float64)

    def ticks(self, most: int) -> list[Tick]:
        """At most about ``most`` round values."""
        if self.log:
            return decade_ticks(self.low, self.high, most)
        values = round_values(self.low, self.high, most)
        step = values[1] - values[0] if len(values) > 1 else 1.0
        digits = max(2, math.ceil(math.log10(max(abs(self.low), abs(self.high), step) / step)) + 2)
        return [Tick((v - self.low) / ((self.high - self.low) or 1.0), number(v, digits)) for v in values]


def round_values(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Round values from ``low`` to ``high``, evenly spaced."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, most - 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(n * size for n in _NICE if n * size >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def decade_ticks(low: float, high: float, most: int) -> list[Tick]:
    """Powers of ten on an axis of log10 values; where it spans less than one, values in between."""
    span = (high - low) or 1.0
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    if last > first and span < _FEW_DECADES and low > -_READABLE_DECADES and high < _READABLE_DECADES:
        return _within_decades(low, high)
    if last > first:
        every = max(1, math.ceil((last - first + 1) / most))
        return [Tick((n - low) / span, power_of_ten(n)) for n in range(first, last + 1) if n % every == 0]
    values = round_values(10**low, 10**high, most)
    return [Tick((math.log10(v) - low) / span, number(v, 3)) for v in values if v > 0]


def _within_decades(low: float, high: float) -> list[Tick]:
    """1, 2 and 5 of each decade."""
    values = [n * 10.0**decade for decade in range(math.floor(low), math.ceil(high) + 1) for n in (1, 2, 5)]
    return [
        Tick((math.log10(v) - low) / (high - low), number(v)) for v in values if low <= math.log10(v) <= high
    ]


def step_ticks(first: float, last: float, most: int = 7) -> list[Tick]:
    """True step numbers: the first one, then round ones."""
    width = (last - first) or 1.0
    values = [
        v for v in round_values(first, last, most, whole=True) if (v - first) / width > _ROOM_FOR_A_TICK
    ]
    return [Tick(0.0, f"{int(first):,}"), *(Tick((v - first) / width, f"{int(v):,}") for v in values)]


def padded(low: float, high: float, log: bool = False) -> Scale:
    """A scale with a little room at both ends, and some even when all values are equal."""
    room = (high - low) * _MARGIN or (abs(high) * _MARGIN or 0.5)
    return Scale(low - room, high + room, log)


def loss_scale(values: Floats) -> Scale:
    """The scale that shows a loss best.

    Positive losses that span more than a factor of 30 get a logarithmic one. Otherwise a few far-off
    values must not flatten all the others: the axis then ends near the bulk of the values, and the
    caller marks what lies beyond it.
    """
    values = np.clip(values[np.isfinite(values)], -_REPRESENTABLE, _REPRESENTABLE)
    if not len(values):
        return Scale(0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if low > 0 and high / low > _LOG_FROM_RATIO:
        return padded(math.log10(low), math.log10(high), log=True)
    return linear_scale(values)


def linear_scale(values: Floats) -> Scale:
    """One that ends near the bulk of the values, so that a few far-off ones do not flatten the others."""
    values = np.clip(values[np.isfinite(values)], -_REPRESENTABLE, _REPRESENTABLE)
    if not len(values):
        return Scale(0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    centre_low, centre_high = (float(p) for p in np.percentile(values, _CENTRE))
    spread = centre_high - centre_low
    if spread > 0:
        low = max(low, centre_low - spread * _OUTLIER_RATIO / 2)
        high = min(high, centre_high + spread * _OUTLIER_RATIO / 2)
    return padded(low, high)


def x_axis(ticks: list[Tick], y: float) -> Markup:
    """Ticks and their labels; those at the ends stay inside the drawing."""
    parts = []
    crowded = len(ticks) > _ROOM_ON_A_PHONE
    for place, tick in enumerate(ticks):
        anchor = "start" if tick.at < _EDGE else "end" if tick.at > 1 - _EDGE else "middle"
        parts.append(element("line", x1=percent(tick.at), x2=percent(tick.at), y1=y, y2=y + 4, class_="tick"))
        parts.append(
            text(
                percent(tick.at),
                y + 17,
                tick.label,
                anchor,
                "axis minor" if crowded and place % 2 else "axis",
            )
        )
    return Markup("").join(parts)


def y_axis(ticks: list[Tick], height: float) -> Markup:
    """Grid lines with their labels in the margin left of the drawing."""
    parts = []
    for tick in ticks:
        y = f"{height * (1 - tick.at):.1f}"
        parts.append(element("line", x1="0", x2="100%", y1=y, y2=y, class_="grid"))
        parts.append(
            element("text", tick.label, x="0", y=y, dx="-8", dy="0.32em", text_anchor="end", class_="axis")
        )
    return Markup("").join(parts)
