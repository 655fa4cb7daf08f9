"""Sources: a run folder or a foreign log, asked the same questions.

    RecordSource   a record (:class:`~palingenesis.record.reader.Run`): every number, event and batch
    LogSource      any trainer's log (:class:`~palingenesis.runlogs.table.RunLog`): what that format shows

What a source does not have is empty, so that whoever needs it stays silent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from palingenesis.events import Event, Severity
from palingenesis.findings.skips import Skips, scaled_away, skips_of
from palingenesis.record.columns import Floats
from palingenesis.record.format import METRICS_FILE, NON_FINITE, RUN_FILE, STEP_KEY, decode
from palingenesis.record.lines import read_lines
from palingenesis.record.reader import Run, load_run
from palingenesis.runlogs.table import EventKind, LogEvent, RunLog

NORM, RAW_NORM = "train/grad_norm", "train/grad_norm_raw"
#: Where trackers keep under which name they know the run (``trackers/identity.py``).
_TRACKED = "tracker_run_id.json"

#: What a thing that a log tells is called among events, and how bad it is.
_KINDS: Mapping[EventKind, tuple[str, Severity]] = {
    "skipped": ("skipped_step", "info"),
    "overflow": ("skipped_step", "info"),
    "warning": ("log_warning", "info"),
    "error": ("log_error", "critical"),
    "nonfinite": ("nonfinite", "critical"),
}
#: Norms within this share of the largest one are at the bound that clipping sets.
_AT_BOUND = 1e-3
#: Share of norms at the bound from which they were taken after clipping.
_CLIPPED_SHARE = 0.2


class Series(NamedTuple):
    """The finite values of one metric, in the order of their steps."""

    step: Floats
    value: Floats

    def __bool__(self) -> bool:
        return len(self.value) > 0

    def part(self, first: float, last: float = np.inf) -> Series:
        """What lies from one step to another, both included."""
        inside = (self.step >= first) & (self.step <= last)
        return Series(self.step[inside], self.value[inside])

    @property
    def second_half(self) -> Series:
        return self.part((self.step[0] + self.step[-1]) / 2) if self else self


NOTHING = Series(np.empty(0), np.empty(0))


class RecordedRow(NamedTuple):
    """A row of a record's file as it was written."""

    step: int
    counts: bool
    """False for a row of a step that was run again after a resume."""
    values: Mapping[str, Any]


class Source(Protocol):
    """What a case is built on."""

    @property
    def names(self) -> Iterable[str]:
        """Every metric."""

    @property
    def rows_written(self) -> int:
        """Rows that count."""

    @property
    def events(self) -> Sequence[Event]:
        """All of them, those of steps that were run again included."""

    @property
    def error(self) -> str:
        """What ended the run, in its own words; empty if it did not end so, or if nobody knows."""

    @property
    def info(self) -> Mapping[str, Any]:
        """What the run says about itself: ``config`` and the like."""

    @property
    def training(self) -> Mapping[str, Any]:
        """What the training loop was configured with, by common names."""

    @property
    def folder(self) -> Path | None:
        """Where a record lies."""

    @property
    def tracked(self) -> bool:
        """Whether rows went to a tracker too."""

    @property
    def clipped_only(self) -> bool:
        """Gradient norms are known after clipping only, and cannot show growth."""

    @property
    def steps_inferred(self) -> bool:
        """Steps are not in the log, and were worked out."""

    @property
    def blurred(self) -> bool:
        """Losses are means over many steps, or steps are not in the log: details are lost."""

    @property
    def resolution(self) -> float:
        """The smallest difference between two losses that can show; 0 where every bit is there."""

    @property
    def skips(self) -> Skips | None:
        """What a log tells of skipped steps; a record has events of them."""

    def series(self, name: str) -> Series:
        """The finite values of a metric."""

    def nonfinite(self, name: str) -> list[int]:
        """Steps at which a metric was written as a number that is not finite."""

    def rows(self, *containing: str) -> Iterator[RecordedRow]:
        """Rows as they were written, of those with any of these texts in them."""


def source_of(given: Run | RunLog) -> Source:
    """The source for a run or a log; a log that was read from a run folder has its record beside it."""
    if isinstance(given, RunLog):
        folder = Path(given.source)
        if (folder / RUN_FILE).is_file():
            return RecordSource(load_run(folder))
        return LogSource(given)
    return RecordSource(given)


def is_record(path: Path) -> bool:
    """Whether a path is a run folder of this project."""
    if not path.is_dir():
        return False
    return (path / RUN_FILE).is_file() or (path / METRICS_FILE).is_file()


