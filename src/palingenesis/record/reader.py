"""load_run: a run folder in, a Run out.

Reads records of runs that ended, were killed, or are still being written. Half a last line is left out in
silence, since that is what a kill leaves; anything else that cannot be read is left out and named in
``Run.problems``. Rows that a resumed run made again are left out too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from palingenesis.errors import RecordError
from palingenesis.events import Event
from palingenesis.record.columns import (
    CheckRow,
    Columns,
    Ints,
    LayerColumns,
    check_row,
    layer_columns,
    metric_columns,
)
from palingenesis.record.folder import open_run_folder
from palingenesis.record.format import (
    EVENTS_FILE,
    LAYERS_FILE,
    METRICS_FILE,
    NON_FINITE,
    NUMBER_FIELDS,
    STEP_KEY,
    TEXT_VALUE_EVENTS,
    decode,
)
from palingenesis.record.lines import read_lines
from palingenesis.record.verdict import Verdict, judge, lacking, qualified
from palingenesis.record.verify import Verification, verify

#: Of runs that do not say how many checks in a row an alarm needed.
_CONSECUTIVE = 2


@dataclass(frozen=True)
class Run:
    """A recorded run.

    An event that lies after the step from which the run was later resumed stays in ``events``, with
    ``event.superseded`` true: its steps were run again, and the verdict goes by what came of that.
    """

    folder: Path
    info: dict[str, Any]
    events: list[Event]
    metrics: Columns
    layers: LayerColumns
    judged: Ints  # layers with a finished baseline, a number a check
    checks_without_gradients: int
    problems: list[str] = field(default_factory=list)

    @cached_property
    def _judgement(self) -> Verdict:
        could_ring = self.alarms_possible_from is not None
        return qualified(
            judge(
                self.events,
                len(self.judged),
                self.checks_without_gradients,
                int(self.judged.max()) if could_ring else 0,
                self._end,
            ),
            self.lacking,
        )

    @property
    def _end(self) -> dict[str, Any] | None:
        end = self.info.get("end")
        return end if isinstance(end, dict) else None

    @property
    def lacking(self) -> str | None:
        """Which events the record lacks, in words; ``None`` if none as far as it tells by itself."""
        return lacking(self.events, self._end)

    @property
    def alarms_possible_from(self) -> int | None:
        """The step of the first check at which layers had been judged often enough for an alarm."""
        steps = self.layers.step[self.judged > 0]
        needed = _consecutive(self.info)
        return int(steps[needed - 1]) if len(steps) >= needed else None

    @property
    def verdict(self) -> str:
        """One word on the run."""
        return self._judgement.word

    @property
    def verdict_sentence(self) -> str:
        """The fact that decided, in one line."""
        return self._judgement.sentence

    @property
    def training(self) -> dict[str, Any]:
        """What the training loop was configured with, as ``pgs train`` and the callbacks record it.

        Common names (``learning_rate``, ``schedule``, ``warmup_steps``, ``total_steps``, ``packing``, …)
        where the loop has such a thing, ``by`` for whose loop it is, and all its own options under
        ``options``. Empty where nothing told it.
        """
        training = self.info.get("training")
        return training if isinstance(training, dict) else {}

    def verify(self) -> Verification:
        """Whether the record on disk is as it was written."""
        return verify(self.folder)


def load_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run folder.

    Raises:
        RecordError: there is no run in it, or one that only a newer version can read.
    """
    path, info, info_problem = open_run_folder(folder)
    problems = [] if info_problem is None else [info_problem]
    resumes = _resumes(info)
    try:
        events = _read_events(path, problems)
        rows = _read_metrics(path, resumes, problems)
        checks = _read_checks(path, resumes, problems)
    except OSError as error:
        raise RecordError(
            f"run folder {path} cannot be read: {error.strerror or error}; expected files you may read"
        ) from None
    return Run(
        folder=path,
        info=info,
        events=events,
        metrics=metric_columns(rows),
        layers=layer_columns(checks),
        judged=np.array([check.judged for check in checks], dtype=np.int64),
        checks_without_gradients=sum(not check.saw_gradients for check in checks),
        problems=problems,
    )


