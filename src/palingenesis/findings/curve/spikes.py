"""Spikes of a loss curve: losses far above what came before, by the tail that the curve's own noise shows."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from palingenesis.findings.curve.limits import CurveLimits
from palingenesis.findings.curve.noise import (
    MEDIAN_VARIANCE,
    bar,
    before,
    grouped,
    local,
    logarithmic,
    onward,
    spread_without_trend,
)
from palingenesis.record.columns import Floats, Ints

#: Rows among which spikes are looked for in a short curve.
_FEW = 20
#: Losses in a row by which a spike is over.
_BACK = 3
#: Highest values that a tail is read from, at least; rows that a spike has to be over, at least.
_TAIL, _LEAST_ROOM = 200, 50
#: Nothing is written more exactly; no loss rises by more than this power of e.
_TINY, _LARGEST = 1e-12, 500.0


class CurveSpike(NamedTuple):
    """One spike."""

    row: int
    """Of the curve, where it begins."""
    step: float
    peak: float
    """The highest loss."""
    base: float
    """What the loss was before."""
    sigmas: float
    """Height in standard deviations of the noise."""
    over_row: int
    """The first row that is back to normal; the number of rows where none is."""
    recovery_steps: float | None
    """Steps until it was; ``None`` if the log ends before."""

    @property
    def ratio(self) -> float | None:
        """The peak against what was before; ``None`` where that is not positive."""
        return self.peak / self.base if self.base > 0 else None


def spikes_of(step: Floats, loss: Floats, resolution: float | None, limits: CurveLimits) -> list[CurveSpike]:
    """The spikes of a curve, in order. ``step`` and ``loss`` are finite and steps do not go back."""
    if len(loss) < limits.least_rows:
        return []
    usual = before(loss, limits.spike_past)
    found: dict[int, CurveSpike] = {}
    scale = _scale(loss, usual, resolution, limits)
    for width in limits.spike_widths:
        if len(loss) < 4 * width:
            continue
        for rows, sigmas, noise in _of_width(scale, width, limits):
            spike = _spike(step, loss, usual, rows, sigmas, scale.above(usual[rows[0]], noise), limits)
            if spike is not None and not any(_same(spike, other, limits) for other in found.values()):
                found[spike.row] = spike
    return [found[row] for row in sorted(found)]


class _Scale(NamedTuple):
    """Losses as they are judged: noise of positive losses is mostly a factor."""

    logarithmic: bool
    values: Floats
    past: Floats
    """What is usual before each."""
    least: float
    """The spread that rounding alone makes, so that a curve of few digits has noise."""

    def above(self, usual: float, amount: float) -> float:
        """The loss that lies an amount of this scale above a usual one."""
        return usual * math.exp(min(amount, _LARGEST)) if self.logarithmic else usual + amount


def _scale(loss: Floats, usual: Floats, resolution: float | None, limits: CurveLimits) -> _Scale:
    # The standard deviation of a uniform error.
    least = max((resolution or 0.0) / math.sqrt(12), _TINY)
    if not logarithmic(loss):
        return _Scale(False, loss, usual, least)
    log = np.log(loss)
    return _Scale(True, log, before(log, limits.spike_past), max(least / float(np.median(loss)), _TINY))


def _same(one: CurveSpike, other: CurveSpike, limits: CurveLimits) -> bool:
    return abs(one.row - other.row) <= limits.spike_apart or other.row <= one.row < other.over_row


def _of_width(scale: _Scale, width: int, limits: CurveLimits) -> list[tuple[Ints, float, float]]:
    """Of every spike its highest rows, its height in standard deviations, and how high noise goes there."""
    filtered = onward(scale.values, width)
    risen = filtered - scale.past
    middle, _ = local(risen, limits.spike_scale_rows)
    spread = spread_without_trend(
        risen, filtered, limits.spike_scale_rows, limits.spike_wide, limits.spike_narrow
    )
    spread = np.maximum(spread, scale.least)
    # A curve that falls lies below its past as a rule: that room is not taken away.
    sigmas = (risen - np.maximum(middle, 0)) / spread
    count = len(sigmas)
    # The first ones are compared with few.
    few = np.arange(1, min(limits.spike_past, count))
    sigmas[few] /= np.sqrt((1 + MEDIAN_VARIANCE / few) / (1 + MEDIAN_VARIANCE / limits.spike_past))
    sigmas[:2] = -np.inf  # one loss is no past
    taken = min(count, max(_TAIL, count // 8))
    order = np.argpartition(-sigmas, taken - 1)[:taken]
    order = order[np.argsort(-sigmas[order], kind="stable")]
    highest = sigmas[order]
    # The rest is noise in any case; as neighbours of everything it would join spikes.
    seen = min(taken, max(_FEW, count // 20))
    group = np.full(taken, count)
    group[:seen] = grouped(order[:seen], limits.spike_near)
    number = _how_many(scale, width, order, highest, group, spread, limits)
    back = max(float(highest[group >= number].max(initial=0.0)), 0.0)
    found = []
    for one in range(number):
        rows = np.sort(order[(group == one) & (highest > back)])
        found.append((rows, float(highest[group == one][0]), back * float(spread[rows[0]])))
    return found


def _how_many(
    scale: _Scale,
    width: int,
    order: Ints,
    highest: Floats,
    group: Ints,
    spread: Floats,
    limits: CurveLimits,
) -> int:
    """How many of the highest groups of losses are spikes: all down to the last one that stands out."""
    count = len(scale.values)
    most = max(2, int(limits.spike_most * count))
    # Neighbours share their past, and short curves their window: fewer values than there are count.
    known = min(count / 4, limits.spike_scale_rows / 2)
    alpha = limits.spike_alpha / len(limits.spike_widths)
    groups = int(group[group < count].max()) + 1
    for number in range(min(most, groups), 0, -1):
        noise = highest[group >= number]
        at = int(np.argmax(group == number - 1))
        gap = limits.spike_gap * float(noise.max(initial=0.0))
        if highest[at] <= max(bar(noise, count, known, alpha), gap):
            continue
        # Single losses that are high now and then can be so several times in a row.
        often = 0.0 if width == 1 else _often(scale.values - scale.past, order[group < number], limits)
        if highest[at] * spread[order[at]] > limits.spike_gap * often:
            return number
    return 0


def _often(risen: Floats, without: Ints, limits: CurveLimits) -> float:
    """What single losses rise to often enough to be noise, but for what are spikes already."""
    others = np.ones(len(risen), dtype=np.bool_)
    for row in without:
        others[max(row - limits.spike_near, 0) : row + 2 * limits.spike_past] = False
    risen = risen[others]
    if not len(risen):
        return 0.0
    least = min(max(limits.spike_often * len(risen), limits.spike_often_rows), len(risen) - 1)
    return float(np.partition(risen, -int(least))[-int(least)])


def _spike(
    step: Floats,
    loss: Floats,
    usual: Floats,
    rows: Ints,
    sigmas: float,
    noise: float,
    limits: CurveLimits,
) -> CurveSpike | None:
    """The spike that begins at the first of some rows; ``noise`` is the loss up to which noise goes there."""
    first, count = int(rows[0]), len(loss)
    base = float(usual[first])
    peak_row = first + int(np.argmax(loss[first : int(rows[-1]) + 1 + limits.spike_widths[-1]]))
    peak = float(loss[peak_row])
    whole = base if loss.min() > 0 else float(np.subtract(*np.percentile(loss, [98, 2])))
    if peak - base < limits.spike_share * whole:
        return None
    # Of three losses in a row the middle one: noise dips below while a rise lasts.
    after = onward(loss[peak_row + 1 :], _BACK)
    below = np.flatnonzero(after <= max(base + limits.spike_back * (peak - base), noise))
    over = peak_row + 1 + int(below[0]) if len(below) else count
    room = max(_LEAST_ROOM, int(limits.spike_over * count))
    if over == count and count - first > room // 2:
        return None
    took = float(step[over] - step[first]) if over < count else None
    return CurveSpike(first, float(step[first]), peak, base, sigmas, over, took)
