"""Plateaus: stretches in which a loss that fell, or went on to fall, did not.

The curve is explained twice: by a smooth fall, and by the same with learning stopped from one step to
another. A stop is told only if it explains the curve much better than every smooth fall does, the stretch
itself is flat, and what the loss would have fallen in it is worth telling. A loss that levels off smoothly
has converged.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from palingenesis.findings.curve.blocks import Blocks
from palingenesis.findings.curve.limits import CurveLimits
from palingenesis.findings.curve.shapes import GRID, Fits, Grid, finer, fits
from palingenesis.findings.trends import trend
from palingenesis.record.columns import Floats

Kind = Literal["stretch", "stall"]
#: Of a fit: floor, height, two of the shape, and the two ends of a stretch.
_PARAMETERS = 6
#: Residuals are taken to hang together no more than this from one to the next.
_MOST_CORRELATED = 0.9


class Plateau(NamedTuple):
    """A stretch without progress."""

    kind: Kind
    """``stretch``: the loss fell again after it; ``stall``: it lasts to the end."""
    first_step: float
    last_step: float
    level: float
    missed: float
    """What the loss would have fallen meanwhile, by its course before and after."""
    evidence: float
    """How much better a stop explains the curve: the drop of its misfit, in squared standard errors."""


class Smooth(NamedTuple):
    """The best smooth fall, and what it was fitted to."""

    progress: Floats
    rate: Floats | None
    fitted: Fits
    misfit: float


def smooth_falls(blocks: Blocks, rate: Floats | None) -> list[Smooth]:
    """The smooth falls that explain a curve: of the learning rate that is known, or of usual ones.

    Args:
        rate: the learning rate at each block; ``None`` where it is not known: then the first is of a constant
            one.
    """
    found = []
    for one in [rate] if rate is not None else [None, *_usual(blocks)]:
        progress = _progress(blocks, one)
        fitted = fits(progress, blocks.value, blocks.error, _relative(one))
        found.append(Smooth(progress, _relative(one), fitted, float(fitted.misfit.min())))
    return found


def likeliest(blocks: Blocks, falls: list[Smooth], limits: CurveLimits) -> Smooth:
    """The first fall, unless another explains the curve much better."""
    if len(falls) == 1:
        return falls[0]
    best = min(falls, key=lambda fall: fall.misfit)
    noise = _noise(blocks, best.progress, best.rate, best.fitted)
    # The grid may hold the shape of one nearly and that of another not.
    misfits = [_finest(blocks, one, noise) for one in falls]
    lowest = int(np.argmin(misfits))
    return falls[lowest] if misfits[0] - misfits[lowest] > limits.schedule_evidence * noise else falls[0]


def _finest(blocks: Blocks, fall: Smooth, noise: float) -> float:
    """The misfit of a fall on a fine grid."""
    _, fitted = finer(fall.progress, blocks.value, blocks.error, fall.rate, fall.fitted, noise)
    return float(fitted.misfit.min())


def _relative(rate: Floats | None) -> Floats | None:
    return None if rate is None else rate / max(float(rate.max()), 1e-300)


def _usual(blocks: Blocks) -> list[Floats]:
    """Schedules that a run may have had whose log does not tell."""
    at = (blocks.step - blocks.step[0]) / max(float(np.ptp(blocks.step)), 1e-300)
    return [np.maximum(0.5 * (1 + np.cos(np.pi * at)), 1e-6), np.maximum(1 - at, 1e-6)]


def _progress(blocks: Blocks, rate: Floats | None) -> Floats:
    """Learning done up to each block, of all: steps, weighted by the rate."""
    apart = np.diff(blocks.step, prepend=0.0)
    done = np.cumsum(apart if rate is None else apart * rate)
    return np.asarray(done / max(float(done[-1]), 1e-300))


def plateaus_of(blocks: Blocks, falls: list[Smooth], limits: CurveLimits) -> list[Plateau]:
    """The stretches in which learning stopped, in order; ``falls`` are the smooth ones."""
    found: list[Plateau] = []
    best = min(falls, key=lambda fall: fall.misfit)
    # A schedule that is only guessed may be the wrong one to stop.
    tried = [falls[0]] if best is falls[0] else [falls[0], best]
    # A stop has to beat the best of all smooth falls, not only those of a coarse grid.
    misfit = min(_finest(blocks, one, _noise(blocks, best.progress, best.rate, best.fitted)) for one in falls)
    while len(found) < limits.plateau_most:
        stops = [stop for one in tried if (stop := _plateau_of(blocks, one, misfit, limits)) is not None]
        if not stops:
            break
        plateau, left = min(stops, key=lambda stop: stop[1].misfit)
        found.append(plateau)
        # The next one has to explain what this one left.
        tried, misfit = [left], left.misfit
    return sorted(found, key=lambda plateau: plateau.first_step)


def _plateau_of(
    blocks: Blocks, smooth: Smooth, without: float, limits: CurveLimits
) -> tuple[Plateau, Smooth] | None:
    """The stretch that explains most, and the fall without it; ``without`` is the misfit it has to beat."""
    count = len(blocks.value)
    if count < limits.plateau_blocks:
        return None
    best = _best_stop(blocks, smooth, limits)
    if best is None:
        return None
    first, last, fitted, progress = best
    noise = _noise(blocks, progress, smooth.rate, fitted)
    if last < count - 1:
        # Where little learning was left, that the loss fell again is an end as good as any.
        stopped = _stopped(smooth.progress, first, count - 1)
        to_end = fits(stopped, blocks.value, blocks.error, smooth.rate)
        if to_end.misfit.min() - fitted.misfit.min() < limits.plateau_evidence * noise:
            last, fitted, progress = count - 1, to_end, stopped
            noise = _noise(blocks, progress, smooth.rate, fitted)
    misfit = float(fitted.misfit.min())
    evidence = (without - misfit) / noise
    if evidence < limits.plateau_evidence:
        return None
    missed = _missed(smooth, fitted, progress, first, last)
    kind: Kind = "stall" if last >= count - 1 else "stretch"
    if not _worth(blocks, first, last, missed, limits):
        return None
    plateau = Plateau(
        kind,
        float(blocks.start[first]),
        float(blocks.step[last] if kind == "stall" else blocks.start[last]),
        float(np.median(blocks.value[first : last + 1])),
        missed,
        evidence,
    )
    return plateau, Smooth(progress, smooth.rate, fitted, misfit)


def _noise(blocks: Blocks, progress: Floats, rate: Floats | None, fitted: Fits) -> float:
    """What the misfit of a right model is, of what the errors say."""
    free = max(len(blocks.value) - _PARAMETERS, 1)
    residual = residual_of(blocks, progress, rate, fitted)
    return max(float(fitted.misfit.min()) / free, 1.0) * correlated(residual)


def _best_stop(blocks: Blocks, smooth: Smooth, limits: CurveLimits) -> tuple[int, int, Fits, Floats] | None:
    """The stretch whose stop explains the curve best: every few blocks first, then around the best."""
    count = len(blocks.value)
    length = float(np.ptp(blocks.step)) * limits.plateau_share
    # In the steep beginning a block is no stretch.
    start = int(np.searchsorted(blocks.step, blocks.step[0] + limits.plateau_from * np.ptp(blocks.step)))
    grid = np.unique(np.append(np.linspace(start, count - 1, limits.plateau_grid).astype(int), count - 1))
    found: tuple[float, int, int] | None = None
    pairs = [(int(a), int(b)) for a in grid for b in grid if b > a]
    tried: set[tuple[int, int]] = set()
    stride = max(1, (count - start) // limits.plateau_grid)
    while pairs:
        for first, last in pairs:
            if (first, last) in tried or blocks.step[last] - blocks.step[first] < length:
                continue
            tried.add((first, last))
            stopped = _stopped(smooth.progress, first, last)
            misfit = float(fits(stopped, blocks.value, blocks.error, smooth.rate).misfit.min())
            if found is None or misfit < found[0]:
                found = misfit, first, last
        if found is None or stride < 1:
            break
        _, first, last = found
        stride //= 2
        around = (-stride, 0, stride)
        pairs = [
            (a, b)
            for a in {max(first + move, start) for move in around}
            for b in ({last} if last == count - 1 else {min(last + move, count - 1) for move in around})
            if b > a and (a, b) not in tried
        ]
        if not pairs and stride > 1:
            continue
    if found is None:
        return None
    _, first, last = found
    progress = _stopped(smooth.progress, first, last)
    return first, last, fits(progress, blocks.value, blocks.error, smooth.rate), progress


def _stopped(progress: Floats, first: int, last: int) -> Floats:
    """Learning done, without what lies between two blocks."""
    stopped = progress.copy()
    stopped[first:last] = progress[first]
    stopped[last:] -= progress[last] - progress[first]
    return stopped


def _missed(smooth: Smooth, fitted: Fits, progress: Floats, first: int, last: int) -> float:
    """What the loss would have fallen in the stretch."""
    best = fitted.best
    lost = smooth.progress[last] - smooth.progress[first]
    here = np.array([progress[first], progress[first] + lost])
    before, after = GRID.columns(here)[best]
    return float(fitted.height[best] * (before - after))


def correlated(residual: Floats) -> float:
    """What the variance of a sum of residuals is, of that of independent ones."""
    whole = float(np.sum(residual**2))
    if len(residual) < 4 or not whole > 0:
        return 1.0
    one = float(np.sum(residual[1:] * residual[:-1])) / whole
    one = min(max(one, 0.0), _MOST_CORRELATED)
    return (1 + one) / (1 - one)


def residual_of(
    blocks: Blocks, progress: Floats, rate: Floats | None, fitted: Fits, grid: Grid = GRID
) -> Floats:
    """What the best fit leaves, in standard errors."""
    model = fitted.floor[fitted.best] + fitted.course(grid, progress, rate)
    return np.asarray((blocks.value - model) / blocks.error)


def _worth(blocks: Blocks, first: int, last: int, missed: float, limits: CurveLimits) -> bool:
    """Whether the stretch is flat, and what was missed in it is large."""
    inside = slice(first, last + 1)
    line = trend(blocks.step[inside], blocks.value[inside], limits.plateau_alpha)
    middle = float(np.median(np.abs(blocks.value[inside])))
    flat = line.change > -limits.plateau_flat * missed
    if last < len(blocks.value) - 1:
        after = slice(last, len(blocks.value))
        fell = float(np.median(blocks.value[inside]) - np.median(blocks.value[after][-3:]))
        missed = min(missed, fell)
    return flat and missed > max(limits.plateau_missed * blocks.fall, limits.plateau_level * middle)
