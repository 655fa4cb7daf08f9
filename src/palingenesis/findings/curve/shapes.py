"""Shapes that a loss falls in: a power or an exponential of the learning done, above a floor.

``fits`` tries a grid of them at once, each with its best floor and height by weighted least squares. Where
the learning rate is known, learning goes by its sum, and what a high rate keeps the loss up by is a term of
its own (Tissue et al. 2024, arXiv 2408.11029); where it is not, some usual schedules are tried.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from palingenesis.record.columns import Bools, Floats

#: Exponents, and offsets as shares of the whole, of powers that are tried; time constants of exponentials.
_POWERS = np.geomspace(0.08, 3.0, 11)
_OFFSETS = np.geomspace(0.0005, 2.0, 11)
_TAUS = np.geomspace(0.005, 3.0, 14)
#: How often the grid of laws is drawn closer, into how many values each way; what is so much worse than the
#: best, in the noise of the misfit, is left out.
_TIMES_FINER, _FINER, _RULED_OUT = 4, 15, 12.0
#: A ridge, of the columns' own size, that keeps columns which are nearly one from exploding.
_RIDGE = 1e-10


class Shape(NamedTuple):
    """One member of the grid; learning is measured in shares of all that was done."""

    power: float
    """Exponent; infinite for an exponential, 0 for a straight line."""
    scale: float
    """Offset of a power, time constant of an exponential; 1 for a line."""


class Grid(NamedTuple):
    """Shapes that are tried together."""

    powers: Floats
    offsets: Floats
    taus: Floats
    line: bool

    @property
    def shapes(self) -> list[Shape]:
        """All of them, in the order of the columns."""
        found = [Shape(float(power), float(offset)) for power in self.powers for offset in self.offsets]
        found += [Shape(np.inf, float(tau)) for tau in self.taus]
        return [*found, Shape(0.0, 1.0)] if self.line else found

    def columns(self, progress: Floats) -> NDArray[np.float64]:
        """Every shape at these places, one a row."""
        with np.errstate(under="ignore"):
            powers = (1 + progress[None, None, :] / self.offsets[None, :, None]) ** -self.powers[
                :, None, None
            ]
            exponentials = np.exp(-progress[None, :] / self.taus[:, None])
        line = [1 - progress[None, :]] if self.line else []
        return np.concatenate([powers.reshape(-1, len(progress)), exponentials, *line])


GRID = Grid(_POWERS, _OFFSETS, _TAUS, line=True)


class Fits(NamedTuple):
    """The whole grid, fitted."""

    misfit: Floats
    """Sum of squared residuals in standard errors, of each shape."""
    floor: Floats
    height: Floats
    annealed: Floats
    """Of the learning rate, times what was learned (one less the shape); 0 where it does not help."""
    floor_error: Floats
    height_error: Floats
    """Standard errors of both, where the values' own errors are right."""

    @property
    def best(self) -> int:
        return int(np.argmin(self.misfit))

    def course(self, grid: Grid, progress: Floats, rate: Floats | None) -> Floats:
        """The best fit without its floor."""
        best = self.best
        shape = grid.columns(progress)[best]
        raised = 0.0 if rate is None else self.annealed[best] * rate * (1 - shape)
        return np.asarray(self.height[best] * shape + raised)


def fits(progress: Floats, value: Floats, error: Floats, rate: Floats | None, grid: Grid = GRID) -> Fits:
    """The grid, fitted to values at some progress.

    Args:
        progress: learning done up to each value, of all.
        rate: learning rate at each value, of its highest; ``None`` to leave it out.
    """
    weight = 1 / error
    shape = grid.columns(progress) * weight
    ones = np.broadcast_to(weight, shape.shape)
    target = value * weight
    two = _solved([ones, shape], target)
    if rate is None or np.ptp(rate) < 1e-3:
        return two
    three = _solved([ones, shape, rate * (weight - shape)], target)
    better = (three.annealed > 0) & (three.height > 0)
    return Fits(*(np.where(better, b, a) for a, b in zip(two, three, strict=True)))


def finer(
    progress: Floats, value: Floats, error: Floats, rate: Floats | None, fitted: Fits, noise: float
) -> tuple[Grid, Fits]:
    """The grid drawn ever closer around the shapes that cannot be ruled out, and their fits.

    Args:
        fitted: the fits of ``GRID`` to the same values.
        noise: what the misfit of a right shape is, of what the errors say.
    """
    grid = GRID
    for _ in range(_TIMES_FINER):
        shapes = grid.shapes
        power = np.array([shape.power for shape in shapes])
        # Each kind by itself: a coarse grid may hold the shape of one nearly and that of another not.
        bent = _left(shapes, fitted.misfit, np.isfinite(power) & (power > 0), noise)
        quick = _left(shapes, fitted.misfit, np.isinf(power), noise)
        grid = Grid(
            _around([shape.power for shape in bent], grid.powers),
            _around([shape.scale for shape in bent], grid.offsets),
            _around([shape.scale for shape in quick], grid.taus),
            line=True,
        )
        fitted = fits(progress, value, error, rate, grid)
    return grid, fitted


def _left(shapes: list[Shape], misfit: Floats, kind: Bools, noise: float) -> list[Shape]:
    """The shapes of a kind that are not much worse than its best."""
    lowest = float(misfit[kind].min(initial=np.inf))
    if not np.isfinite(lowest):
        return []
    return [shapes[i] for i in np.flatnonzero(kind & (misfit - lowest < _RULED_OUT * noise))]


def _around(left: list[float], tried: Floats) -> Floats:
    """Values from a little below the lowest that is left to a little above the highest."""
    if not left:
        return np.empty(0)
    apart = float(tried[1] / tried[0]) if len(tried) > 1 else 1.0
    return np.geomspace(min(left) / apart, max(left) * apart, _FINER)


def _solved(columns: list[Floats], target: Floats) -> Fits:
    count = len(columns)
    matrix = np.stack([np.stack([np.sum(a * b, axis=1) for b in columns], axis=1) for a in columns], axis=1)
    right = np.stack([a @ target for a in columns], axis=1)
    size = np.sqrt(np.einsum("gii->gi", matrix)) + 1e-300
    scaled = matrix / size[:, :, None] / size[:, None, :] + _RIDGE * np.eye(count)
    inverse = np.linalg.inv(scaled)
    found = (inverse @ (right / size)[:, :, None])[:, :, 0] / size
    errors = np.sqrt(np.maximum(np.einsum("gii->gi", inverse), 0)) / size
    residual = target[None, :] - sum(found[:, i : i + 1] * columns[i] for i in range(count))
    misfit = np.sum(residual**2, axis=1)
    # A loss that rises is no member.
    misfit = np.where(found[:, 1] >= 0, misfit, np.inf)
    if not np.isfinite(misfit).any():  # none falls: a constant is what is left
        mean = float(np.sum(columns[0][0] * target) / np.sum(columns[0][0] ** 2))
        constant = float(np.sum((target - mean * columns[0][0]) ** 2))
        zeros = np.zeros(len(misfit))
        return Fits(zeros + constant, zeros + mean, zeros, zeros, zeros, zeros)
    annealed = found[:, 2] if count > 2 else np.zeros(len(found))
    return Fits(misfit, found[:, 0], found[:, 1], annealed, errors[:, 0], errors[:, 1])
