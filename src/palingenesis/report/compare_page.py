"""The page that compares runs: figures, where they part, curves over each other, settings that differ."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from palingenesis.events import Severity
from palingenesis.findings.catalog import CATALOG
from palingenesis.findings.finding import Report
from palingenesis.report.chart import Chart, EventLine, draw_panel
from palingenesis.report.compare import Comparison, figures_of, tell_parting
from palingenesis.report.page import rendered, write_page
from palingenesis.report.panel import LOOKS, Bound, Line, Panel
from palingenesis.report.parting import common
from palingenesis.report.series import Signals
from palingenesis.report.words import number, sentence, step_number, visible
from palingenesis.runlogs.table import Column

_MOST_FINDINGS = 6
_MOST_DIFFERENCES = 12
_MOST_OTHERS = 40
_LONG_NAME = 80

#: What is laid over each other first: key, title, names of which the first that any run has is drawn, whether
#: it is noisy, and whether its axis is linear from zero.
_SHOWN: tuple[tuple[str, str, tuple[str, ...], bool, bool], ...] = (
    ("loss", "Training loss", ("train/ce_loss", "train/loss"), True, False),
    ("eval", "Evaluation loss", ("eval/loss",), False, False),
    ("lr", "Learning rate", ("train/lr",), False, True),
    ("grad-norm", "Gradient norm", ("train/grad_norm_raw", "train/grad_norm"), True, False),
    ("gns", "Gradient noise scale, in sequences", ("health/gns",), False, False),
    ("entropy", "Entropy of the outputs", ("health/output_entropy",), False, False),
    ("drift", "Largest drift of the weights", ("health/weight_drift_max",), False, True),
    ("rank", "Smallest stable rank", ("health/stable_rank_min",), False, False),
    ("speed", "Tokens a second", ("train/tokens_per_sec_global", "train/tokens_per_sec"), True, True),
    ("step-time", "Seconds a step", ("train/step_time_s",), True, True),
)
_TOKENS = ("train/tokens_total_all", "train/tokens_total")


@dataclass(frozen=True)
class RunCard:
    """One run at the head of the page."""

    letter: str
    look: str
    name: str
    place: str
    verdict: str
    tone: str
    sentence: str
    figures: list[tuple[str, str]]
    findings: list[tuple[Severity, str]]
    """Severity and title."""
    more_findings: int


def run_cards(comparison: Comparison) -> list[RunCard]:
    """What each run came to."""
    cards = []
    for place, subject in enumerate(comparison.subjects):
        ordered = Report("report", subject.findings).ordered
        titles = [
            (one.severity, CATALOG[one.check].title if one.check in CATALOG else one.check) for one in ordered
        ]
        verdict = subject.verdict or (
            "FINDINGS" if Report("report", subject.findings).code else "NOTHING FOUND"
        )
        cards.append(
            RunCard(
                letter=comparison.letter(place),
                look=LOOKS[place],
                name=visible(subject.name, _LONG_NAME),
                place=visible(subject.place),
                verdict=verdict,
                tone=_TONES.get(verdict, verdict.lower().replace(" ", "-")),
                sentence=sentence(subject.sentence, 400),
                figures=_figures(comparison, place),
                findings=titles[:_MOST_FINDINGS],
                more_findings=max(0, len(titles) - _MOST_FINDINGS),
            )
        )
    return cards


_TONES = {"FINDINGS": "warning", "NOTHING FOUND": "unknown"}


def _figures(comparison: Comparison, place: int) -> list[tuple[str, str]]:
    figures = figures_of(comparison.subjects[place])
    best = ""
    if figures.best_eval is not None:
        best = f"{number(figures.best_eval)} at step {step_number(figures.best_eval_step or 0)}"
    shown = [
        ("Last step", "" if figures.last_step is None else step_number(figures.last_step)),
        ("Loss at the end", "" if figures.loss is None else number(figures.loss)),
        ("Best evaluation loss", best),
        ("Highest learning rate", "" if figures.peak_rate is None else number(figures.peak_rate, 3)),
        ("Tokens trained on", "" if figures.tokens is None else number(figures.tokens, 4)),
        (
            "Tokens a second",
            "" if figures.tokens_per_second is None else number(figures.tokens_per_second, 3),
        ),
    ]
    return [(what, value or "–") for what, value in shown]


def write_comparison(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Write the page and return where it is.

    Raises:
        RecordError: the file cannot be written.
    """
    return write_page(Path(path), render_comparison(comparison))


def render_comparison(comparison: Comparison) -> bytes:
    """The page of a comparison."""
    parted = any(parting.first_step is not None for parting in comparison.partings)
    return rendered(
        "compare.html",
        cards=run_cards(comparison),
        partings=parting_views(comparison),
        settings=comparison.settings,
        settings_same=comparison.settings_same,
        parted=parted,
        **comparison_charts(comparison),
    )


# -- curves --------------------------------------------------------------------------------------------------


def comparison_charts(comparison: Comparison) -> dict[str, Any]:
    """Curves of all runs on one axis of steps, the differences of their losses, and the loss by tokens."""
    start, end = _axis(comparison)
    events = _partings(comparison, start, end)
    shown, told = [], set()
    for key, title, names, noisy, from_zero in _SHOWN:
        name = next(
            (one for one in names if any(one in subject.signals for subject in comparison.subjects)), None
        )
        if name is None:
            continue
        told.add(name)
        panel = _panel(comparison, key, title, name, noisy)
        if panel is not None:
            shown.append(
                draw_panel(replace(panel, from_zero=from_zero, linear=from_zero), start, end, events)
            )
    shown[1:1] = _differences(comparison, start, end, events)
    by_tokens = _by_tokens(comparison)
    others, left_out = _others(comparison, told, start, end)
    return {
        "charts": shown,
        "by_tokens": by_tokens,
        "others": others,
        "others_left_out": left_out,
    }


