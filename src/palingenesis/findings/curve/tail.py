"""The end of a curve: levelled off, or risen."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from palingenesis.findings.curve.blocks import Blocks
from palingenesis.findings.curve.flat import Smooth
from palingenesis.findings.curve.limits import CurveLimits
from palingenesis.findings.curve.shapes import GRID
from palingenesis.findings.trends import trend
from palingenesis.record.columns import Floats

#: Shares of the blocks whose median is compared with what was before: slow rises need many, late ones few.
_ENDS = (0.25, 0.1, 0.05)


class Level(NamedTuple):
    """A loss that has come to rest."""

    since_step: float
    share: float
    """Of the run's steps."""
    loss: float
    change: float
    """From its beginning to its end."""


class Rise(NamedTuple):
    """A loss that has risen and not come back."""

    kind: Literal["jump", "rise"]
    since_step: float
    lowest: float
    """The level before."""
    last: float
    errors: float
    """The rise in standard errors."""

    @property
    def size(self) -> float:
        return self.last - self.lowest


def levelled(blocks: Blocks, smooth: Smooth, limits: CurveLimits) -> Level | None:
    """The longest last part without change, if it is a good part of the run."""
    count = len(blocks.value)
    if count < limits.plateau_blocks:
        return None
    shape = smooth.fitted.course(GRID, smooth.progress, smooth.rate)
    whole = float(shape[0] - shape[-1])
    span = float(np.ptp(blocks.step))
    if not whole > 0:
        return None
    most = limits.level_fall * whole
    if blocks.value.min() > 0:
        most = min(most, limits.level_of_loss * float(blocks.value[-1]))
    flat = np.flatnonzero(shape - shape[-1] <= most)
    for first in flat:
        share = float(blocks.step[-1] - blocks.step[first]) / span
        if share < limits.level_share:
            return None
        line = trend(blocks.step[first:], blocks.value[first:], limits.plateau_alpha)
        if max(-line.least, line.most) <= limits.level_change * whole:
            return Level(
                float(blocks.start[first]), share, float(np.median(blocks.value[first:])), line.change
            )
    return None


def rise_of(blocks: Blocks, rate: Floats | None, limits: CurveLimits) -> Rise | None:
    """The rise at the end of a curve, if there is one.

    Args:
        rate: the learning rate at each block; ``None`` where it is not known.
    """
    count = len(blocks.value)
    found: Rise | None = None
    for share in _ENDS:
        width = max(limits.rise_blocks, int(share * count))
        if 2 * width > count:
            continue
        one = _rise(blocks, width, rate, limits)
        if one is not None and (found is None or one.errors > found.errors):
            found = one
    return found


def _rise(blocks: Blocks, width: int, rate: Floats | None, limits: CurveLimits) -> Rise | None:
    count, value = len(blocks.value), blocks.value
    windows = np.lib.stride_tricks.sliding_window_view(
        value[: count - width], max(width, 5) if count > 20 else width
    )
    if not len(windows):
        return None
    levels = np.median(windows, axis=1)
    lowest = int(np.argmin(levels))
    low, last = float(levels[lowest]), float(np.median(value[count - width :]))
    end = lowest + windows.shape[1]
    error = np.hypot(
        np.median(blocks.error[lowest:end]) / np.sqrt(windows.shape[1]),
        np.median(blocks.error[count - width :]) / np.sqrt(width),
    )
    rise = last - low
    errors = rise / max(float(error), 1e-300)
    fall = max(float(np.median(value[: limits.rise_blocks])) - low, 0.0)
    whole = limits.rise_of_fall * fall
    if blocks.value.min() > 0:  # a loss of next to nothing may rise to many times what it was
        whole = max(limits.rise_share * low, min(whole, limits.rise_of_low * low))
    if errors < limits.rise_errors or rise < whole:
        return None
    begin = _begin(value, lowest, end, low, rise)
    if rate is not None and rate[-width:].max() > limits.rise_rate * rate[lowest:end].min():
        return None
    within = value[begin + 1 : begin + 3].max(initial=value[begin]) - value[max(begin - 1, 0)]
    kind: Literal["jump", "rise"] = "jump" if within > limits.rise_jump * rise else "rise"
    return Rise(kind, float(blocks.start[begin]), low, float(np.median(value[-3:])), float(errors))


def _begin(value: Floats, lowest: int, end: int, low: float, rise: float) -> int:
    """The block from which the loss stays above its lowest level."""
    below = np.flatnonzero(value[lowest:] <= low + rise / 10) + lowest
    return min(int(below[-1]) + 1 if len(below) else end, len(value) - 1)
