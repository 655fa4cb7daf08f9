"""Layers x checks: gradient norms, the baseline in force before each check, and the distance between.

The baselines are not stored in the record; they are computed again from the norms by the same code that
ran during training (``watch.replay``), so the page draws the very band that the alarm rule used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from palingenesis.config import MonitorConfig
from palingenesis.watch.replay import replay_baselines

if TYPE_CHECKING:
    from palingenesis.record.reader import Run

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Norms:
    """What the checks read. Arrays are ``[checks, layers]``."""

    names: tuple[str, ...]
    steps: Ints
    norm: Floats
    absent: Bools
    """The gradient was ``None``."""
    unwatched: Bools
    """The layer had not joined the model yet, or had left it."""

    @cached_property
    def zero(self) -> Bools:
        """The gradient was there and every element of it was zero."""
        zero: Bools = (self.norm == 0) & ~self.absent
        return zero

    @cached_property
    def nonfinite(self) -> Bools:
        """The gradient was there and held a NaN or an infinity."""
        return ~np.isfinite(self.norm) & ~self.absent & ~self.unwatched

    @cached_property
    def log(self) -> Floats:
        """log10 of the norms, NaN where there is none."""
        usable = np.isfinite(self.norm) & (self.norm > 0)
        return np.log10(self.norm, out=np.full_like(self.norm, np.nan), where=usable)


@dataclass(frozen=True)
class History:
    """The norms with the baseline each was judged against."""

    norms: Norms
    mean: Floats
    """log10 baseline in force before each check, NaN until the warm-up is over."""
    reach: Floats
    """Decades from the mean at which a check is out of range: sigma deviations, and the factor at least."""

    @cached_property
    def departure(self) -> Floats:
        """Decades between each norm and its baseline, NaN where either is missing."""
        return self.norms.log - self.mean


def read_norms(run: Run) -> Norms:
    """The norms of a run, layers in forward order, those that joined later at the end."""
    columns = run.layers
    absent = np.array([columns.absent(name) for name in columns.names], dtype=np.bool_)
    steps, absent = columns.step.astype(np.int64), absent.T.reshape(columns.matrix.shape)
    changes = [event.step for event in run.events if event.event == "parameters_changed"]
    unread = np.isnan(columns.matrix) & ~absent
    return Norms(columns.names, steps, columns.matrix, absent, _outside(unread, steps, changes))


def _outside(unread: Bools, steps: Ints, changes: Iterable[int]) -> Bools:
    """Which unread norms are so because the layer was not part of the model at that check.

    A column has NaN there and where a norm was NaN. A layer joins or leaves at a check that found the
    parameters changed, and is unread on the whole far side of it.
    """
    outside = np.zeros_like(unread)
    for change in changes:
        check = int(np.searchsorted(steps, change))
        for edge in {check, min(check + 1, len(steps))} - {0, len(steps)}:
            joined = unread[:edge].all(axis=0) & ~unread[edge]
            left = unread[edge:].all(axis=0) & ~unread[edge - 1]
            outside[:edge, joined] = True
            outside[edge:, left] = True
    return outside


def replay(norms: Norms, config: MonitorConfig) -> History:
    """The same norms with the baselines that the monitor had when it read them."""
    if norms.norm.size == 0:
        nothing = np.full(norms.norm.shape, np.nan)
        return History(norms, nothing, nothing)
    # There NaN means "no gradient"; a gradient that was there and held a NaN must not be taken for that.
    baselines = replay_baselines(np.where(norms.nonfinite, np.inf, norms.norm), config)
    reach = np.maximum(config.sigma * baselines.std, np.log10(config.factor))
    return History(norms, baselines.mean, reach)


def config_of(info: dict[str, object]) -> MonitorConfig:
    """The run's configuration; options this version does not know stay in the record and are left out."""
    stored = info.get("config")
    known = stored if isinstance(stored, dict) else {}
    return MonitorConfig(**{name: known[name] for name in MonitorConfig.model_fields if name in known})
