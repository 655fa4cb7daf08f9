"""How a loss converges: its law, its floor, when half of the rest is done, what more steps would bring."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from palingenesis.findings.curve.blocks import Blocks
from palingenesis.findings.curve.flat import Smooth, correlated, residual_of
from palingenesis.findings.curve.limits import CurveLimits
from palingenesis.findings.curve.shapes import Fits, Grid, Shape, finer
from palingenesis.record.columns import Floats, Ints

#: Draws that intervals are read from; the seed is fixed, so that two readings of a log agree.
_DRAWS = 4000
_SEED = 0
#: A law that is off by so much more than noise makes no forecast; the noise of one that is not counts more.
_MISFIT, _NOT_EXACT = 6.0, 12.0
#: Parameters of a fit: floor, height, two of the shape, the learning rate's.
_PARAMETERS = 5


class Estimate(NamedTuple):
    """A number and the interval that holds it."""

    value: float
    low: float
    high: float


class Convergence(NamedTuple):
    """The smooth law that a curve follows."""

    law: str
    """``power law``, ``exponential`` or ``straight line``."""
    exponent: Estimate | None
    """Of a power law: the loss above its floor falls by this power of the learning done."""
    floor: Estimate | None
    """What the loss would come to; ``None`` where that cannot be told from where it is now."""
    half_life: Estimate | None
    """Steps, at the run's mean learning rate, in which what is above the floor halves; ``None`` alike."""
    more_steps: float
    """20% of those that were done, at the run's mean learning rate."""
    gain: Estimate
    """What they would bring."""
    fall: float
    """What all steps have brought."""
    misfit: float
    """Mean squared residual in what noise alone would make: 1 where the law is right."""


def convergence_of(blocks: Blocks, smooth: Smooth, span: float, limits: CurveLimits) -> Convergence | None:
    """The law of a curve with intervals; ``None`` where no law describes it. ``span``: its steps."""
    count = len(blocks.value)
    fitted = smooth.fitted
    if count < limits.plateau_blocks or not fitted.height[fitted.best] > 0:
        return None
    noise = max(smooth.misfit / max(count - _PARAMETERS, 1), 1.0)
    grid, fitted = finer(smooth.progress, blocks.value, blocks.error, smooth.rate, fitted, noise)
    residual = residual_of(blocks, smooth.progress, smooth.rate, fitted, grid)
    misfit = float(fitted.misfit.min()) / max(count - _PARAMETERS, 1)
    if misfit > _MISFIT * correlated(residual):
        return None
    # No curve is exactly such a law: what noise there is counts more.
    noise = _NOT_EXACT * max(misfit, 1.0) * correlated(residual)
    shapes = grid.shapes
    drawn = _draws(fitted, noise)
    more = limits.forecast_more
    best = shapes[fitted.best]
    law = "straight line" if best.power == 0 else "exponential" if np.isinf(best.power) else "power law"
    fall = _fall(grid, np.array([fitted.best]), fitted.height[[fitted.best]], 0.0, 1.0)[0]
    gain = _fall(grid, drawn.shape, drawn.height, 1.0, 1.0 + more)
    half = np.array([_half(shape) for shape in shapes])[drawn.shape]
    powers = np.array([shape.power for shape in shapes])[drawn.shape]
    bent = np.isfinite(powers) & (powers > 0)
    chance = limits.forecast_chance
    bends = law != "straight line"
    floor, exponent = _estimate(drawn.floor, chance), None
    if law == "power law":
        exponent = _sure(_estimate(powers[bent], chance, best.power), limits)
    return Convergence(
        law=law,
        exponent=exponent,
        floor=floor if bends and floor.high - floor.low < fall else None,
        half_life=_sure(_estimate(half[np.isfinite(half)] * span, chance), limits) if bends else None,
        more_steps=more * span,
        gain=_estimate(gain, chance),
        fall=float(fall),
        misfit=misfit / correlated(residual),
    )


def _sure(one: Estimate, limits: CurveLimits) -> Estimate | None:
    """An estimate that is known to some factor at least."""
    return one if 0 < one.high < limits.forecast_factor * one.low else None


class _Drawn(NamedTuple):
    shape: Ints
    floor: Floats
    height: Floats


def _draws(fitted: Fits, noise: float) -> _Drawn:
    """Laws by how well they fit, with floor and height as unsure as they are."""
    random = np.random.default_rng(_SEED)
    weight = np.exp(-(fitted.misfit - fitted.misfit.min()) / (2 * noise))
    weight[~np.isfinite(weight)] = 0
    shape = random.choice(len(weight), size=_DRAWS, p=weight / weight.sum())
    wide, one, two = np.sqrt(noise), random.normal(size=_DRAWS), random.normal(size=_DRAWS)
    floor = fitted.floor[shape] + wide * fitted.floor_error[shape] * one
    height = np.maximum(fitted.height[shape] + wide * fitted.height_error[shape] * two, 0)
    return _Drawn(shape, floor, height)


def _fall(grid: Grid, shape: Ints, height: Floats, first: float, last: float) -> Floats:
    values = grid.columns(np.array([first, last]))
    return np.asarray(height * (values[:, 0] - values[:, 1])[shape])


def _half(shape: Shape) -> float:
    """Learning, of all that was done, in which the height above the floor halves from the end on."""
    if shape.power == 0:
        return np.nan
    if np.isinf(shape.power):
        return float(shape.scale * np.log(2))
    return float((2 ** (1 / shape.power) - 1) * (shape.scale + 1))


def _estimate(values: Floats, chance: float, value: float | None = None) -> Estimate:
    low, middle, high = np.quantile(values, [(1 - chance) / 2, 0.5, (1 + chance) / 2])
    middle = middle if value is None else value
    return Estimate(float(middle), float(min(low, middle)), float(max(high, middle)))
