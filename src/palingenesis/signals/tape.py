"""A scalar of every step since the last check, kept where it is until then: no host read in between."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class StepTape:
    """Values of single steps: numbers on the host, and a buffer for those on an accelerator.

    Args:
        capacity: most steps between two checks. Where checks do not come, the oldest values are dropped.
    """

    capacity: int
    _host: dict[int, float] = field(default_factory=dict)
    _slots: dict[int, int] = field(default_factory=dict)
    _next_slot: int = 0
    _buffer: torch.Tensor | None = None

    def note(self, step: int, value: torch.Tensor | float) -> None:
        """Remember ``value`` (a number or a tensor of one element, on the graph or not) for ``step``."""
        if isinstance(value, torch.Tensor):
            value = value.detach()
            if value.device.type != "cpu":
                self._note_on_device(step, value)
                return
        self._host[step] = float(value)
        self._drop_oldest(self._host)

    def _note_on_device(self, step: int, value: torch.Tensor) -> None:
        if self._buffer is None or self._buffer.device != value.device:
            dtype = torch.float32 if value.device.type == "mps" else torch.float64
            # A tensor made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                self._buffer = torch.zeros(self.capacity, dtype=dtype, device=value.device)
            self._slots.clear()
        self._slots.pop(step, None)
        self._slots[step] = slot = self._next_slot
        self._next_slot = (slot + 1) % self.capacity
        self._buffer[slot].copy_(value.reshape(()), non_blocking=True)
        self._drop_oldest(self._slots)

    def _drop_oldest(self, noted: dict[int, Any]) -> None:
        if len(noted) > self.capacity:
            del noted[next(iter(noted))]

    @property
    def buffer(self) -> torch.Tensor | None:
        """What must reach the host for ``values``; ``None`` when everything is there already."""
        return self._buffer if self._slots else None

    def take(self) -> TapeCut:
        """Everything noted since the last ``take``; the tape is empty afterwards."""
        cut = TapeCut(self._host, self._slots)
        self._host, self._slots = {}, {}
        return cut


@dataclass(frozen=True)
class TapeCut:
    """What a tape held, still without the values of the device's buffer."""

    host: dict[int, float]
    slots: dict[int, int]

    def values(self, buffer: object) -> list[tuple[int, float]]:
        """``(step, value)`` in order; ``buffer`` is the tape's buffer as it arrived on the host."""
        found = dict(self.host)
        for step, slot in self.slots.items():
            found[step] = float(buffer[slot])  # type: ignore[index]
        return sorted(found.items())
