"""Small recorded runs, made through the writer as a monitor makes them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palingenesis.events import Event
from palingenesis.record.writer import RecordWriter

LAYERS = ["embed", "blocks.0", "head"]
INFO: dict[str, Any] = {"name": "a run", "layers": LAYERS, "config": {"sigma": 2.5}}
COMPLETED = {"reason": "completed", "error": None, "steps": 100, "counts": {}}


def started(step: int = 0) -> Event:
    return Event("run_started", step, "info", "run started", {"record_version": 1, "name": "a run"})


def alarm(step: int, layer: str = "blocks.0", severity: Any = "warning") -> Event:
    fields = {"layer": layer, "diagnosis": "vanishing", "value": -4.5, "baseline": -1.0, "sigma": 9.0}
    return Event("alarm", step, severity, f"{layer} is vanishing", fields)


def info(step: int, text: str = "nothing much") -> Event:
    return Event("level_shift", step, "info", text, {"layer": "head", "value": 1.0})


def write_check(
    writer: RecordWriter, step: int, *, judged: int = 3, norms: Sequence[Any] = (1.0, 2.0, 3.0)
) -> None:
    writer.metrics({"train/global_step": step, "time": 1000.0 + step, "train/loss": 1.0 / step})
    writer.check(step, judged, LAYERS, norms)


def record(folder: Path, *events: Event, checks: int = 2, end: dict[str, Any] | None = COMPLETED) -> Path:
    """A whole run with these events; without an ``end`` it looks like one that was killed."""
    writer = RecordWriter(folder, INFO)
    writer.event(started())
    for check in range(1, checks + 1):
        write_check(writer, 50 * check)
    for event in events:
        writer.event(event)
    if end is None:
        kill(writer)
    else:
        writer.close(end)
    return folder


def kill(writer: RecordWriter) -> None:
    """Leave the folder as it is when the process dies: what waits is lost, the lock is freed."""
    for file in writer._files:
        file.close()
    writer._lock.release()


def python(program: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)
