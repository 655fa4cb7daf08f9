"""Gradient spikes that came and went between two checks, from what the guard folded.

A check's rule asks for two checks in a row; a spike of some steps may touch none. What is judged is the
largest norm of each interval against the layer's own history of such peaks, so that heavy-tailed gradients
set their own bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from palingenesis.config import MonitorConfig
from palingenesis.events import Event
from palingenesis.watch.baseline import Baseline, matching
from palingenesis.watch.reading import Bools, CheckReading, Floats

# How many layers a message names; the event's fields hold all of them.
NAMED = 3


class BetweenWatch:
    """Peaks between checks: one ``gradient_spike`` event an episode, for all layers that spiked together.

    Args:
        layers: names, in forward order.
        config: thresholds; those of the check's own rule hold here too.
    """

    def __init__(self, layers: Sequence[str], config: MonitorConfig) -> None:
        self.layers, self.config = list(layers), config
        self._reach = float(np.log10(config.factor))
        self.baseline = Baseline(
            len(self.layers), warmup=config.warmup, rate_floor=config.baseline_rate_floor, reach=self._reach
        )
        self._outside = np.zeros(len(self.layers), dtype=np.int64)

    def check(self, reading: CheckReading) -> list[Event]:
        """Judge one interval. A layer that is still that high at its end is left to the alarm rule."""
        between = reading.between
        if between is None:
            return []
        seen = between.peak > 0
        peak = np.full(len(self.layers), np.nan)
        np.log10(between.peak, out=peak, where=seen)
        high = self._high(peak)
        with np.errstate(divide="ignore", invalid="ignore"):
            still = self._high(np.log10(reading.norm))
        fresh = high & (self._outside == 0) & ~still & (between.peak_step < reading.step)
        self._outside = np.where(high, self._outside + 1, 0)
        lasting = self._outside >= self.config.level_shift_checks
        self.baseline.update(peak, seen & ~high)
        self.baseline.shift(np.where(lasting, peak - self.baseline.mean, 0.0), lasting)
        self._outside[lasting] = 0
        return [self._event(between.peak_step, peak, fresh)] if fresh.any() else []

    def _high(self, value: Floats) -> Bools:
        shift = value - self.baseline.mean
        high: Bools = (
            self.baseline.ready & (shift >= self._reach) & (shift > self.config.sigma * self.baseline.std)
        )
        return high

    def _event(self, peak_step: Floats, peak: Floats, fresh: Bools) -> Event:
        shift = peak - self.baseline.mean
        found = np.flatnonzero(fresh)
        found = found[np.argsort(-shift[found], kind="stable")]
        names = [self.layers[int(i)] for i in found]
        worst = int(found[0])
        step, ratio = int(peak_step[worst]), float(10 ** shift[worst])
        also = f" (also {', '.join(names[1:NAMED])}{' …' if len(names) > NAMED else ''})" if names[1:] else ""
        return Event(
            "gradient_spike",
            step,
            "warning" if ratio >= self.config.spike_factor else "info",
            f"{names[0]}: gradient norm {10 ** peak[worst]:.3g} at step {step}, between two checks: "
            f"{ratio:,.0f} times its usual peak{also}",
            {
                "layer": names[0],
                "layers": names,
                "value": float(peak[worst]),
                "baseline": float(self.baseline.mean[worst]),
                "ratio": ratio,
            },
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "layers": list(self.layers),
            "baseline": self.baseline.state_dict(),
            "outside": self._outside.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``; layers that it does not know start afresh."""
        source, target = matching(state["layers"], self.layers)
        self.baseline.load(state["baseline"], source, target)
        self._outside[target] = np.asarray(state["outside"], dtype=np.int64)[source]