def _axis(comparison: Comparison) -> tuple[float, float]:
    columns = [
        subject.signals[name]
        for subject in comparison.subjects
        for name in subject.signals
        if subject.signals.numbers(name)
    ]
    start = min((float(column.step[0]) for column in columns), default=0.0)
    return start, max((float(column.step[-1]) for column in columns), default=start + 1.0)


def _label(comparison: Comparison, place: int) -> str:
    return f"{comparison.letter(place)}: {visible(comparison.subjects[place].name, _LONG_NAME)}"


def _panel(comparison: Comparison, key: str, title: str, name: str, noisy: bool) -> Panel | None:
    lines = [
        Line(_label(comparison, place), subject.signals[name], LOOKS[place], smoothed=noisy)
        for place, subject in enumerate(comparison.subjects)
        if subject.signals.numbers(name)
    ]
    return Panel(key, title, "", tuple(lines)) if lines else None


def _partings(comparison: Comparison, start: float, end: float) -> list[EventLine]:
    """Where each run parts from the first."""
    lines = []
    width = (end - start) or 1.0
    for place, parting in enumerate(comparison.partings, 1):
        letter, first = comparison.letter(place), comparison.letter(0)
        if parting.first_step is not None:
            words = f"{letter} first differs from {first} at step {step_number(parting.first_step)}"
            lines.append(EventLine((parting.first_step - start) / width, "info", words, "#parting"))
        if parting.loss is not None and parting.loss.step is not None:
            words = (
                f"the losses of {letter} and {first} stay apart from step {step_number(parting.loss.step)}"
            )
            lines.append(EventLine((parting.loss.step - start) / width, "warning", words, "#parting"))
    return lines


def _differences(comparison: Comparison, start: float, end: float, events: list[EventLine]) -> list[Chart]:
    """Loss of each run less that of the first, at the steps that both have."""
    first = comparison.subjects[0].signals
    name = (
        "train/ce_loss"
        if all("train/ce_loss" in one.signals for one in comparison.subjects)
        else "train/loss"
    )
    lines = []
    for place, subject in enumerate(comparison.subjects[1:], 1):
        step, left, right = common(first.numbers(name), subject.signals.numbers(name))
        if len(step):
            column = Column(np.arange(len(step)), step, right - left)
            label = f"{comparison.letter(place)} less {comparison.letter(0)}"
            lines.append(Line(label, column, LOOKS[place], smoothed=True))
    if not lines:
        return []
    panel = Panel(
        "difference",
        "Difference of the training losses",
        "Below zero the run is better than the first. What both share, such as a hard batch, is not in it.",
        tuple(lines),
        (Bound(0.0, "no difference", always=True),),
        linear=True,
    )
    return [draw_panel(panel, start, end, events)]


def _by_tokens(comparison: Comparison) -> Chart | None:
    """The loss over the tokens that were trained on: runs with other batch sizes are compared by these."""
    lines, ends = [], []
    for place, subject in enumerate(comparison.subjects):
        column = _over_tokens(subject.signals)
        if column is not None:
            lines.append(Line(_label(comparison, place), column, LOOKS[place], smoothed=True))
            ends.append(float(column.step[-1]))
    if len(lines) < len(comparison.subjects):
        return None
    about = "The same curves over loss-bearing tokens instead of steps: fairer where batches differ in size."
    panel = Panel("by-tokens", "Training loss by tokens", about, tuple(lines), axis="token")
    return draw_panel(panel, 0.0, max(ends))


def _over_tokens(signals: Signals) -> Column | None:
    loss = signals.numbers("train/ce_loss") or signals.numbers("train/loss")
    tokens = next((signals.numbers(name) for name in _TOKENS if signals.numbers(name)), None)
    if tokens is None or not loss:
        return None
    step, value, seen = common(loss, tokens)
    return Column(np.arange(len(step)), seen, value) if len(step) > 1 else None


def _others(comparison: Comparison, told: set[str], start: float, end: float) -> tuple[list[Chart], int]:
    """Every other number that at least two runs have, but for those of layers."""
    names = [
        name
        for name in dict.fromkeys(name for subject in comparison.subjects for name in subject.signals)
        if name not in told
        and name.count("/") == 1
        and sum(bool(subject.signals.numbers(name)) for subject in comparison.subjects) > 1
    ]
    panels = [
        _panel(comparison, f"other-{n}", name, name, noisy=False)
        for n, name in enumerate(names[:_MOST_OTHERS])
    ]
    charts = [draw_panel(panel, start, end, columns=240) for panel in panels if panel is not None]
    return charts, max(0, len(names) - _MOST_OTHERS)


# -- words ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartingView:
    """Where one run parts from the first, for the page."""

    title: str
    sentences: list[str]
    rows: list[tuple[str, str, str, str]]
    """Signal, step, and the two values."""
    left_out: int


def parting_views(comparison: Comparison) -> list[PartingView]:
    views = []
    for place, parting in enumerate(comparison.partings, 1):
        letter, first = comparison.letter(place), comparison.letter(0)
        rows = [
            (visible(one.signal), step_number(one.step), number(one.first, 6), number(one.second, 6))
            for one in parting.differences[:_MOST_DIFFERENCES]
        ]
        views.append(
            PartingView(
                f"{letter} against {first}",
                tell_parting(parting, letter),
                rows,
                len(parting.differences) - len(rows),
            )
        )
    return views
