"""A record's norms played through the alarm rule again: baselines for reports and for a resumed run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from palingenesis.config import MonitorConfig
from palingenesis.watch.layer_alarms import LayerWatch
from palingenesis.watch.reading import Bools, CheckReading, Floats


@dataclass(frozen=True)
class Baselines:
    """log₁₀ mean and standard deviation in force *before* each check, ``[checks, layers]``.

    NaN where a layer had no baseline yet.
    """

    mean: Floats
    std: Floats


def replay(watch: LayerWatch, steps: Sequence[int], norms: Floats, absent: Bools | None = None) -> Baselines:
    """Feed recorded checks to ``watch``; its events are dropped, they are in the record.

    Args:
        watch: a watch over the same layers.
        steps: the step of each check.
        norms: ``[checks, layers]``: 0 for exactly zero, NaN or infinite where the gradient was.
        absent: where the gradient was ``None``.
    """
    missing = np.zeros(norms.shape, dtype=bool) if absent is None else absent
    bands: list[tuple[Floats, Floats]] = []
    for step, norm, gone in zip(steps, norms, missing, strict=True):
        bands.append(watch.band())
        watch.check(CheckReading.of_norms(int(step), np.where(gone, 0.0, norm), gone))
    empty = np.zeros((0, norms.shape[1]))
    return Baselines(
        np.stack([mean for mean, _ in bands]) if bands else empty,
        np.stack([std for _, std in bands]) if bands else empty,
    )


def replay_baselines(norms: Floats, config: MonitorConfig) -> Baselines:
    """Baselines from norms alone, NaN meaning that there was no gradient at that check.

    Args:
        norms: ``[checks, layers]``.
        config: the configuration the run was monitored with.
    """
    absent = np.isnan(norms)
    names = [str(i) for i in range(norms.shape[1])]
    return replay(LayerWatch(names, config), range(1, len(norms) + 1), norms, absent)
