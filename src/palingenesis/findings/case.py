"""Case: one record under examination, and how its numbers, events and raw rows are asked for.

What a record lacks is an empty series or an empty list, so that a symptom which needs it stays silent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from palingenesis.events import Event
from palingenesis.findings.limits import Limits
from palingenesis.record.columns import Floats
from palingenesis.record.format import METRICS_FILE, NON_FINITE, STEP_KEY, decode
from palingenesis.record.lines import read_lines
from palingenesis.record.reader import Run

LOSS, CE, RATE = "train/loss", "train/ce_loss", "train/lr"
NORM, RAW_NORM = "train/grad_norm", "train/grad_norm_raw"
COSINE = "health/grad_cosine_sim"


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


class RecordedRow(NamedTuple):
    """A row of the file as it was written."""

    step: int
    counts: bool
    """False for a row of a step that was run again after a resume."""
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One record, and what it is judged by.

    Attributes:
        unpacked: a run on the same data without packing, where there is one.
    """

    run: Run
    limits: Limits = field(default_factory=Limits)
    unpacked: Run | None = None

    def series(self, name: str) -> Series:
        """The finite values of a metric; empty where it was never recorded."""
        return series_of(self.run, name)

    @cached_property
    def loss(self) -> Series:
        """Cross-entropy, by whichever name the record has it."""
        return self.series(CE) or self.series(LOSS)

    @cached_property
    def norm(self) -> Series:
        """Of the gradient; before clipping, if that is known."""
        return self.series(RAW_NORM) or self.series(NORM)

    @cached_property
    def clipped_only(self) -> bool:
        """The norm is known after clipping only, and cannot show growth."""
        return not self.series(RAW_NORM)

    @cached_property
    def peak_rate(self) -> float | None:
        """The highest learning rate."""
        rates = self.series(RATE)
        return float(rates.value.max()) if rates else None

    def rate(self, times: float, part: str) -> str:
        """The highest learning rate times a factor, for a fix; ``part`` says it where none is known."""
        peak = self.peak_rate
        return f"{part} of what it is" if peak is None else format(times * peak, ".2g")

    def named(self, prefix: str) -> dict[str, Series]:
        """The metrics below a prefix, by what follows it."""
        return {
            name.removeprefix(prefix): self.series(name)
            for name in list(self.run.metrics)
            if name.startswith(prefix)
        }

    def events(self, *names: str) -> list[Event]:
        """Events of these names; none of steps that were run again, nor what is ordinary."""
        return [
            event
            for event in self.run.events
            if event.event in names and not event.superseded and not event.ordinary
        ]

    def setting(self, name: str, otherwise: float) -> float:
        """A number of the monitor's configuration in this run."""
        config = self.run.info.get("config")
        value = config.get(name) if isinstance(config, dict) else None
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else otherwise

    # -- rows as they were written: texts, and numbers that are not finite ----------------------------------

    def rows(self, *containing: str) -> Iterator[RecordedRow]:
        """Rows of ``metrics.jsonl`` with any of these texts in them; none where there is no file."""
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

    def nonfinite(self, *names: str) -> list[int]:
        """Steps at which one of these metrics was recorded as a number that is not finite."""
        rows = self._nonfinite_rows
        return sorted({row.step for row in rows if any(row.values.get(name) in NON_FINITE for name in names)})

    @cached_property
    def _nonfinite_rows(self) -> list[RecordedRow]:
        return [row for row in self.rows(*(f'"{word}"' for word in NON_FINITE)) if row.counts]


def series_of(run: Run, name: str) -> Series:
    """The finite values of a metric of a run."""
    if name not in list(run.metrics):  # `in` on the columns would look for similar names
        return Series(np.empty(0), np.empty(0))
    step, value = run.metrics["step"], run.metrics[name]
    known = np.isfinite(step) & np.isfinite(value)
    order = np.argsort(step[known], kind="stable")
    return Series(step[known][order], value[known][order])


def _cut(resume: Any) -> tuple[int, int]:
    """Up to which byte rows count only up to which step."""
    end, last = (resume.get("metrics_bytes"), resume.get("from_step")) if isinstance(resume, dict) else (0, 0)
    return (end, last) if isinstance(end, int) and isinstance(last, int) else (0, 0)
