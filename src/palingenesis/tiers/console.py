"""A step as one line of the log: ``step=100 loss=1.2345 dt=0.52s health/grad_cosine_sim=0.42 …``.

``pgs monitor`` reads it back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from palingenesis.reading import Reading

log = logging.getLogger("palingenesis")

# Not worth a place in every line; the record has them.
_LEFT_OUT = frozenset(
    {
        "health/loss_mean",
        "health/loss_std",
        "health/loss_cv",
        "health/alarms",
        "health/loss_spikes",
        "health/nonfinite",
        "health/checks",
        "health/verdict",
    }
)
# Nothing to tell while there is none.
_IF_ANY = frozenset({"health/alarms_active", "health/warnings"})
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
        now, rate = self._steps.get(reading.step, (None, None))
        before, _ = self._steps.get(reading.step - 1, (None, None))
        row: dict[str, Any] = {"train/global_step": reading.step, **reading.scalars, **reading.labels}
        if rate is not None:
            row["train/lr"] = rate
        if now is not None and before is not None:
            row["train/step_time_s"] = now - before
        return line_of(row)


def line_of(row: Mapping[str, Any]) -> str:
    """A row of metrics as a line; values of single layers and blocks are left to the record."""
    parts = [f"step={row['train/global_step']}"]
    for name, key, form in (
        ("loss", "train/loss", "{:.4f}"),
        ("lr", "train/lr", "{:.2e}"),
        ("grad_norm", "train/grad_norm", "{:.3f}"),
        ("tok/s", "train/tokens_per_sec_global", "{:.0f}"),
        ("dt", "train/step_time_s", "{:.2f}s"),
    ):
        if key in row:
            parts.append(f"{name}={form.format(row[key])}")
    return " ".join([*parts, *_others(row.items())])


def _others(values: Iterable[tuple[str, Any]]) -> Iterable[str]:
    for name, value in values:
        group, _, rest = name.partition("/")
        known = group in ("eval", "health") and name not in _LEFT_OUT and not name.endswith("_se")
        # eval/<source>/loss is told, health/<signal>/<layer> is not.
        if not known or (group == "health" and "/" in rest) or (name in _IF_ANY and not value):
            continue
        yield f"{name}={value}" if isinstance(value, str) else f"{name}={value:.4g}"
