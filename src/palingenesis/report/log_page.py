"""The page, the text and the data of a log of any trainer: what is found in it, and its curves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from palingenesis.findings.finding import Report
from palingenesis.findings.render import to_json as findings_document
from palingenesis.report.chart import EventLine
from palingenesis.report.compare import figures_of
from palingenesis.report.conclusions import anchor_of, conclusions, title_of
from palingenesis.report.page import rendered, write_page
from palingenesis.report.signals_section import SignalLimits, draw_signals
from palingenesis.report.spending import spending_of
from palingenesis.report.subject import Subject
from palingenesis.report.tables import Rows
from palingenesis.report.words import number, sentence, step_number, visible
from palingenesis.runlogs.table import RunLog

_MOST_EVENTS = 400
_LONG = 320


def write_log_page(log: RunLog, subject: Subject, path: str | os.PathLike[str]) -> Path:
    """Write the page of a log and return where it is.

    Raises:
        RecordError: the file cannot be written.
    """
    return write_page(Path(path), render_log_page(log, subject))


def render_log_page(log: RunLog, subject: Subject) -> bytes:
    """The page of a log."""
    start, end = _axis(subject)
    signals = draw_signals(
        subject.signals, subject.config, _lines(subject, start, end), start, end, SignalLimits()
    )
    report = Report("report", subject.findings)
    return rendered(
        "log.html",
        name=visible(subject.name, 160),
        format=visible(log.format),
        tone="warning" if report.code else "unknown",
        word="FINDINGS" if report.code else "NOTHING FOUND",
        sentence=sentence(subject.sentence, _LONG),
        figures=_figures(log, subject),
        conclusions=conclusions(subject.findings, signals.titles),
        signals=signals,
        spending=spending_of(subject.signals, subject.info),
        happened=_happened(log),
        cannot_show=[sentence(one) for one in log.cannot_show],
        inferred=log.step_inferred,
        unread=log.unread,
        lines=log.lines,
    )


def _axis(subject: Subject) -> tuple[float, float]:
    columns = [subject.signals[name] for name in subject.signals if subject.signals.numbers(name)]
    start = min((float(column.step[0]) for column in columns), default=0.0)
    return start, max([start + 1.0, *(float(column.step[-1]) for column in columns)])


def _lines(subject: Subject, start: float, end: float) -> list[EventLine]:
    """Findings that belong to a step, drawn through every chart."""
    width = (end - start) or 1.0
    return [
        EventLine(
            (max(float(finding.since), start) - start) / width,
            finding.severity,
            f"from step {step_number(finding.since)}: {title_of(finding.check)}",
            f"#{anchor_of(finding.check)}",
        )
        for finding in subject.findings
        if finding.since is not None and finding.severity != "info"
    ]


def _figures(log: RunLog, subject: Subject) -> list[tuple[str, str, str]]:
    figures = figures_of(subject)
    of = "" if log.total_steps is None else f"of {log.total_steps:,}"
    shown = [
        ("Last step", "–" if figures.last_step is None else step_number(figures.last_step), of),
        ("Rows", f"{log.rows:,}", ""),
        ("Loss at the end", number(figures.loss), ""),
        (
            "Best evaluation loss",
            number(figures.best_eval),
            "" if figures.best_eval_step is None else f"at step {step_number(figures.best_eval_step)}",
        ),
        ("Highest learning rate", number(figures.peak_rate, 3), ""),
        ("Restarts", f"{len(log.restarts):,}", ""),
    ]
    return [one for one in shown if one[1] != "–"]


def _happened(log: RunLog) -> Rows:
    rows = [
        ("–" if event.step is None else step_number(event.step), event.kind, visible(event.text, _LONG))
        for event in log.events[:_MOST_EVENTS]
    ]
    return Rows(rows, len(log.events))


def log_document(log: RunLog, subject: Subject) -> dict[str, Any]:
    """The same as data: the findings as every command has them, and what the log holds as their facts."""
    facts = {
        "source": log.source,
        "format": log.format,
        **vars(figures_of(subject)),
        "rows": log.rows,
        "step_inferred": log.step_inferred,
        "signals": list(subject.signals),
        "cannot_show": list(log.cannot_show),
    }
    return findings_document(Report("report", subject.findings, facts))
