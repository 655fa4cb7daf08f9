"""Steps that the gradient scaler of mixed precision skipped.

A few are how it finds its scale; many mean that hardly anything is learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from palingenesis.config import MonitorConfig
from palingenesis.events import Event


@dataclass
class SkipWatch:
    """Counts skipped steps and warns, once an episode, of many in a row or too large a share."""

    config: MonitorConfig
    skipped: int = 0
    in_a_row: int = 0
    _last: int = 0
    _warned: bool = False

    def check(
        self,
        skips: Sequence[tuple[int, float]],
        step: int,
        layers: Sequence[str] = (),
        *,
        closing: bool = False,
    ) -> list[Event]:
        """Judge the steps up to ``step``.

        Args:
            skips: ``(step, loss scale at that step)`` of every newly skipped step, in order.
            step: the newest step whose fate is known.
            layers: those whose gradients overflowed, earliest first.
            closing: no more steps follow: a short run is judged by its share too.
        """
        events = []
        longest = 0
        for at, scale in skips:
            self.in_a_row = self.in_a_row + 1 if at == self._last + 1 else 1
            self._last = at
            self.skipped += 1
            longest = max(longest, self.in_a_row)
            events.append(
                Event(
                    "skipped_step",
                    at,
                    "info",
                    f"the gradient scaler skipped step {at}: gradients overflowed at scale {scale:g}",
                    {"scale": scale},
                )
            )
        if step > self._last:
            self.in_a_row = 0
        return events + self._warn(step, longest, list(layers), closing=closing)

    def _warn(self, step: int, longest: int, layers: list[str], *, closing: bool) -> list[Event]:
        share = self.skipped / max(step, 1)
        enough = closing or self.skipped >= self.config.skipped_in_a_row
        many = share > self.config.skipped_share and enough and self.skipped > 1
        row = longest >= self.config.skipped_in_a_row
        if not (many or row):
            self._warned &= share > self.config.skipped_share
            return []
        if self._warned:
            return []
        self._warned = True
        told = f"{longest} in a row" if row else f"{share:.0%} of all steps so far"
        where = f"; first to overflow: {layers[0]}" if layers else ""
        return [
            Event(
                "skipped_steps",
                step,
                "warning",
                f"the gradient scaler skipped {self.skipped} of {step} steps ({told}): "
                f"they taught the model nothing{where}",
                {"in_a_row": longest, "share": share, "skipped": self.skipped, "layers": layers},
            )
        ]

    def state_dict(self) -> dict[str, Any]:
        return {
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "last": self._last,
            "warned": self._warned,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])
        self._last, self._warned = int(state["last"]), bool(state["warned"])
