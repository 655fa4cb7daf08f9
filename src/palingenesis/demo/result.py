"""What the demonstration came to, as plain values; no torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from palingenesis.events import Event


@dataclass(frozen=True)
class DemoRun:
    """One of the two training runs."""

    folder: Path
    report: Path
    verdict: str
    first_alarm: Event | None
    first_loss: float
    """Mean over the first ``LOSS_WINDOW`` steps."""
    last_loss: float
    """Mean over the last ``LOSS_WINDOW`` steps."""
    seconds: float


@dataclass(frozen=True)
class DemoResult:
    """Both runs, and whether the monitor told them apart."""

    steps: int
    seed: int
    fault: str
    fault_step: int
    broken_layer: str
    healthy: DemoRun
    faulty: DemoRun | None

    @property
    def alarmed_layer(self) -> str | None:
        """The layer that the faulty run's first alarm names."""
        if self.faulty is None or self.faulty.first_alarm is None:
            return None
        layer: str | None = self.faulty.first_alarm.layer
        return layer

    @property
    def ok(self) -> bool:
        """The healthy run is HEALTHY, and the first alarm of the faulty one names the broken layer."""
        if self.healthy.verdict != "HEALTHY":
            return False
        return self.faulty is None or self.alarmed_layer == self.broken_layer