def _consecutive(info: Mapping[str, Any]) -> int:
    """Checks in a row that an alarm needed in this run."""
    config = info.get("config")
    value = config.get("consecutive") if isinstance(config, dict) else None
    return value if isinstance(value, int) and value >= 1 else _CONSECUTIVE


class _Resume(NamedTuple):
    from_step: int
    metrics_bytes: int  # size of the file when the run was resumed
    layers_bytes: int


def _resumes(info: Mapping[str, Any]) -> list[_Resume]:
    recorded = info.get("resumes")
    found = []
    for entry in recorded if isinstance(recorded, list) else []:
        values = [entry.get(name) for name in _Resume._fields] if isinstance(entry, dict) else []
        numbers = [value for value in values if isinstance(value, int)]
        if len(numbers) == len(_Resume._fields):
            found.append(_Resume(*numbers))
    return found


def _objects(path: Path, problems: list[str]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Line number, offset and object of every whole line that holds one."""
    for line in read_lines(path).whole:
        try:
            value = decode(line.text)
            if not isinstance(value, dict):
                raise ValueError("no JSON object")
        except ValueError as error:
            problems.append(_skipped(path, line.number, error))
            continue
        yield line.number, line.offset, value


def _skipped(path: Path, number: int, error: ValueError) -> str:
    return f"{path.name} line {number} cannot be read and was left out ({error})"


def _read_events(folder: Path, problems: list[str]) -> list[Event]:
    path = folder / EVENTS_FILE
    events = []
    for line_number, _, value in _objects(path, problems):
        try:
            events.append(_event(value))
        except ValueError as error:
            problems.append(_skipped(path, line_number, error))
    return _mark_superseded(events)


def _event(value: dict[str, Any]) -> Event:
    fields = dict(value)
    name, step = fields.pop("event", None), fields.pop("step", None)
    severity, message = fields.pop("severity", None), fields.pop("message", None)
    if (
        not isinstance(name, str)
        or not isinstance(step, int)
        or severity not in ("info", "warning", "critical")
    ):
        raise ValueError("no event, step and severity")
    for key in NUMBER_FIELDS & fields.keys():
        if isinstance(fields[key], str) and not (key == "value" and name in TEXT_VALUE_EVENTS):
            fields[key] = NON_FINITE.get(fields[key], fields[key])
    return Event(name, step, severity, str(message or ""), fields)


def _mark_superseded(events: list[Event]) -> list[Event]:
    marked = []
    from_step: int | None = None  # least step that any later line resumed from
    for event in reversed(events):
        if from_step is not None and event.step > from_step:
            fields = {**event.fields, "superseded": True}
            event = Event(event.event, event.step, event.severity, event.message, fields)
        marked.append(event)
        if event.event == "run_resumed" and isinstance(event.from_step, int):
            from_step = event.from_step if from_step is None else min(from_step, event.from_step)
    return marked[::-1]


def _read_metrics(folder: Path, resumes: list[_Resume], problems: list[str]) -> list[dict[str, Any]]:
    rows = []
    for _, offset, row in _objects(folder / METRICS_FILE, problems):
        step = row.get(STEP_KEY)
        if isinstance(step, (int, float)) and any(
            offset < resume.metrics_bytes and step > resume.from_step for resume in resumes
        ):
            continue
        rows.append(row)
    return rows


def _read_checks(folder: Path, resumes: list[_Resume], problems: list[str]) -> list[CheckRow]:
    path = folder / LAYERS_FILE
    names: tuple[str, ...] = ()
    checks = []
    for line_number, offset, row in _objects(path, problems):
        if isinstance(row.get("layers"), list):
            names = tuple(map(str, row["layers"]))
            continue
        try:
            check = check_row(row, names)
        except ValueError as error:
            problems.append(_skipped(path, line_number, error))
            continue
        if not any(offset < resume.layers_bytes and check.step > resume.from_step for resume in resumes):
            checks.append(check)
    return checks
