"""From readings to the record: rows of metrics, one a step, and lines of layers, one a check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palingenesis.record.writer import RecordWriter
from palingenesis.tiers.rows import Rows
from palingenesis.watch.reading import CheckReading


def add_steps(rows: Rows, times: Mapping[int, float], losses: Sequence[tuple[int, float]]) -> None:
    """Add when steps were, in seconds since the epoch, and the losses of those that had one."""
    known = dict(losses)
    for step, when in times.items():
        rows.add(step, {"time": when, "train/loss": known[step]} if step in known else {"time": when})


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
