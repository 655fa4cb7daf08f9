"""All watches of one run, fed together at every check, and their state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from palingenesis.changes import Inventory
from palingenesis.config import MonitorConfig
from palingenesis.errors import ConfigError
from palingenesis.events import Event
from palingenesis.watch.between import BetweenWatch
from palingenesis.watch.layer_alarms import LayerWatch
from palingenesis.watch.loss import LossWatch
from palingenesis.watch.nonfinite import NonfiniteWatch
from palingenesis.watch.reading import CheckReading
from palingenesis.watch.skips import SkipWatch

Series = Sequence[tuple[int, float]]


class Watchers:
    """The watches.

    Args:
        inventory: the layers under watch.
        config: thresholds.
        raw: gradients are known to be unclipped.
    """

    def __init__(self, inventory: Inventory, config: MonitorConfig, *, raw: bool) -> None:
        self.config, self._raw = config, raw
        self.loss = LossWatch(config)
        self.skips = SkipWatch(config)
        self._last_scale: tuple[int, float] | None = None
        self._silent_told = False
        self.layers = self._layer_watch(inventory)
        self.between = BetweenWatch(inventory.layers.names, config)
        self.nonfinite = NonfiniteWatch(inventory.layers.names)

    def _layer_watch(self, inventory: Inventory) -> LayerWatch:
        layers = inventory.layers
        units = [(owner, unit.label) for owner, unit in zip(layers.owner, layers.units, strict=True)]
        return LayerWatch(layers.names, self.config, units=units, trained=inventory.trained(), raw=self._raw)

    def follow(self, inventory: Inventory) -> None:
        """Go on with changed layers: those that stay keep their baselines."""
        layers, between = self.layers.state_dict(), self.between.state_dict()
        self.layers = self._layer_watch(inventory)
        self.layers.load_state_dict(layers)
        self.between = BetweenWatch(inventory.layers.names, self.config)
        self.between.load_state_dict(between)
        self.nonfinite = NonfiniteWatch(inventory.layers.names, self.nonfinite.since)

    def check(self, reading: CheckReading, losses: Series, scales: Series) -> list[Event]:
        """Judge one interval.

        Args:
            reading: the gradients at its end.
            losses: every loss since the last check.
            scales: the loss scale at every step since then; empty without a gradient scaler.
        """
        step = reading.step
        events = self.nonfinite.check(step, losses, None if scales else reading)
        events += self.loss.check(losses, step)
        if scales:
            events += self.skips.check(self._skipped(scales), step - 1, self.nonfinite.names(reading))
        if not reading.saw_gradients:
            events += self._no_gradients(reading)
        elif not scales or reading.finite.all():
            # A step that the scaler is about to skip moves no baseline.
            events += self.layers.check(reading)
            events += self.between.check(reading, self.layers.alarmed)
        return events

    def check_losses(self, step: int, losses: Series) -> list[Event]:
        """Judge the losses alone of an interval whose gradients are not known."""
        return self.nonfinite.check(step, losses, None) + self.loss.check(losses, step)

    def close(
        self,
        step: int,
        reading: CheckReading | None,
        losses: Series,
        scales: Series,
        final_scale: float | None,
    ) -> list[Event]:
        """Judge what came after the last check.

        Args:
            step: the last step.
            reading: what the guard folded since then, with the norms of the last step it saw.
            losses, scales: since then.
            final_scale: the loss scale now, which tells whether the last step was skipped.
        """
        events: list[Event] = []
        if losses or reading is not None:
            events += self.nonfinite.check(step, losses, None if final_scale is not None else reading)
            events += self.loss.check(losses, step=0)
        if reading is not None and final_scale is None:
            events += self.between.check(reading, self.layers.alarmed)
        events += self.layers.close(step)
        events += self.between.close(self.layers.unconfirmed)
        if final_scale is not None and self._last_scale_step(scales):
            after = self._last_scale_step(scales) + 1
            skipped = self._skipped([*scales, (after, final_scale)])
            layers = [] if reading is None else self.nonfinite.names(reading)
            events += self.skips.check(skipped, after - 1, layers, closing=True)
        return events

    def _last_scale_step(self, scales: Series) -> int:
        if scales:
            return scales[-1][0]
        return self._last_scale[0] if self._last_scale else 0

    def _skipped(self, scales: Series) -> list[tuple[int, float]]:
        """Steps that were skipped: the scale is lower at the next one, or has nowhere left to fall."""
        series = [*([self._last_scale] if self._last_scale else []), *scales]
        self._last_scale = series[-1]
        return [
            (step, scale) for (step, scale), (_, after) in pairwise(series) if after < scale or scale == 0
        ]

    def _no_gradients(self, reading: CheckReading) -> list[Event]:
        # Without a layer to watch there is nothing to be missing: why there is none has been told.
        if self._silent_told or not reading.norm.size:
            return []
        self._silent_told = True
        size = len(reading.norm)
        return [
            Event(
                "no_gradients",
                reading.step,
                "warning",
                f"none of the {size} watched layers has a gradient at step {reading.step}: call step() after "
                "loss.backward() and before zero_grad()",
                {"watched": size},
            )
        ]

    def state_dict(self) -> dict[str, Any]:
        return {
            "layers": self.layers.state_dict(),
            "between": self.between.state_dict(),
            "loss": self.loss.state_dict(),
            "skips": self.skips.state_dict(),
            "nonfinite": self.nonfinite.state_dict(),
            "last_scale": list(self._last_scale) if self._last_scale else None,
            "silent_told": self._silent_told,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.layers.load_state_dict(state["layers"])
        self.between.load_state_dict(state["between"])
        self.loss.load_state_dict(state["loss"])
        self.skips.load_state_dict(state["skips"])
        self.nonfinite.load_state_dict(state["nonfinite"])
        scale = state["last_scale"]
        self._last_scale = (int(scale[0]), float(scale[1])) if scale else None
        self._silent_told = bool(state["silent_told"])


@contextlib.contextmanager
def refused_as_state() -> Iterator[None]:
    """Turn whatever goes wrong in reading a saved state into one line.

    Raises:
        ConfigError: the state is none.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"this is no state of a monitor of this version ({type(error).__name__}: {error}): "
            "pass what Monitor.state_dict() returned"
        ) from None
