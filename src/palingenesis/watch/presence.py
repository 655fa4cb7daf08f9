"""Whether a layer's gradient is there as often as it used to be.

A layer that always had a gradient is missing when it has none; one that is touched by some batches only
(an expert, a layer dropped at random, a rare head) is missing when its absence has become too long for
its own rate. Absences enter the rate only once the gradient is back: a layer that dies does not teach
the watch that dying is normal.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from palingenesis.watch.reading import Bools, Presence


class PresenceWatch:
    """Rates of presence for ``size`` channels.

    Args:
        size: number of channels.
        warmup: checks before a channel is judged.
        alpha: chance of an absence that long, by the channel's own rate, at which it counts as missing.
    """

    def __init__(self, size: int, *, warmup: int, alpha: float) -> None:
        self.warmup, self.alpha = warmup, alpha
        self.checks = np.zeros(size, dtype=np.int64)
        self.present = np.zeros(size)
        self.absent = np.zeros(size)
        self.longest_gap = np.zeros(size)
        self.gap = np.zeros(size)
        self._uncounted = np.zeros(size)
        self._gaps = False  # whether any channel has a gap, or absences that are not counted yet

    @property
    def ever(self) -> Bools:
        """Channels that have had a gradient at least once."""
        ever: Bools = self.present > 0
        return ever

    @property
    def never(self) -> Bools:
        """Channels without any gradient through the whole warm-up."""
        never: Bools = self.present == 0
        return never & (self.checks >= self.warmup) if never.any() else never

    def update(self, step: int, seen: Presence) -> None:
        """Count one check's presence."""
        self.checks += 1
        if not self._gaps and (seen.present_steps == seen.steps).all():
            # The ordinary case, worth a short cut: everything was there on every step.
            self.present += seen.present_steps
            return
        missed, known = self.gap, self.ever
        came_back = seen.present_steps > 0
        # Where the guard looked, the trailing gap is known to the step; otherwise it is counted in checks.
        trailing = np.where(came_back, np.maximum(step - seen.last_present, 0.0), missed + seen.steps)
        if seen.steps == 1:
            trailing = np.where(seen.now, 0.0, missed + 1)
        self._uncounted += seen.steps - seen.present_steps
        over = np.where(came_back, np.maximum(self._uncounted - trailing, 0.0), 0.0)
        self.present += seen.present_steps
        # Adapters and residual branches that start at zero have no gradient at step 1; an absence that
        # short, before the first gradient, says nothing about the rate.
        self.absent += np.where(known | (over > self.warmup), over, 0.0)
        self._uncounted -= over
        self.longest_gap = np.where(came_back, np.maximum(self.longest_gap, missed), self.longest_gap)
        self.gap = trailing
        self._gaps = bool((trailing > 0).any() or (self._uncounted > 0).any())

    def missing(self) -> Bools:
        """Channels absent now, and for longer than their own history makes likely."""
        absent_now: Bools = (self.gap > 0) & self.ever & (self.checks > self.warmup)
        if not absent_now.any():
            return absent_now
        steady = (self.absent == 0) & (self.present >= self.warmup)
        total = np.maximum(self.present + self.absent, 1.0)
        miss_rate = (self.absent + 1.0) / (total + 1.0)
        unlikely = self.gap * np.log(np.minimum(miss_rate, 1.0)) <= np.log(self.alpha)
        missing: Bools = absent_now & (steady | (unlikely & (self.gap > 2 * self.longest_gap)))
        return missing

    _ARRAYS = ("checks", "present", "absent", "longest_gap", "gap", "_uncounted")

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name).tolist() for name in self._ARRAYS}

    def load(self, state: dict[str, Any], source: list[int], target: list[int]) -> None:
        """Take over the channels ``source`` of a saved state as the channels ``target`` of this one."""
        for name in self._ARRAYS:
            array = getattr(self, name)
            array[target] = np.asarray(state[name], dtype=array.dtype)[source]
        self._gaps = True
