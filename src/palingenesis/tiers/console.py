"""A reading as one line of the log: ``step=100 loss=1.2345 dt=0.52s health/grad_cosine_sim=0.42 …``.

``pgs monitor`` reads it back.
"""

from __future__ import annotations

import logging
import time

from palingenesis.reading import Reading

log = logging.getLogger("palingenesis")

# Not worth a place in every line; the record has them.
_LEFT_OUT = frozenset({"train/loss", "health/loss_mean", "health/loss_std", "health/loss_cv"})
# Steps that are remembered until their readings come.
_REMEMBERED = 256


class Console:
    """Logs readings, with what else a person wants to see of their steps."""

    def __init__(self) -> None:
        # By step: when it was, in seconds, and its learning rate.
        self._steps: dict[int, tuple[float, float | None]] = {}

    def note(self, step: int, rate: float | None) -> None:
        """Remember when a step is, and its learning rate."""
        self._steps[step] = time.monotonic(), rate
        if len(self._steps) > _REMEMBERED:
            del self._steps[next(iter(self._steps))]

    def tell(self, reading: Reading) -> None:
        """Log a reading."""
        if log.isEnabledFor(logging.INFO):
            log.info("%s", self._line(reading))

    def _line(self, reading: Reading) -> str:
        parts = [f"step={reading.step}"]
        if "train/loss" in reading.scalars:
            parts.append(f"loss={reading.scalars['train/loss']:.4f}")
        now, rate = self._steps.get(reading.step, (None, None))
        before, _ = self._steps.get(reading.step - 1, (None, None))
        if rate is not None:
            parts.append(f"lr={rate:.2e}")
        if now is not None and before is not None:
            parts.append(f"dt={now - before:.2f}s")
        for name, value in reading.scalars.items():
            if name not in _LEFT_OUT and not name.endswith("_se"):
                parts.append(f"{name}={value:.4g}")
        parts += [f"{name}={word}" for name, word in reading.labels.items()]
        return " ".join(parts)
