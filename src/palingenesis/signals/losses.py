"""Mean and spread of the last losses; numbers in, numbers out.

``health/loss_mean``, ``health/loss_std`` (of a sample: divided by n − 1) and ``health/loss_cv`` (``std`` over
the absolute value of ``mean``) describe the last 100 finite step losses. A non-finite loss is left out; it is
told elsewhere. From two losses on there is a spread; where the mean is exactly zero there is no ``cv``, and
where losses change sign it says little.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from palingenesis.signals.values import Values

WINDOW = 100


class Losses:
    """The window of losses. It is whole only if every step's loss is noted, whatever is logged."""

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=WINDOW)

    def note(self, loss: float) -> None:
        """Take in one step's loss."""
        if math.isfinite(loss):
            self._window.append(loss)

    def values(self) -> Values:
        """The statistics of the losses noted so far; empty without any."""
        if not self._window:
            return Values()
        mean, std = mean_and_std(self._window)
        scalars = {"health/loss_mean": mean}
        if len(self._window) > 1:
            scalars["health/loss_std"] = std
            if mean:
                scalars["health/loss_cv"] = std / abs(mean)
        return Values(scalars)

    def state_dict(self) -> dict[str, Any]:
        return {"window": list(self._window)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window = deque((float(loss) for loss in state["window"]), maxlen=WINDOW)


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """In two passes with exact sums, scaled by the largest value so that no square leaves fp64.

    Args:
        values: finite, at least one.
    """
    largest = max(abs(value) for value in values)
    if not largest:
        return 0.0, 0.0
    scaled = [value / largest for value in values]
    mean = math.fsum(scaled) / len(scaled)
    squares = math.fsum((value - mean) ** 2 for value in scaled)
    return largest * mean, largest * math.sqrt(squares / max(len(scaled) - 1, 1))
