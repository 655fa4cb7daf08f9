"""The timeline: one axis of steps, the loss above it, the events below it, and what came first marked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from palingenesis.report.axes import loss_scale, step_ticks, x_axis, y_axis
from palingenesis.report.chart import draw_beyond
from palingenesis.report.facts import Facts
from palingenesis.report.marks import LANES, Mark
from palingenesis.report.strips import Strip, describe_strips, draw_strips, legend_of, strips_height
from palingenesis.report.svg import UNITS, element, hover, line_path, percent, picture, stretched, text
from palingenesis.report.thin import Bools, Floats, strokes
from palingenesis.report.words import count, number, step_number

LOSS_HEIGHT = 190
_COLUMNS = 720
_TOP = 26
_LANE_TITLE = 16
_ROW = 17
_MOST_ROWS = 6
_MARK_COLUMNS = 240
_LABEL_ROOM = 0.34
_MIDDLE = 0.5


@dataclass(frozen=True)
class Drawing:
    """A picture and the words around it."""

    picture: Markup
    legend: list[tuple[str, str]]
    notes: list[str]


def draw_timeline(facts: Facts, marks: list[Mark], start: float, end: float) -> Drawing:
    """The timeline from ``start`` to ``end``, with these marks below the loss."""
    loss, legend, notes, loss_height = _draw_loss(facts, start, end)
    lanes, lanes_bottom = _draw_lanes(marks, start, end, _TOP + loss_height + 8)
    first = facts.moments[0] if facts.moments else None
    if any(mark.accepted for mark in marks):
        legend.append(("accepted", "alarm that ended because its level was accepted"))
    parts = [element("svg", loss, x="0", y=_TOP, width="100%", height=loss_height, class_="open"), lanes]
    if first is not None:
        parts.append(_draw_first(first.onset, start, end, lanes_bottom))
        legend.append(("first", "where it began"))
    parts.append(element("line", x1="0", x2="100%", y1=lanes_bottom, y2=lanes_bottom, class_="base"))
    parts.append(x_axis(step_ticks(start, end), lanes_bottom))
    description = _describe(facts, start, end)
    drawing = picture(
        "timeline",
        "Loss and events over the steps of the run",
        description,
        lanes_bottom + 24,
        *parts,
        class_="plot",
    )
    return Drawing(drawing, legend, notes)


def _draw_loss(
    facts: Facts, start: float, end: float
) -> tuple[Markup, list[tuple[str, str]], list[str], float]:
    steps, loss = facts.loss_steps, facts.loss
    finite = np.isfinite(loss)
    if not finite.any():
        words = (
            "No loss was recorded." if not facts.loss_given.any() else "Every recorded loss was non-finite."
        )
        strips = [Strip("nonfinite", "loss not finite", ~finite & facts.loss_given)]
        height = 56.0
        inside = text("50%", 26, words, "middle", "empty") + draw_strips(
            strips, steps, start, end, height - 14
        )
        return inside, legend_of(strips), [], height
    scale = loss_scale(loss)
    at = scale(loss)
    inside_axis = np.clip(at, 0.0, 1.0)
    # On a logarithmic axis only positive losses are drawn; the scale is chosen only if all are.
    y = LOSS_HEIGHT * (1 - np.where(finite, inside_axis, np.nan))
    x = (steps - start) / ((end - start) or 1.0)
    lines = strokes(x, y, _COLUMNS, 0.0, 1.0)
    strips = [Strip("nonfinite", "loss not finite", ~finite & facts.loss_given)]
    beyond = finite & ((at < 0) | (at > 1))
    drawn = (
        y_axis(scale.ticks(5), LOSS_HEIGHT)
        + stretched(LOSS_HEIGHT, element("path", d=line_path(lines, UNITS), class_="line loss"))
        + draw_beyond(x[beyond], at[beyond] > 1, LOSS_HEIGHT)
        + draw_strips(strips, steps, start, end, LOSS_HEIGHT)
    )
    notes = _loss_notes(scale.log, steps, loss, beyond)
    legend = [("loss", "loss, logarithmic axis" if scale.log else "loss"), *legend_of(strips)]
    return drawn, legend, notes, LOSS_HEIGHT + strips_height(strips) + 6


def _loss_notes(log: bool, steps: Floats, loss: Floats, beyond: Bools) -> list[str]:
    notes = []
    if beyond.any():
        index = int(np.flatnonzero(beyond)[np.abs(loss[beyond]).argmax()])
        notes.append(
            f"{count(int(beyond.sum()), 'loss value lies', 'loss values lie')} beyond the axis, marked at "
            f"its edge; the farthest is {number(loss[index])} at step {step_number(steps[index])}."
        )
    if np.isfinite(loss).sum() > 2 * _COLUMNS:
        notes.append(
            f"The loss curve shows the lowest and the highest of each group of neighbouring steps, "
            f"{np.isfinite(loss).sum():,} values in all: no spike is left out."
        )
    return notes


def _draw_lanes(marks: list[Mark], start: float, end: float, top: float) -> tuple[Markup, float]:
    parts: list[Markup] = []
    y = top
    for lane in LANES:
        own = sorted((m for m in marks if m.lane == lane), key=lambda m: (m.start, -(m.end or m.start)))
        if not own:
            continue
        parts.append(element("line", x1="0", x2="100%", y1=y, y2=y, class_="lane"))
        parts.append(element("text", lane, x="0", y=y + 13, dx="6", class_="lane-title"))
        y += _LANE_TITLE + 2
        rows = _pack(own, start, end)
        for row, members in enumerate(rows):
            parts.extend(_draw_mark(mark, start, end, y + row * _ROW) for mark in members)
        y += len(rows) * _ROW + 5
    return Markup("").join(parts), y


def _pack(marks: list[Mark], start: float, end: float) -> list[list[Mark]]:
    """Marks in rows so that they and their labels do not touch; the last row takes what is left."""
    width = (end - start) or 1.0
    rows: list[list[Mark]] = []
    free: list[float] = []
    for mark in _joined(marks, start, width):
        first = (mark.start - start) / width
        last = ((mark.end if mark.end is not None else mark.start) - start) / width
        # A label hangs to the right of where its mark begins, or to the left from the middle on.
        if first < _MIDDLE:
            last = max(last, first + _LABEL_ROOM)
        else:
            first, last = first - _LABEL_ROOM, max(last, first)
        row = next((i for i, until in enumerate(free) if until < first), len(rows))
        if row == len(rows) and row < _MOST_ROWS:
            rows.append([])
            free.append(0.0)
        row = min(row, len(rows) - 1)
        if rows[row] and free[row] >= first:
            mark.label = rows[row][-1].label = ""
        rows[row].append(mark)
        free[row] = max(free[row], last)
    return rows


def _joined(marks: list[Mark], start: float, width: float) -> list[Mark]:
    """Marks of one look that fall on one place become one that says how many it stands for."""
    joined: dict[tuple[object, ...], Mark] = {}
    for mark in marks:
        column = round((mark.start - start) / width * _MARK_COLUMNS)
        until = None if mark.end is None else round((mark.end - start) / width * _MARK_COLUMNS)
        key = (column, until, mark.severity, mark.accepted)
        if key in joined:
            joined[key].events += mark.events
        else:
            joined[key] = mark
    return list(joined.values())


def _draw_mark(mark: Mark, start: float, end: float, y: float) -> Markup:
    width = (end - start) or 1.0
    first = (mark.start - start) / width
    more = f" and {mark.events - 1:,} more" if mark.events > 1 else ""
    inside: list[Markup] = [hover(mark.title + more)]
    if mark.end is not None:
        long = max(0.0, (mark.end - mark.start) / width)
        inside.append(element("rect", x=percent(first), y=y + 3, width=percent(long), height=9, class_="bar"))
    inside.append(
        element(
            "svg",
            element("path", d=_SHAPES[mark.severity], class_="point"),
            x=percent(first),
            y=y + 7.5,
            class_="open",
        )
    )
    if mark.accepted and mark.end is not None:
        last = (mark.end - start) / width
        square = element("path", d="M-4 -4H4V4H-4Z", class_="accepted")
        inside.append(element("svg", square, x=percent(last), y=y + 7.5, class_="open"))
    if mark.label:
        left = first < _MIDDLE
        inside.extend(
            element(
                "text",
                label,
                x=percent(first),
                y=y + 11.5,
                dx="10" if left else "-10",
                text_anchor="start" if left else "end",
                class_=size,
            )
            for size, label in (("wide", mark.label + more), ("narrow", mark.short_label))
        )
    drawn = element("g", *inside, class_=f"mark {mark.severity}")
    # For the pointer: by keyboard the same rows are reached in their table.
    return drawn if mark.href is None else element("a", drawn, href=mark.href, tabindex="-1")


# Shape as well as colour: a circle for information, a triangle for a warning, a diamond for critical.
_SHAPES = {
    "info": "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z",
    "warning": "M-5.5 4.5L0 -5.5L5.5 4.5Z",
    "critical": "M-6 0L0 -6L6 0L0 6Z",
}


def _draw_first(onset: int, start: float, end: float, bottom: float) -> Markup:
    # What was so before the first step is marked where the axis begins.
    at = (max(onset, start) - start) / ((end - start) or 1.0)
    left = at < _MIDDLE
    return element(
        "g",
        hover(f"The first thing out of order began at step {step_number(onset)}"),
        element("line", x1=percent(at), x2=percent(at), y1="4", y2=bottom, class_="first"),
        element(
            "text",
            f"first: step {step_number(onset)}",
            x=percent(at),
            y="13",
            dx="6" if left else "-6",
            text_anchor="start" if left else "end",
            class_="first-label",
        ),
        class_="first-mark",
    )


def _describe(facts: Facts, start: float, end: float) -> str:
    told = [f"Steps {step_number(start)} to {step_number(end)}."]
    finite = facts.loss[np.isfinite(facts.loss)]
    if len(finite):
        told.append(
            f"The loss goes from {number(finite[0])} to {number(finite[-1])}, lowest {number(finite.min())}, "
            f"highest {number(finite.max())}."
        )
    strip = Strip("nonfinite", "Loss not finite", ~np.isfinite(facts.loss) & facts.loss_given)
    told.append(describe_strips([strip], facts.loss_steps))
    told.append(f"{count(len(facts.events), 'event')}, listed in the table of events.")
    return " ".join(part for part in told if part)
