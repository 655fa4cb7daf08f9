"""Where the time of a run went: training, evaluation, checkpoints, and all that is none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from markupsafe import Markup

from palingenesis.report.series import Signals
from palingenesis.report.svg import element, hover, percent, picture
from palingenesis.report.words import count, number, seconds_in_words, step_number
from palingenesis.runlogs.table import Column

_HEIGHT = 26
#: Less than this share of the whole is not told as a part: the clock's own uncertainty.
_LEAST_SHARE = 1e-3
#: A stretch of steps is long if it takes so many times what is usual.
_LONG = 3.0
_LONGEST_TOLD = 3
_FEW = 8


@dataclass(frozen=True)
class Part:
    """One way in which time was spent."""

    look: str
    label: str
    seconds: float
    share: float
    remark: str

    @property
    def told(self) -> str:
        return f"{seconds_in_words(self.seconds)}, {100 * self.share:.3g}%"


@dataclass(frozen=True)
class Spending:
    """What the page says of time."""

    parts: list[Part]
    notes: list[str]
    picture: Markup
    total: float


def spending_of(signals: Signals, info: Mapping[str, Any]) -> Spending | None:
    """Where the time went; None where the record does not time its steps."""
    training, each = _training(signals)
    if training <= 0:
        return None
    evaluation, checkpoints = (signals.numbers(f"train/{what}_s") for what in ("eval", "checkpoint"))
    spent = [
        ("one", "training", training, _speed(signals, training)),
        ("two", "evaluation", float(evaluation.value.sum()), _times(evaluation)),
        ("three", "checkpoints", float(checkpoints.value.sum()), _times(checkpoints)),
    ]
    known = sum(seconds for _, _, seconds, _ in spent)
    wall = _wall(info)
    if wall is not None and wall > known:
        spent.append(
            ("rest", "everything else", wall - known, "loading, the first batch, and what no row times")
        )
    total = sum(seconds for _, _, seconds, _ in spent)
    parts = [
        Part(look, label, seconds, seconds / total, remark)
        for look, label, seconds, remark in spent
        if seconds / total >= _LEAST_SHARE
    ]
    return Spending(parts, _notes(signals, each), _draw(parts), total)


def _training(signals: Signals) -> tuple[float, Column]:
    """Seconds of training, and those of each step: as rows time them, or else from when rows were written."""
    timed = signals.numbers("train/step_time_s")
    if timed:
        steps = np.diff(timed.step, prepend=min(timed.step[0] - 1, 0.0))
        return float((timed.value * np.maximum(steps, 0)).sum()), timed
    clock = signals.numbers("time")
    if len(clock.value) < 2:
        return 0.0, clock
    apart, steps = np.diff(clock.value), np.diff(clock.step)
    usable = (steps > 0) & (apart >= 0)
    each = Column(clock.row[1:], clock.step[1:], apart / np.where(steps > 0, steps, 1)).where(usable)
    return float(apart[usable].sum()), each


def _wall(info: Mapping[str, Any]) -> float | None:
    """Seconds from the start to the end of a run that was never interrupted."""
    end = info.get("end")
    if info.get("resumes") or not isinstance(end, Mapping):
        return None
    try:
        first, last = (datetime.fromisoformat(str(time)) for time in (info.get("start"), end.get("time")))
    except ValueError:
        return None
    return (last - first).total_seconds()


def _speed(signals: Signals, training: float) -> str:
    for name in ("train/tokens_total_all", "train/tokens_total"):
        tokens = signals.numbers(name)
        if tokens:
            return f"{number(float(tokens.value.max()) / training, 3)} loss-bearing tokens a second"
    return ""


def _times(column: Column) -> str:
    if not column:
        return ""
    longest = int(column.value.argmax())
    seconds = seconds_in_words(float(column.value[longest]))
    step = step_number(column.step[longest])
    return f"{count(len(column.value), 'time')}, the longest {seconds} at step {step}"


def _notes(signals: Signals, each: Column) -> list[str]:
    notes = []
    if "train/step_time_s" not in signals:
        notes.append(
            "Rows do not time their steps here: training is the time between rows, all that lies there."
        )
    if len(each.value) < _FEW:
        return notes
    usual = float(np.median(each.value))
    long = np.flatnonzero(each.value > _LONG * usual)
    if len(long):
        worst = long[np.argsort(-each.value[long])][:_LONGEST_TOLD]
        named = ", ".join(
            f"step {step_number(each.step[i])} ({seconds_in_words(float(each.value[i]))})" for i in worst
        )
        notes.append(
            f"A step usually took {seconds_in_words(usual)}; {count(len(long), 'step')} took more than "
            f"{_LONG:g} times as long, the longest: {named}."
        )
    return notes


def _draw(parts: list[Part]) -> Markup:
    bars, at = [], 0.0
    for part in parts:
        words = hover(f"{part.label}: {part.told}")
        bars.append(
            element(
                "rect",
                words,
                x=percent(at),
                y="0",
                width=percent(part.share),
                height=_HEIGHT,
                class_=f"spent {part.look}",
            )
        )
        at += part.share
    description = "; ".join(f"{part.label} {part.told}" for part in parts)
    return picture("spending", "Where the time went", description, _HEIGHT, *bars, class_="plot")
