"""Gradient spikes that came and went without an alarm, from what the guard folded.

A check's rule asks for two checks in a row; a spike of some steps touches one of them or none. What is judged
is the largest norm of each interval against the layer's own history of such peaks, so that heavy-tailed
gradients set their own bar. A spike that is still going on at a check is left to the alarm rule, and told
after all if it ends without an alarm.
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
    """Peaks of intervals: one ``gradient_spike`` event an episode, for all layers that spiked together.

    Args:
        layers: names, in forward order.
        config: thresholds; those of the check's own rule hold here too.
    """

    def __init__(self, layers: Sequence[str], config: MonitorConfig) -> None:
        self.layers, self.config = list(layers), config
        size = len(self.layers)
        self._reach = float(np.log10(config.factor))
        self.baseline = Baseline(
            size, warmup=config.warmup, rate_floor=config.baseline_rate_floor, reach=self._reach
        )
        self._outside = np.zeros(size, dtype=np.int64)
        # The largest peak (log₁₀ norm) of an episode that is not told yet, and its step; step 0 for none.
        self._untold, self._untold_step = np.zeros(size), np.zeros(size)

    def check(self, reading: CheckReading, alarmed: Bools) -> list[Event]:
        """Judge one interval.

        Args:
            reading: the check at its end.
            alarmed: layers with an active alarm; theirs is told already.
        """
        between = reading.between
        if between is None:
            return []
        seen = between.peak > 0
        peak = np.full(len(self.layers), np.nan)
        np.log10(between.peak, out=peak, where=seen)
        high = self._high(peak)
        waiting = self._untold_step > 0
        larger = high & ((self._outside == 0) | (waiting & (peak > self._untold)))
        self._untold = np.where(larger, peak, self._untold)
        self._untold_step = np.where(larger, between.peak_step, self._untold_step)
        self._untold_step[alarmed] = 0
        self._outside = np.where(high, self._outside + 1, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            over = ~self._high(np.log10(reading.norm))
        events = self._tell(over)
        self._learn(peak, seen & ~high)
        return events

    def close(self, told: Bools) -> list[Event]:
        """What is still going on when the run ends, but for layers that are told in another way."""
        return self._tell(~told)

    def _tell(self, which: Bools) -> list[Event]:
        fresh = which & (self._untold_step > 0)
        if not fresh.any():
            return []
        event = self._event(fresh)
        self._untold_step[fresh] = 0
        return [event]

    def _learn(self, peak: Floats, ordinary: Bools) -> None:
        lasting = self._outside >= self.config.level_shift_checks
        self.baseline.update(peak, ordinary)
        self.baseline.shift(np.where(lasting, peak - self.baseline.mean, 0.0), lasting)
        self._outside[lasting] = 0

    def _high(self, value: Floats) -> Bools:
        shift = value - self.baseline.mean
        high: Bools = (
            self.baseline.ready & (shift >= self._reach) & (shift > self.config.sigma * self.baseline.std)
        )
        return high

    def _event(self, fresh: Bools) -> Event:
        shift = self._untold - self.baseline.mean
        found = np.flatnonzero(fresh)
        found = found[np.argsort(-shift[found], kind="stable")]
        names = [self.layers[int(i)] for i in found]
        worst = int(found[0])
        step, ratio = int(self._untold_step[worst]), float(10 ** shift[worst])
        also = f" (also {', '.join(names[1:NAMED])}{' …' if len(names) > NAMED else ''})" if names[1:] else ""
        return Event(
            "gradient_spike",
            step,
            "warning" if ratio >= self.config.spike_factor else "info",
            f"{names[0]}: gradient norm {10 ** self._untold[worst]:.3g} at step {step}, too short for an "
            f"alarm: {ratio:,.0f} times its usual peak{also}",
            {
                "layer": names[0],
                "layers": names,
                "value": float(self._untold[worst]),
                "baseline": float(self.baseline.mean[worst]),
                "ratio": ratio,
            },
        )

    _ARRAYS = ("_outside", "_untold", "_untold_step")

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).tolist() for name in self._ARRAYS}
        return {"layers": list(self.layers), "baseline": self.baseline.state_dict(), **arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``; layers that it does not know start afresh."""
        source, target = matching(state["layers"], self.layers)
        self.baseline.load(state["baseline"], source, target)
        for name in self._ARRAYS:
            array = getattr(self, name)
            array[target] = np.asarray(state[name], dtype=array.dtype)[source]
