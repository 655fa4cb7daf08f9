"""Case: one run under examination, and how its numbers and events are asked for by symptoms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from palingenesis.events import Event
from palingenesis.findings.curve.blocks import blocks_of
from palingenesis.findings.curve.limits import CurveLimits
from palingenesis.findings.curve.spikes import CurveSpike, spikes_of
from palingenesis.findings.curve.tail import Rise, rise_of
from palingenesis.findings.limits import Limits
from palingenesis.findings.sources import NORM, NOTHING, RAW_NORM, RecordedRow, Series, Source
from palingenesis.findings.trends import spread

LOSS, CE, RATE = "train/loss", "train/ce_loss", "train/lr"
COSINE = "health/grad_cosine_sim"


@dataclass(frozen=True)
class Case:
    """One run or log, and what it is judged by.

    Attributes:
        unpacked: a run on the same data without packing, where there is one.
    """

    source: Source
    limits: Limits = field(default_factory=Limits)
    unpacked: Source | None = None

    def series(self, name: str) -> Series:
        """The finite values of a metric; empty where it was never recorded."""
        return self.source.series(name)

    @cached_property
    def loss(self) -> Series:
        """Cross-entropy, by whichever name the record has it."""
        return loss_of(self.source)

    @cached_property
    def norm(self) -> Series:
        """Of the gradient; before clipping, if that is known."""
        return self.series(RAW_NORM) or self.series(NORM)

    @property
    def clipped_only(self) -> bool:
        """The norm is known after clipping only, and cannot show growth."""
        return self.source.clipped_only

    @cached_property
    def peak_rate(self) -> float | None:
        """The highest learning rate."""
        rates = self.series(RATE)
        return float(rates.value.max()) if rates else None

    def rate(self, times: float, part: str) -> str:
        """The highest learning rate times a factor, for a fix; ``part`` says it where none is known."""
        peak = self.peak_rate
        return f"{part} of what it is" if peak is None else format(times * peak, ".2g")

    def named(self, prefix: str) -> dict[str, Series]:
        """The metrics below a prefix, by what follows it."""
        return {
            name.removeprefix(prefix): self.series(name)
            for name in self.source.names
            if name.startswith(prefix)
        }

    def events(self, *names: str) -> list[Event]:
        """Events of these names; none of steps that were run again, nor what is ordinary."""
        return [
            event
            for event in self.source.events
            if event.event in names and not event.superseded and not event.ordinary
        ]

    def setting(self, name: str, otherwise: float) -> float:
        """A number of the monitor's configuration in this run."""
        config = self.source.info.get("config")
        value = config.get(name) if isinstance(config, Mapping) else None
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else otherwise

    def planned(self, name: str) -> float | None:
        """A number of the training configuration, by its common name; ``None`` where it is not known."""
        value = self.source.training.get(name)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def rows(self, *containing: str) -> Iterator[RecordedRow]:
        """Rows of the record with any of these texts in them; none where there is no file."""
        return self.source.rows(*containing)

    def nonfinite(self, *names: str) -> list[int]:
        """Steps at which one of these metrics was recorded as a number that is not finite."""
        return sorted({step for name in names for step in self.source.nonfinite(name)})

    @cached_property
    def lost_at(self) -> int | None:
        """The first step whose loss or gradient was not finite, by an event or by the numbers."""
        steps = [event.step for event in self.events("nonfinite")]
        return min([*steps, *self.nonfinite(LOSS, CE, RAW_NORM, NORM)], default=None)

    # -- the loss ------------------------------------------------------------------------------------------

    @cached_property
    def spikes(self) -> list[int]:
        """Steps at which the loss spiked: by events, and by its own numbers where no event tells of it."""
        told = [event.step for event in self.events("loss_spike")]
        untold = [
            int(one.step)
            for one in self.curve_spikes
            if not any(one.step <= step <= one.step + (one.recovery_steps or 0) for step in told)
        ]
        return sorted([*told, *untold])

    @cached_property
    def curve_spikes(self) -> list[CurveSpike]:
        """What the losses show of spikes by themselves."""
        return spikes_of(self.loss.step, self.loss.value, self.source.resolution or None, CurveLimits())

    @cached_property
    def rise(self) -> Rise | None:
        """A rise at the end of the loss, if it never came back."""
        loss, limits = self.loss, CurveLimits()
        if len(loss.value) < limits.least_rows:
            return None
        return rise_of(blocks_of(loss.step, loss.value, np.ones(len(loss.value), np.bool_)), None, limits)

    @cached_property
    def hard_batches(self) -> Series:
        """Losses that stand far above those before and after, where hardly any stand as far below.

        Heavy tails go both ways, what is in a batch goes up. The values are logarithms of how many times.
        """
        limits, loss = self.limits, self.loss
        half = limits.window // 2
        if len(loss.value) < 2 * limits.window or not (loss.value > 0).all():
            return NOTHING
        log = np.log(loss.value)
        halves = np.median(np.lib.stride_tricks.sliding_window_view(log, half), axis=1)
        middle = slice(half, len(log) - half)
        before, after = halves[: len(log) - 2 * half], halves[half + 1 :]
        above = log[middle] - np.maximum(before, after)
        below = np.minimum(before, after) - log[middle]
        # A loss written with few digits has no noise of its own below them.
        finest = self.source.resolution / float(np.median(loss.value))
        far = limits.outlier * max(spread(above), finest, np.finfo(float).tiny)
        up = above > far
        if up.sum() < limits.outlier_skew * (below > far).sum():
            return NOTHING
        return Series(loss.step[middle][up], above[up])

    @cached_property
    def row_distance(self) -> float:
        """Steps from one loss to the next, as a rule."""
        return float(np.median(np.diff(self.loss.step))) if len(self.loss.step) > 1 else 1.0

    def first_beyond(self, series: Series, beyond: Callable[[Series], np.ndarray[Any, Any]]) -> int | None:
        """The first step from which on most of a window's values are beyond something."""
        past = beyond(series)
        if not past.any():
            return None
        window = min(self.limits.onset_window, len(past))
        share = np.lib.stride_tricks.sliding_window_view(past, window).mean(axis=1)
        lasting = np.flatnonzero((share > 1 / 2) & past[: len(share)])
        return int(series.step[lasting[0] if len(lasting) else np.argmax(past)])


def loss_of(source: Source) -> Series:
    """The loss of a source: cross-entropy if it has it."""
    return source.series(CE) or source.series(LOSS)
