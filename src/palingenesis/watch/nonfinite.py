"""NaN and infinity in the loss or the gradients: one critical event an episode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from palingenesis.events import Event
from palingenesis.watch.reading import CheckReading

# How many layers a message names; the event's fields hold all of them.
NAMED = 3


@dataclass
class NonfiniteWatch:
    """Episodes of non-finite loss or gradients.

    Args:
        layers: names, in forward order.
    """

    layers: Sequence[str]
    since: int = 0

    def check(
        self, step: int, losses: Sequence[tuple[int, float]], reading: CheckReading | None
    ) -> list[Event]:
        """Judge one interval.

        Args:
            step: the check's step.
            losses: ``(step, loss)`` since the last check.
            reading: the check's gradients, and with the guard those of the steps before it; ``None`` where
                a gradient scaler is in charge: it skips such steps, and finds its scale by doing so.
        """
        bad_losses = {at: loss for at, loss in losses if not math.isfinite(loss)}
        bad_layers = self._bad_layers(step, reading)
        bad_now = step in bad_losses or (reading is not None and not reading.finite.all())
        events = []
        if (bad_losses or bad_layers) and not self.since:
            events.append(self._event(step, bad_losses, bad_layers))
            self.since = events[0].step
        if self.since and not bad_now:
            events.append(self._cleared(step))
        return events

    def _bad_layers(self, step: int, reading: CheckReading | None) -> list[tuple[int, int]]:
        """``(first step, index)`` of every layer with a non-finite gradient, earliest first."""
        if reading is None:
            return []
        first = np.where(reading.finite, 0, step)
        if reading.between is not None:
            seen = reading.between.first_nonfinite.astype(np.int64)
            first = np.where(seen > 0, seen, first)
        return sorted((int(first[i]), int(i)) for i in np.flatnonzero(first))

    def names(self, reading: CheckReading) -> list[str]:
        """Layers with a non-finite gradient since the last check, earliest first."""
        return [self.layers[i] for _, i in self._bad_layers(reading.step, reading)]

    def _event(self, step: int, bad_losses: dict[int, float], bad_layers: list[tuple[int, int]]) -> Event:
        first = min([*bad_losses, *(at for at, _ in bad_layers)])
        names = [self.layers[i] for _, i in bad_layers]
        loss = bad_losses.get(first)
        parts = []
        if bad_losses:
            parts.append("loss")
        if bad_layers:
            parts.append("gradients")
        source = " and ".join(parts)
        told = []
        if loss is not None:
            told.append(f"the loss is {_word(loss)}")
        if len(names) == len(self.layers) > 1:
            told.append(
                f"non-finite gradients in all {len(names)} layers (a loss or clipping spreads one to all)"
            )
        elif names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            told.append(f"non-finite gradients in {', '.join(names[:NAMED])}{more}")
        if not told:
            told.append(f"the loss is {_word(next(iter(bad_losses.values())))}")
        return Event(
            "nonfinite",
            first,
            "critical",
            f"{'; '.join(told)} (first at step {first})",
            {
                "source": source,
                "layers": names,
                "layer": names[0] if names else None,
                "value": _word(loss) if loss is not None else None,
                "between_checks": first != step,
            },
        )

    def _cleared(self, step: int) -> Event:
        since, self.since = self.since, 0
        return Event(
            "nonfinite_cleared",
            step,
            "info",
            f"loss and gradients are finite again (non-finite since step {since})",
            {"since": since},
        )

    def state_dict(self) -> dict[str, Any]:
        return {"since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.since = int(state["since"])


def _word(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
