"""What all layers do together, told apart from what one of them does alone.

Schedules, a loss scale, convergence and clipping move every layer's gradient by one factor. Judged layer
by layer, one exploding layer under clipping makes all the innocent ones look vanishing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from palingenesis.config import MonitorConfig
from palingenesis.watch.reading import Bools, Floats

Kind = Literal["none", "common", "clipped"]

# A common factor smaller than this (in decades, a factor of 1.6) is ordinary noise of the median: taking it
# out would only add one layer's noise to another's.
NEGLIGIBLE = 0.2

# Layers must have moved by this many times the tolerance for a constant total norm to mean clipping, not a
# gradient that simply is constant (full batch, tiny learning rate).
VARIES = 10.0


@dataclass(frozen=True)
class Departure:
    """How far each judged layer is from its baseline at one check, in decades; NaN where it is not judged."""

    step: int
    shift: Floats
    std: Floats
    value: Floats
    total: float

    @cached_property
    def judged(self) -> Floats:
        """The shifts of the judged layers."""
        return self.shift[np.isfinite(self.shift)]

    @cached_property
    def middle(self) -> tuple[float, float]:
        """Lower median and median of the judged layers' shifts; 0 without any."""
        size = self.judged.size
        if not size:
            return 0.0, 0.0
        low, high = (size - 1) // 2, size // 2
        ordered = np.partition(self.judged, low if low == high else (low, high))
        return float(ordered[low]), float(ordered[low] + ordered[high]) / 2


def clipped(departures: Sequence[Departure], tolerance: float) -> bool:
    """Whether the last checks, two or more, show one total norm while the layers vary: clipping."""
    if len(departures) < 2:
        return False
    totals = np.array([departure.total for departure in departures])
    if not np.all(np.isfinite(totals)) or totals.min() <= 0:
        return False
    if totals.max() > totals.min() * (1 + tolerance):
        return False
    moved = np.abs(departures[-1].value - departures[-2].value)
    moved = moved[np.isfinite(moved)]
    return moved.size > 0 and float(np.median(moved)) > VARIES * tolerance / math.log(10)


def common_factor(departure: Departure, kind: Kind) -> float:
    """The factor (in decades) that a hypothesis takes out of the shifts.

    Clipping can only shrink, and the culprit shrinks least, so the lower median is taken there.
    """
    if kind == "none":
        return 0.0
    lower, median = departure.middle
    middle = lower if kind == "clipped" else median
    return middle if abs(middle) >= NEGLIGIBLE else 0.0


def hypothesis(departures: Sequence[Departure], config: MonitorConfig, *, raw: bool) -> Kind:
    """Which common factor, if any, explains the newest departure.

    Args:
        departures: the last checks, newest last.
        config: thresholds.
        raw: the gradients are known to be unclipped.
    """
    if not config.common_mode:
        return "none"
    if not raw and clipped(departures, config.clip_tolerance):
        return "clipped"
    newest = departures[-1]
    if newest.judged.size < config.common_mode_min_layers:
        return "none"
    _, median = newest.middle
    near = np.abs(newest.judged - median) <= config.common_mode_spread
    return "common" if float(near.mean()) >= config.common_mode_share else "none"


def out_of_range(departure: Departure, kind: Kind, config: MonitorConfig) -> tuple[Bools, Bools]:
    """Layers vanishing and exploding at one check, under a hypothesis about the common factor.

    More than ``sigma`` standard deviations and at least a factor of ``factor`` from the mean. A layer
    that stayed where it was while all others moved is not blamed, unless the move was clipping's.
    """
    reach = np.log10(config.factor)
    factor = common_factor(departure, kind)

    def beyond(shift: Floats) -> tuple[Bools, Bools]:
        with np.errstate(invalid="ignore"):
            size = np.abs(shift)
            far = size >= reach
            if not far.any():  # the ordinary case, worth a short cut
                return far, far
            far &= size > config.sigma * departure.std
            return far & (shift < 0), far & (shift > 0)

    low, high = beyond(departure.shift - factor)
    if kind == "common" and factor:
        raw_low, raw_high = beyond(departure.shift)
        return low & raw_low, high & raw_high
    return low, high
