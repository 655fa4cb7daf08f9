"""A tracker in memory that can be told to fail, and small recorded runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from palingenesis.record.writer import RecordWriter
from palingenesis.trackers import Identity, Limits

IDENTITY = Identity("id-of-the-run", "project", "name", None)
#: Impatient: pauses of milliseconds, one warning a test.
QUICK = Limits(
    rows=16, poll=0.002, first_pause=0.01, longest_pause=0.02, silence=0.1, warn_every=60.0, close=10.0
)


class Fake:
    """Keeps what it is given, as a backend would: ``fail`` is called before every ``open`` and ``log``."""

    name = "fake"
    where = "in memory"

    def __init__(self, fail: Callable[[int], None] | None = None) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.times: list[float] = []
        self.opened: list[str] = []
        self.closed = 0
        self.fail: Callable[[int], None] = fail or (lambda _: None)

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]

    def open(self, run_id: str, name: str, config: Mapping[str, Any]) -> dict[str, int]:
        self.fail(0)
        self.opened.append(run_id)
        held: dict[str, int] = {}
        for step, values in self.rows:
            held.update(dict.fromkeys(values, step))
        return held

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self.fail(step)
        self.rows.append((step, dict(values)))
        self.times.append(time)

    def close(self) -> None:
        self.closed += 1


def row(step: int) -> dict[str, Any]:
    """The row of a step as the record has it."""
    return {"train/global_step": step, "time": 1000.0 + step, "train/loss": 1.0 / step}


def values(step: int) -> dict[str, float]:
    return {"train/loss": 1.0 / step}


def recorded(folder: Path, steps: int, **options: Any) -> RecordWriter:
    """A record with rows 1 to ``steps``, still open."""
    writer = RecordWriter(folder, {"name": "a run", "config": {"sigma": 2.5}}, **options)
    for step in range(1, steps + 1):
        writer.metrics(row(step))
    writer.flush()
    return writer


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for another thread; fail if it takes longer."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


class Switch:
    """A failure that lasts while it is on: ``raise`` or ``hang``."""

    def __init__(self, how: str, *, on: bool = True) -> None:
        self._how, self._works = how, threading.Event()
        self.calls = 0
        if not on:
            self._works.set()

    def on(self) -> None:
        self._works.clear()

    def off(self) -> None:
        self._works.set()

    def __call__(self, step: int) -> None:
        self.calls += 1
        if self._works.is_set():
            return
        if self._how == "raise":
            raise ConnectionError("no route to host")
        self._works.wait()
