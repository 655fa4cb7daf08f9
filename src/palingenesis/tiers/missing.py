"""What cannot be had, told once with the reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from palingenesis.events import Event

# Reasons that differ in their figures only are one reason.
_FIGURES = re.compile(r"\d[\d.]*")
_NAMED = 3


class Missing:
    """Remembers which reasons were told."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def tell(self, step: int, reasons: Mapping[str, str]) -> list[Event]:
        """One event for each signal and reason that is new.

        Args:
            step: the step of the reading that they are missing from.
            reasons: by metric name, with or without a layer behind it.
        """
        found: dict[tuple[str, str], list[str]] = {}
        for name, reason in reasons.items():
            signal, layer = _split(name)
            layers = found.setdefault((signal, reason), [])
            if layer:
                layers.append(layer)
        return [
            _unavailable(step, signal, reason, layers)
            for (signal, reason), layers in found.items()
            if self._is_new(signal, reason)
        ]

    def learn(self, events: Iterable[Event]) -> None:
        """Do not tell again what a resumed run has told."""
        for event in events:
            if event.event == "signal_unavailable" and event.signal and event.reason:
                self._is_new(event.signal, event.reason)

    def _is_new(self, signal: str, reason: str) -> bool:
        key = signal, _FIGURES.sub("#", reason)
        fresh = key not in self._told
        self._told.add(key)
        return fresh


def _split(name: str) -> tuple[str, str]:
    """Metric and layer: ``health/stable_rank`` and ``h.0.attn`` of ``health/stable_rank/h.0.attn``."""
    parts = name.split("/", 2)
    return "/".join(parts[:2]), parts[2] if len(parts) > 2 else ""


def _unavailable(step: int, signal: str, reason: str, layers: list[str]) -> Event:
    more = f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
    where = f" of {', '.join(layers[:_NAMED])}{more}" if layers else ""
    fields = {"signal": signal, "reason": reason, "layers": layers}
    return Event("signal_unavailable", step, "info", f"{signal}{where} cannot be had: {reason}", fields)
