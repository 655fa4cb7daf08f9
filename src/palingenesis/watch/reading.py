"""What the watch is fed: the numbers of one check, decoded on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Presence:
    """Whether gradients were there: one entry a layer, or a unit (a parameter or a part of one).

    ``present_steps`` of the ``steps`` steps since the last check (this one included) had a gradient
    that was not exactly zero; ``last_present`` is the last such step, 0 if there was none yet.
    Without the guard only the check's own step was looked at and ``steps`` is 1.
    """

    now: Bools
    steps: int
    present_steps: Floats
    last_present: Floats

    @classmethod
    def of_check_only(cls, step: int, now: Bools) -> Presence:
        """What is known when no step between two checks was looked at."""
        return cls(now, 1, now.astype(np.float64), np.where(now, float(step), 0.0))


@dataclass(frozen=True)
class Between:
    """What the guard folded over the steps since the last check, one entry a layer.

    ``peak`` is the largest finite norm and ``peak_step`` its step; ``first_nonfinite`` the first step
    with a NaN or infinite gradient, 0 for none.
    """

    steps: int
    peak: Floats
    peak_step: Floats
    first_nonfinite: Floats


@dataclass(frozen=True)
class CheckReading:
    """One check: ``norm`` is the L2 norm of each layer's gradient at ``step``.

    ``norm`` is 0 where every element is zero or the gradient is ``None`` (then ``absent`` too), NaN or
    infinite where the gradient is. ``frozen`` marks layers whose parameters have ``requires_grad`` off.
    ``units`` is the presence of every parameter (or part), in the order given to the watch.
    """

    step: int
    norm: Floats
    absent: Bools
    frozen: Bools
    layers: Presence
    units: Presence | None = None
    between: Between | None = None

    @property
    def finite(self) -> Bools:
        return np.isfinite(self.norm)

    @property
    def saw_gradients(self) -> bool:
        """Whether any layer had a gradient that is not exactly zero (NaN counts as one)."""
        return bool(np.any(self.norm != 0.0))

    @classmethod
    def of_norms(cls, step: int, norm: Floats, absent: Bools) -> CheckReading:
        """A reading from norms alone: how a record is played again."""
        now = ~absent & (norm != 0.0)
        return cls(step, norm, absent, np.zeros_like(absent), Presence.of_check_only(step, now))
