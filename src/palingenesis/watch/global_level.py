"""The level of the whole model: its median log₁₀ norm, judged as a layer is.

When all layers move together that is one ``global_shift`` event. A gradual or moderate fall is what
convergence looks like and only an ``info``; a sudden rise, or a fall too deep for convergence, is a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from palingenesis.config import MonitorConfig
from palingenesis.events import Event
from palingenesis.watch.baseline import Baseline
from palingenesis.watch.common import Departure, Kind

# A sudden fall of the whole model by more decades than this is more than convergence does between checks.
DEEP_FALL = 2.0


class GlobalLevel:
    """One channel for the whole model."""

    def __init__(self, config: MonitorConfig) -> None:
        self.config = config
        self._reach = float(np.log10(config.factor))
        self.baseline = Baseline(
            1, warmup=config.warmup, rate_floor=config.baseline_rate_floor, reach=self._reach
        )
        self._last_in_range = float("nan")
        self._first_outside = float("nan")
        self._outside: list[float] = []

    def check(self, departure: Departure, kind: Kind, apart: Callable[[], list[str]]) -> list[Event]:
        """Judge one check; ``apart`` names the layers that did not take part in the common move."""
        values = departure.value[np.isfinite(departure.value)]
        if not self.config.common_mode or values.size < self.config.common_mode_min_layers:
            return []
        level = float(np.median(values))
        shift = level - float(self.baseline.mean[0])
        far = abs(shift) >= self._reach and abs(shift) > self.config.sigma * float(self.baseline.std[0])
        if not (self.baseline.ready[0] and far):
            self._outside.clear()
            self._last_in_range = level
            self.baseline.update(np.array([level]), np.array([True]))
            return []
        if kind != "common" or (self._outside and (self._outside[0] > 0) != (shift > 0)):
            self._outside.clear()
        if kind == "common":
            if not self._outside:
                self._first_outside = level
            self._outside.append(shift)
        if len(self._outside) < self.config.consecutive:
            return []
        return [self._accept(departure.step, level, shift, values.size, apart())]

    def _accept(self, step: int, level: float, shift: float, layers: int, apart: list[str]) -> Event:
        jump = self._first_outside - self._last_in_range
        sudden = jump >= self._reach or jump <= -DEEP_FALL
        self.baseline.shift(level - float(self.baseline.mean[0]), self.baseline.ready)
        self._outside.clear()
        self._last_in_range = level
        way = "rose" if shift > 0 else "fell"
        except_for = f"; {len(apart)} did not follow, first {apart[0]}" if apart else ""
        return Event(
            "global_shift",
            step,
            "warning" if sudden else "info",
            f"the gradients of all layers {way} together, by a factor of {10 ** abs(shift):,.0f}{except_for}",
            {"value": shift, "layers": layers, "exceptions": apart, "sudden": sudden},
        )

    @property
    def unconfirmed(self) -> float | None:
        """How far (decades) the whole model had moved at the last check, if no event has told so yet."""
        return self._outside[-1] if self._outside else None

    def state_dict(self) -> dict[str, Any]:
        return {"baseline": self.baseline.state_dict(), "last_in_range": self._last_in_range}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.baseline.load(state["baseline"], [0], [0])
        self._last_in_range = float(state["last_in_range"])
        self._outside.clear()
