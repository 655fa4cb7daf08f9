"""A run folder of this project as a table: the rows that count, and events of warning and above."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from palingenesis.record.folder import read_info
from palingenesis.record.format import EVENTS_FILE, METRICS_FILE, STEP_KEY
from palingenesis.record.reader import Run, load_run
from palingenesis.runlogs.table import Column, EventKind, LogEvent, RunLog
from palingenesis.runlogs.times import seconds

#: Events that are of a kind of their own; others of warning and above are warnings.
_KINDS: dict[str, EventKind] = {
    "skipped_step": "skipped",
    "scaler_overflow": "overflow",
    "nonfinite": "nonfinite",
    "run_resumed": "restart",
    "monitor_error": "error",
}


def read_record(folder: Path, source: str) -> RunLog:
    """The table of a run folder.

    Raises:
        RecordError: there is no run in it, or one that only a newer version can read.
    """
    run = load_run(folder)
    step = run.metrics.step
    columns = {}
    for name in run.metrics:
        rows, values = run.metrics.logged(name)
        # What is no number has no place: texts were read as NaN.
        if name != STEP_KEY and not (np.isnan(values).all() and name not in _MAY_BE_NAN):
            columns[name] = Column(rows, step[rows], values)
    end = run.info.get("end")
    return RunLog(
        source=source,
        format="palingenesis",
        columns=columns,
        rows=len(step),
        total_steps=_total(run.info),
        finished=_finished(run.info),
        started=seconds(str(run.info.get("start"))),
        ended=seconds(str(end.get("time"))) if isinstance(end, dict) else None,
        modified=_modified(folder),
        loss_kind="step",
        events=_events(run),
    )


#: All of whose values may be no numbers, in a run that went wrong from the start.
_MAY_BE_NAN = frozenset(
    {"train/loss", "train/ce_loss", "train/grad_norm", "train/grad_norm_raw", "eval/loss"}
)


def _events(run: Run) -> tuple[LogEvent, ...]:
    found = []
    for event in run.events:
        kind = _KINDS.get(event.event)
        if event.superseded or event.ordinary or (event.severity == "info" and kind is None):
            continue
        found.append(LogEvent(kind or "warning", float(event.step), 0, f"{event.event}: {event.message}"))
    return tuple(found)


def with_plan(log: RunLog, folder: Path) -> RunLog:
    """A log of lines that lies in a run folder, with the number of steps and the end from ``run.json``."""
    info, _ = read_info(folder)
    return dataclasses.replace(
        log,
        total_steps=log.total_steps if log.total_steps is not None else _total(info),
        finished=log.finished if log.finished is not None else _finished(info),
    )


def _finished(info: dict[str, Any]) -> bool | None:
    end = info.get("end")
    return end.get("reason") == "completed" if isinstance(end, dict) else None


def _total(info: dict[str, Any]) -> int | None:
    for place in (info.get("training"), info):
        for name in ("total_steps", "max_steps"):
            value = place.get(name) if isinstance(place, dict) else None
            if isinstance(value, int) and value > 0:
                return value
    return None


def _modified(folder: Path) -> float | None:
    times = [path.stat().st_mtime for path in (folder / METRICS_FILE, folder / EVENTS_FILE) if path.is_file()]
    return max(times, default=None)
