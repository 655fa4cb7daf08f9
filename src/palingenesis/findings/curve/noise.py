"""How large a curve's noise is, and how far out its own tail can reach by chance."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from palingenesis.record.columns import Floats, Ints

_NORMAL = NormalDist()
#: Of normal noise, the standard deviation is so many median distances to the median.
MAD_TO_STD = 1.4826
#: A robust standard deviation is as exact as an ordinary one of this share of the values.
_MAD_EFFICIENCY = 0.37
#: The variance of a median of n normal values is this by n, of one value's.
MEDIAN_VARIANCE = math.pi / 2
#: Rows that a median is taken over at once: long curves are worked through in pieces.
_PIECE = 50_000
#: Places at either end of a curve where medians over fewer rows are taken.
_PLACES = 64
#: Rows on either side of the first and the last that their median is taken over.
_LEAST_REACH = 3
#: Shares of the noise at which the weight of its tail is read off, where so many values lie beyond them.
_TAIL_AT = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005, 0.0002)
_TAIL_VALUES = 10
#: Student tails grow heavier beyond the quantiles that can be read (t3: h is 0.21 at 2%, 0.27 at 1e-6).
_TAIL_HEAVIER = 1.1
#: Standard errors of the last reading that the tail is taken to be heavier by.
_UNSURE = 0.25
#: Highest values from which the tail is read a second time.
_TOP = 20


def logarithmic(values: Floats) -> bool:
    """Whether a curve is judged on a logarithmic scale: noise of positive losses is mostly a factor."""
    return bool(values.min() > 0)


def before(values: Floats, rows: int) -> Floats:
    """The median of the values before each; the first has only itself."""
    found = np.empty(len(values))
    for index in range(min(rows, len(values))):
        found[index] = np.median(values[: max(index, 1)])
    if len(values) > rows:
        found[rows:] = running_median(values, rows)[:-1]
    return found


def onward(values: Floats, rows: int) -> Floats:
    """The median of each value and those after it; the last ones have fewer."""
    if rows == 1 or len(values) < rows:
        return values
    found = values.copy()
    found[: len(values) - rows + 1] = running_median(values, rows)
    # Of the last ones the lowest: a high value at the very end is judged alone.
    for index in range(len(values) - rows + 1, len(values)):
        found[index] = np.min(values[index:])
    return found


def running_median(values: Floats, rows: int) -> Floats:
    """The median of every ``rows`` values in a row."""
    windows = np.lib.stride_tricks.sliding_window_view(values, rows)
    parts = [np.median(windows[at : at + _PIECE], axis=1) for at in range(0, len(windows), _PIECE)]
    return np.concatenate(parts)


def centred(values: Floats, rows: int) -> Floats:
    """The median around each value, of an odd number of rows; at the ends of fewer, as many on both sides."""
    count, half = len(values), rows // 2
    found = values.copy()
    if count >= rows:
        # A median over many rows changes little from one to the next.
        at = np.unique(np.append(np.arange(half, count - half, 1 + rows // 16), count - half - 1))
        windows = np.lib.stride_tricks.sliding_window_view(values, rows)[at - half]
        found[half : count - half] = np.interp(np.arange(half, count - half), at, np.median(windows, axis=1))
    left, right = np.arange(min(half, count)), np.arange(max(count - half, half), count)
    for end in (left, right):
        if not len(end):
            continue
        # Many rows from the end a few places tell enough.
        places = np.unique(np.geomspace(1, len(end), min(len(end), _PLACES)).astype(np.int64)) - 1
        at = end[places] if end is left else end[::-1][places][::-1]
        reach = np.maximum(np.minimum(at, count - 1 - at), _LEAST_REACH)
        medians = [np.median(values[max(i - r, 0) : i + r + 1]) for i, r in zip(at, reach, strict=True)]
        found[end] = np.interp(end, at, medians)
    return found


def spread_without_trend(risen: Floats, values: Floats, rows: int, wide: int, narrow: int) -> Floats:
    """The robust standard deviation of ``risen`` around each row, without what the curve's fall adds to it.

    Where a curve falls steeply, how far losses lie below their past changes from row to row. Two readings, of
    which the lower counts: ``risen`` against its own median over ``wide`` rows; and the scatter of the values
    around their median over ``narrow`` rows, times how the two compare in this curve as a rule.
    """
    _, one = local(risen - centred(risen, wide), rows)
    _, other = local(values - centred(values, narrow), rows)
    both = (one > 0) & (other > 0)
    if not both.any():
        return one
    return np.where(other > 0, np.minimum(one, other * float(np.median(one[both] / other[both]))), one)


def local(values: Floats, rows: int) -> tuple[Floats, Floats]:
    """Median and robust standard deviation of what is around each value, of ``rows`` values or all."""
    count = len(values)
    rows = min(rows, count)
    starts = np.unique(np.append(np.arange(0, count - rows + 1, max(rows // 4, 1)), count - rows))
    windows = np.lib.stride_tricks.sliding_window_view(values, rows)[starts]
    middle = np.median(windows, axis=1)
    spread = MAD_TO_STD * np.median(np.abs(windows - middle[:, None]), axis=1)
    at = starts + (rows - 1) / 2
    where = np.arange(count)
    return np.interp(where, at, middle), np.interp(where, at, spread)


def bar(highest: Floats, count: int, known: float, alpha: float) -> float:
    """What noise exceeds with a chance of ``alpha``, in standard deviations.

    Args:
        highest: the highest values of the noise in standard deviations, from the highest down.
        count: how many values of noise there are in all.
        known: from how many values a standard deviation was estimated; the bar grows as Student's t does.
        alpha: chance that any of them is above the bar.

    Two readings of the tail, of which the lower counts. Tukey's h, ``z·exp(h·z²/2)`` of normal z (Hoaglin
    1985), from the quantiles of the outer tenth: exact for normal noise. Hill's (1975), from the ratios of
    the highest values: right where noise has a second kind of batch, whose height is no tail.
    """
    far = -_NORMAL.inv_cdf(alpha / max(count, 1))
    far *= 1 + (far**2 + 1) / (4 * _MAD_EFFICIENCY * known)
    heaviest = unsure = 0.0
    for share in _TAIL_AT:
        place = int(share * count)
        if place < _TAIL_VALUES or place >= len(highest):
            continue
        normal = -_NORMAL.inv_cdf(share)
        error = math.sqrt(share / count) / (_NORMAL.pdf(normal) * normal)
        unsure = 2 * error / normal**2
        if highest[place] > normal:
            heaviest = max(heaviest, 2 * math.log(highest[place] / normal) / normal**2)
    by_quantiles = far * math.exp(min(_TAIL_HEAVIER * (heaviest + _UNSURE * unsure) * far**2 / 2, 500.0))
    return max(min(by_quantiles, _by_top(highest, alpha)), far)


def _by_top(highest: Floats, alpha: float) -> float:
    top = highest[: _TOP + 1]
    if len(top) < _TOP + 1 or top[-1] <= 0:
        return math.inf
    weight = float(np.mean(np.log(top[:-1] / top[-1])))
    return float(top[-1] * (_TOP / alpha) ** weight)


def grouped(where: Ints, apart: int) -> Ints:
    """For places in order of importance: the number of the group each belongs to, first groups first."""
    order = np.argsort(where, kind="stable")
    cuts = np.diff(where[order]) > apart
    group = np.empty(len(where), dtype=np.int64)
    group[order] = np.concatenate([[0], np.cumsum(cuts)]) if len(where) else []
    # By the most important of each.
    _, first, back = np.unique(group, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return rank[back]
