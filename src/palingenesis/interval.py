"""The steps between two checks: what is gathered of them, and what of it is on its way to the host."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from palingenesis.config import MonitorConfig
from palingenesis.describe import learning_rate
from palingenesis.errors import LayerError
from palingenesis.layers import Layers, is_sharded
from palingenesis.scaling import Scaler
from palingenesis.signals.cosine import Norms
from palingenesis.signals.gradients import GradientReader, PendingCheck
from palingenesis.signals.tape import StepTape, TapeCut
from palingenesis.watch.reading import Bools, CheckReading

Series = list[tuple[int, float]]


@dataclass(frozen=True)
class Interval:
    """The steps since the last check, on their way: what the host knew, and what is still to arrive."""

    check: PendingCheck
    reader: GradientReader
    losses: TapeCut
    scales: TapeCut
    times: dict[int, float]
    learning_rate: float | None

    @property
    def ready(self) -> bool:
        """Whether everything has arrived, so that ``decode`` need not wait."""
        return self.check.packet.ready

    @property
    def layers(self) -> Layers:
        return self.reader.layers

    def decode(self) -> tuple[CheckReading | LayerError, Series, Series]:
        """The gradients at the end, or why they are not known; the loss and the loss scale of every step."""
        arrays = self.check.packet.arrays()
        reading: CheckReading | LayerError
        try:
            reading = self.reader.decode(self.check, arrays)
        except LayerError as error:
            reading = error
        return reading, self.losses.values(arrays.get("losses")), self.scales.values(arrays.get("scales"))


class Gatherer:
    """Gathers one interval after the other.

    Args:
        layers: what to read.
        config: how often, and whether every step is looked at.
        scaler: the gradient scaler, if there is one.
        optimizers: for the learning rate.
    """

    def __init__(
        self, layers: Layers, config: MonitorConfig, scaler: Scaler, optimizers: Sequence[Any]
    ) -> None:
        self._config, self._scaler, self._optimizers = config, scaler, optimizers
        self._losses, self._scales = StepTape(config.check_every), StepTape(config.check_every)
        self._times: dict[int, float] = {}
        self.follow(layers)

    def follow(self, layers: Layers) -> None:
        """Go on with changed layers; what the guard saw of the old ones since the last check is dropped."""
        config = self._config
        self.reader = GradientReader(layers, guard=config.guard_every_step, interval=config.check_every)

    def note(self, step: int, loss: torch.Tensor | float | None) -> None:
        """Remember when a step was, its loss and its loss scale."""
        self._times[step] = time.time()
        if isinstance(loss, torch.Tensor):
            self._losses.note(step, one_number(loss))
        elif loss is not None:
            self._losses.note(step, loss)
        scale = self._scaler.scale
        if scale is not None:
            self._scales.note(step, scale)

    def look(self, step: int, known: Norms | None = None) -> None:
        """Read a step's gradients on their devices; ``known`` are norms of those that are gone already."""
        self.reader.look(step, self._scaler.still_in_gradients, known)

    def send(self, step: int, *, absent: Bools | None = None, last: bool = False) -> Interval:
        """Send what was gathered on its way to the host, and begin anew.

        Args:
            step: the step that ends the interval.
            absent: units that had no gradient, where that cannot be seen any more.
            last: nothing comes after it: no other rank is waited for.
        """
        tapes = {"losses": self._losses, "scales": self._scales}
        extra = {name: tape.buffer for name, tape in tapes.items() if tape.buffer is not None}
        check = self.reader.send(step, extra, absent=absent, last=last)
        times, self._times = self._times, {}
        rate = learning_rate(self._optimizers)
        return Interval(check, self.reader, self._losses.take(), self._scales.take(), times, rate)

    def bound(self) -> None:
        """Drop what a failing check has left behind, so that it does not gather for ever."""
        if len(self._times) > self._config.check_every:
            self._times = {}
            self._losses.take()
            self._scales.take()


def one_number(loss: torch.Tensor) -> torch.Tensor | float:
    """A loss as one number: the mean of one with more elements, whole if it was sharded."""
    whole: torch.Tensor = loss.full_tensor() if is_sharded(loss) else loss  # type: ignore[attr-defined]
    if whole.numel() == 1:
        return whole
    return whole.detach().double().mean() if whole.numel() else math.nan
