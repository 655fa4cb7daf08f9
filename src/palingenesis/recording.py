"""From readings to rows of the record: one of metrics a step, one of layers a check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palingenesis.record.writer import RecordWriter
from palingenesis.watch.reading import CheckReading


def write_metrics(
    writer: RecordWriter,
    times: Mapping[int, float],
    losses: Sequence[tuple[int, float]],
    at_check: Mapping[int, dict[str, Any]],
) -> None:
    """One row of metrics.jsonl a step, in order.

    Args:
        writer: the record.
        times: when each step was, in seconds since the epoch.
        losses: ``(step, loss)`` of the steps that had one.
        at_check: what else is known at a check's step.
    """
    known = dict(losses)
    for step, when in times.items():
        row: dict[str, Any] = {"train/global_step": step, "time": when}
        if step in known:
            row["train/loss"] = known[step]
        writer.metrics(row | at_check.get(step, {}))


def check_metrics(reading: CheckReading, learning_rate: float | None, *, clipped: bool) -> dict[str, Any]:
    """What a check adds to its step's row: the norm over all watched layers, and the learning rate."""
    seen = "train/grad_norm" if clipped else "train/grad_norm_raw"
    found = {seen: float(np.linalg.norm(reading.norm))}
    if learning_rate is not None:
        found["train/lr"] = learning_rate
    return found


def write_check(writer: RecordWriter, reading: CheckReading, judged: int, layers: Sequence[str]) -> None:
    """One line of layers.jsonl; flushes what waits."""
    norms = [None if gone else float(norm) for norm, gone in zip(reading.norm, reading.absent, strict=True)]
    writer.check(reading.step, judged, layers, norms)
