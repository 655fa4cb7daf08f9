"""The page: RUN/report.html, one file that needs nothing else.

The page is put together from drawings and rows; the template only places them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palingenesis.record.format import REPORT_FILE
from palingenesis.record.verify import Verification, in_words
from palingenesis.report import tables
from palingenesis.report.batches import spikes_of
from palingenesis.report.conclusions import CURVES, MONITORED, PLACES, SPIKES, conclusions
from palingenesis.report.curves import FLAGS, describe_missing, draw_curve, order_of_layers
from palingenesis.report.facts import Facts, gather
from palingenesis.report.heatmap import draw_heatmap
from palingenesis.report.history import replay
from palingenesis.report.marks import marks_of
from palingenesis.report.options import training_rows
from palingenesis.report.page import rendered, write_page
from palingenesis.report.signals_section import (
    SignalLimits,
    SignalsSection,
    draw_signals,
    event_lines,
    linked,
)
from palingenesis.report.spending import spending_of
from palingenesis.report.timeline import draw_timeline
from palingenesis.report.verdicts import advice, meaning, overall_of
from palingenesis.report.words import duration, moment, visible

if TYPE_CHECKING:
    from palingenesis.record.reader import Run

LARGEST_PAGE = 2_000_000
"""Bytes that a page may have."""

_NAMED_UNWATCHED = 60
_MOMENTS_TOLD = 5


@dataclass(frozen=True)
class Limits:
    """How much of a run is drawn. What is left out is said on the page."""

    columns: int = 720
    rows: int = 1000
    curves: int = 24
    events: int = 600
    layers: int = 1000
    name_length: int = 320
    signals: SignalLimits = field(default_factory=SignalLimits)


# Tried in this order until the page is small enough; the first fits all but the largest runs.
_LIMITS = (
    Limits(),
    Limits(600, 500, 16, 400, 500, 160, SignalLimits(columns=320, events=24, others=30, layers=200)),
    Limits(300, 250, 8, 200, 200, 80, SignalLimits(columns=160, events=12, others=12, layers=60)),
)


def write_html(run: Run, path: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of a run and return where it is.

    Args:
        run: what ``load_run`` returned.
        path: the file to write; by default ``report.html`` in the run's folder. It appears whole or not at
            all.

    Raises:
        RecordError: the file cannot be written.
    """
    target = Path(path) if path is not None else Path(run.folder) / REPORT_FILE
    page = render_html(run)
    return write_page(target, page)


def render_html(run: Run) -> bytes:
    """The page of a run."""
    facts = gather(run)
    verification = run.verify()
    page = b""
    for limits in _LIMITS:
        page = _page(facts, limits, verification)
        if len(page) <= LARGEST_PAGE:
            break
    return page


def _page(facts: Facts, limits: Limits, verification: Verification) -> bytes:
    drawings = _drawings(facts, limits)
    return rendered(
        "report.html",
        **_head(facts, verification),
        **drawings,
        conclusions=conclusions(facts.findings, _seen_in(facts, drawings["signals"])),
        spending=spending_of(facts.signals, facts.info),
        spikes=spikes_of(facts.spikes),
        training=training_rows(facts.training),
        monitored=tables.monitored(facts),
        gaps=tables.gaps(facts),
        not_watched=tables.not_watched(facts, _NAMED_UNWATCHED),
        options=tables.option_rows(facts.info.get("config") or {}),
        config=facts.config,
    )


def _seen_in(facts: Facts, signals: SignalsSection) -> list[tuple[str, str]]:
    """What of the page findings may point to."""
    alarmed = any(not episode.superseded and episode.layer in facts.norms.names for episode in facts.episodes)
    there = {SPIKES: bool(facts.spikes), CURVES: bool(facts.checks and alarmed), MONITORED: True}
    return [*signals.titles, *((place, PLACES[place]) for place, shown in there.items() if shown)]


def _head(facts: Facts, verification: Verification) -> dict[str, Any]:
    end = facts.end or {}
    word, told = overall_of(facts)
    return {
        "name": visible(facts.name, 160),
        "started": moment(facts.info["start"]) if facts.info.get("start") else None,
        "took": duration(facts.info.get("start"), end.get("time")),
        "verdict": word,
        "tone": word.lower().replace(" ", "-"),
        "sentence": visible(told[:1].upper() + told[1:]),
        "meaning": meaning(facts),
        "advice": advice(facts),
        "moments": facts.moments[:_MOMENTS_TOLD],
        "more_moments": max(0, len(facts.moments) - _MOMENTS_TOLD),
        "figures": tables.key_figures(facts),
        "about": tables.about_run(facts),
        "problem": None if verification.ok else visible(verification.problem),
        "intact": in_words(verification),
        "unreadable": [visible(p) for p in facts.problems],
    }


def _drawings(facts: Facts, limits: Limits) -> dict[str, Any]:
    start, end = _axis(facts)
    kept = tables.kept_events(facts, limits.events)
    marks = linked(marks_of(facts, start, end), kept)
    lines = event_lines(marks, start, end, limits.signals.events)
    return {
        "events": tables.event_rows(facts, kept, limits.name_length),
        "signals": draw_signals(facts.signals, facts.config, lines, start, end, limits.signals),
        "timeline": draw_timeline(facts, marks, start, end),
        "axis": (start, end),
        **_layer_drawings(facts, limits, start, end),
    }


def _layer_drawings(facts: Facts, limits: Limits, start: float, end: float) -> dict[str, Any]:
    if not facts.checks or not facts.norms.names:
        return {"heatmap": None, "curves": [], "curves_left_out": None, "layers": None}
    history = replay(facts.norms, facts.config)
    known = set(facts.norms.names)
    alarmed = [layer for layer in order_of_layers(facts.episodes, facts.moments) if layer in known]
    shown = alarmed[: limits.curves]
    return {
        "heatmap": draw_heatmap(history, facts.episodes, limits.columns, limits.rows),
        "curves": [
            draw_curve(f"curve-{i}", layer, history, facts.episodes, start, end)
            for i, layer in enumerate(shown)
        ],
        "flags": FLAGS,
        "curves_left_out": describe_missing(len(shown), len(alarmed)),
        "layers": tables.layer_rows(history, facts.episodes, limits.layers, limits.name_length),
    }


def _axis(facts: Facts) -> tuple[float, float]:
    """The steps that all drawings share: from the first that the record knows of to the last."""
    firsts = [float(steps[0]) for steps in (facts.loss_steps, facts.norms.steps) if len(steps)]
    firsts += [float(event.step) for event in facts.events if event.step > 0 and not event.superseded]
    firsts += [float(moment.onset) for moment in facts.moments]
    start = max(1.0, min(firsts, default=1.0))
    return start, max(float(facts.last_step), start + 1.0)
