"""A layer's own normal: running mean and variance of log₁₀ gradient norm, as arrays over layers.

Exponentially weighted (Welford's update with weight ``max(1/n, rate_floor)``), so that early values
count alike and later ones fade over about ``1/rate_floor`` checks. The first ``warmup`` values are kept
and winsorised around their median when the warm-up ends: one outlier there would otherwise widen the
band for long after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from palingenesis.watch.reading import Bools, Floats


class Baseline:
    """Running mean and variance for ``size`` channels.

    Args:
        size: number of channels (layers).
        warmup: values a channel needs before it is ``ready``.
        rate_floor: least weight of a new value.
        reach: decades from the median at which the values of the warm-up are winsorised.
    """

    def __init__(self, size: int, *, warmup: int, rate_floor: float, reach: float) -> None:
        self.warmup, self.rate_floor, self.reach = warmup, rate_floor, reach
        self.count = np.zeros(size, dtype=np.int64)
        self.mean = np.zeros(size)
        self.var = np.zeros(size)
        self._early = np.zeros((warmup, size))

    @property
    def ready(self) -> Bools:
        """Channels whose warm-up is over."""
        return self.count >= self.warmup

    @property
    def std(self) -> Floats:
        return np.sqrt(self.var)

    def update(self, values: Floats, where: Bools) -> None:
        """Let ``values`` into the baseline of the channels in ``where``."""
        if not where.any():
            return
        early = np.flatnonzero(where & (self.count < self.warmup))
        self._early[self.count[early], early] = values[early]
        rate = np.maximum(1.0 / (self.count + 1), self.rate_floor)
        diff = values - self.mean
        learned = (1 - rate) * (self.var + rate * diff * diff)
        everywhere = bool(where.all())
        self.mean += rate * (diff if everywhere else np.where(where, diff, 0.0))
        self.var = learned if everywhere else np.where(where, learned, self.var)
        self.count += where
        if not early.size:
            return
        done = early[self.count[early] == self.warmup]
        if done.size:
            middle = np.median(self._early[:, done], axis=0)
            kept = np.clip(self._early[:, done], middle - self.reach, middle + self.reach)
            self.mean[done] = kept.mean(axis=0)
            self.var[done] = kept.var(axis=0)

    def shift(self, amount: float | Floats, where: Bools) -> None:
        """Move the level of channels whose warm-up is over, without touching their spread."""
        self.mean += np.where(where, amount, 0.0)

    def restart(self, channel: int, mean: float, var: float) -> None:
        """Accept a new level for one channel."""
        self.mean[channel], self.var[channel] = mean, var

    def state_dict(self) -> dict[str, Any]:
        return {
            "count": self.count.tolist(),
            "mean": self.mean.tolist(),
            "var": self.var.tolist(),
            "early": self._early.tolist(),
        }

    def load(self, state: dict[str, Any], source: list[int], target: list[int]) -> None:
        """Take over the channels ``source`` of a saved state as the channels ``target`` of this one."""
        self.count[target] = np.asarray(state["count"], dtype=np.int64)[source]
        self.mean[target] = np.asarray(state["mean"])[source]
        self.var[target] = np.asarray(state["var"])[source]
        early = np.asarray(state["early"])[: self.warmup]
        self._early[: len(early), target] = early[:, source]


def matching(known: Sequence[Any], mine: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Where the names of ``mine`` that ``known`` has too stand in each: what a saved state is loaded by."""
    where = {name: i for i, name in enumerate(known)}
    pairs = [(where[name], j) for j, name in enumerate(mine) if name in where]
    return [i for i, _ in pairs], [j for _, j in pairs]