@dataclass(frozen=True)
class RecordSource:
    """A record."""

    run: Run

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.run.metrics)

    @property
    def rows_written(self) -> int:
        return len(self.run.metrics.step)

    @property
    def events(self) -> Sequence[Event]:
        return self.run.events

    @property
    def error(self) -> str:
        end = self.info.get("end")
        return str(end.get("error") or "") if isinstance(end, Mapping) else ""

    @property
    def info(self) -> Mapping[str, Any]:
        return self.run.info

    @property
    def training(self) -> Mapping[str, Any]:
        return self.run.training

    @property
    def folder(self) -> Path:
        return self.run.folder

    @property
    def tracked(self) -> bool:
        return (self.run.folder / _TRACKED).is_file()

    @cached_property
    def clipped_only(self) -> bool:
        return not self.series(RAW_NORM)

    @property
    def steps_inferred(self) -> bool:
        return False

    @property
    def blurred(self) -> bool:
        return False

    @property
    def resolution(self) -> float:
        return 0.0

    @property
    def skips(self) -> None:
        return None

    def series(self, name: str) -> Series:
        if name not in self.names:  # `in` on the columns would look for similar names
            return NOTHING
        step, value = self.run.metrics["step"], self.run.metrics[name]
        known = np.isfinite(step) & np.isfinite(value)
        order = np.argsort(step[known], kind="stable")
        return Series(step[known][order], value[known][order])

    def nonfinite(self, name: str) -> list[int]:
        return [row.step for row in self._nonfinite_rows if row.values.get(name) in NON_FINITE]

    @cached_property
    def _nonfinite_rows(self) -> list[RecordedRow]:
        return [row for row in self.rows(*(f'"{word}"' for word in NON_FINITE)) if row.counts]

    def rows(self, *containing: str) -> Iterator[RecordedRow]:
        path = self.run.folder / METRICS_FILE
        if not path.is_file():
            return
        resumes = self.run.info.get("resumes")
        cuts = [_cut(resume) for resume in (resumes if isinstance(resumes, list) else [])]
        wanted = [text.encode() for text in containing]
        for line in read_lines(path).whole:
            if not any(text in line.text for text in wanted):
                continue
            try:
                row = decode(line.text)
            except ValueError:  # named in run.problems
                continue
            step = row.get(STEP_KEY) if isinstance(row, dict) else None
            if isinstance(step, int):
                counts = not any(line.offset < end and step > last for end, last in cuts)
                yield RecordedRow(step, counts, row)


def _cut(resume: Any) -> tuple[int, int]:
    """Up to which byte rows count only up to which step."""
    end, last = (resume.get("metrics_bytes"), resume.get("from_step")) if isinstance(resume, dict) else (0, 0)
    return (end, last) if isinstance(end, int) and isinstance(last, int) else (0, 0)


@dataclass(frozen=True)
class LogSource:
    """The log of any trainer."""

    log: RunLog

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.log.columns)

    @property
    def rows_written(self) -> int:
        return self.log.rows

    @cached_property
    def events(self) -> Sequence[Event]:
        told = [_event(event) for event in self.log.events if event.kind in _KINDS]
        resumed = [
            Event(
                "run_resumed",
                int(restart.to_step) - 1,
                "info",
                f"the log goes on from step {restart.to_step:g} after step {restart.from_step:g}",
                {"from_step": int(restart.to_step) - 1},
            )
            for restart in self.log.restarts
        ]
        return sorted([*told, *resumed], key=lambda event: event.step)

    @cached_property
    def error(self) -> str:
        """Only of the end: a log that goes on after an error got over it."""
        last = -np.inf if self.log.last_step is None else self.log.last_step
        told = [
            event.text
            for event in self.log.events
            if event.kind == "error" and event.step is not None and event.step >= last
        ]
        named = [text for text in told if not text.startswith("Traceback")]
        return "; ".join(dict.fromkeys(named or told))

    @property
    def info(self) -> Mapping[str, Any]:
        return {}

    @property
    def training(self) -> Mapping[str, Any]:
        return {}

    @property
    def folder(self) -> None:
        return None

    @property
    def tracked(self) -> bool:
        return False

    @cached_property
    def clipped_only(self) -> bool:
        """Most trainers write the norm before clipping; one that does not shows it by its largest values."""
        norm = (self.series(RAW_NORM) or self.series(NORM)).value
        at_bound = np.abs(norm - norm.max(initial=0.0)) <= _AT_BOUND * norm.max(initial=0.0)
        return not len(norm) or float(at_bound.mean()) > _CLIPPED_SHARE

    @property
    def steps_inferred(self) -> bool:
        return self.log.step_inferred

    @property
    def blurred(self) -> bool:
        return self.log.step_inferred or self.log.loss_kind in ("interval_mean", "moving_average")

    @property
    def resolution(self) -> float:
        return self.log.resolution or 0.0

    def series(self, name: str) -> Series:
        column = self.log.live(name).finite
        order = np.argsort(column.step, kind="stable")
        return Series(column.step[order], column.value[order])

    @cached_property
    def skips(self) -> Skips:
        return skips_of(self.log)

    def nonfinite(self, name: str) -> list[int]:
        column = self.log.live(name)
        if not column or (name in (NORM, RAW_NORM) and scaled_away(self.log, column)):
            return []
        lost = ~np.isfinite(column.value) & np.isfinite(column.step)
        return [int(step) for step in column.step[lost]]

    def rows(self, *containing: str) -> Iterator[RecordedRow]:
        return iter(())


def _event(told: LogEvent) -> Event:
    name, severity = _KINDS[told.kind]
    step = 0 if told.step is None else int(told.step)
    return Event(name, step, severity, told.text, {"line": told.line or None, "source": "log"})
