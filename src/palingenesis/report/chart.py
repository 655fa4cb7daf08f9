"""One chart of signals over the steps of a run: lines, intervals, levels that mean something, and events.

All charts of a page share one axis of steps, so that what happened at one step stands in one column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from palingenesis.report.axes import Scale, linear_scale, loss_scale, step_ticks, x_axis, y_axis
from palingenesis.report.panel import Bound, Line, Panel
from palingenesis.report.strips import Strip, describe_strips, draw_strips, legend_of, strips_height
from palingenesis.report.svg import UNITS, area_path, element, hover, line_path, percent, picture, stretched
from palingenesis.report.thin import Bools, Floats, Stroke, medians, strokes
from palingenesis.report.words import count, number, step_number

HEIGHT = 120
#: Standard errors on either side of an estimate that hold the truth in 95 of 100 cases.
INTERVAL = 1.96
_TOP = 12
_TICKS = 5
_MARK_COLUMNS = 240
#: So many dots and intervals a line at most; more would touch.
_MOST_DOTS = 120
#: A level is drawn if the axis need grow by no more than this many times its span to hold it.
_ROOM_FOR_A_BOUND = 1.0
#: Lines of so few values show each of them.
_FEW = 30
_DOT = "M-3 0A3 3 0 1 0 3 0A3 3 0 1 0 -3 0Z"
_UPWARDS = "M-4.5 0L0 -7L4.5 0Z"
_SMOOTHED_FROM = 60
_MEDIANS = 120
_LEAST_MEDIAN = 5
_AXIS_ROOM = 24


@dataclass(frozen=True)
class EventLine:
    """A place on the axis where something happened."""

    at: float
    """From 0 to 1."""
    severity: str
    words: str
    href: str | None
    """The row of the table of events, if it has one."""


@dataclass(frozen=True)
class Chart:
    """A panel as the page shows it."""

    key: str
    title: str
    about: str
    picture: Markup
    legend: list[tuple[str, str]]
    notes: list[str]


def draw_panel(
    panel: Panel, start: float, end: float, events: Sequence[EventLine] = (), columns: int = 480
) -> Chart:
    """The chart of a panel on the axis of steps from ``start`` to ``end``."""
    scale, bounds = _scale(panel)
    strips = [_not_finite(panel)]
    steps = _all_steps(panel)
    beyond = [_beyond(line, scale, start, end) for line in panel.lines]
    curves = [_draw_line(line, scale, start, end, columns) for line in panel.lines]
    bottom = _TOP + HEIGHT + strips_height(strips)
    parts = [
        element(
            "svg",
            y_axis(scale.ticks(_TICKS), HEIGHT),
            stretched(
                HEIGHT,
                *_draw_spread(panel, scale, start, end),
                *(part for drawn in curves for part in drawn.under),
            ),
            *(_draw_bound(bound, scale) for bound in bounds),
            *(mark for drawn in curves for mark in drawn.marks),
            *beyond,
            y=_TOP,
            class_="open",
        ),
        draw_strips(strips, steps, start, end, _TOP + HEIGHT),
        _draw_events(events, bottom),
        element("line", x1="0", x2="100%", y1=bottom, y2=bottom, class_="base"),
        x_axis(step_ticks(start, end), bottom),
    ]
    drawing = picture(
        f"signal-{panel.key}",
        panel.title,
        _describe(panel, strips, steps),
        bottom + _AXIS_ROOM,
        *parts,
        class_="plot chart",
        data_start=f"{start:g}",
        data_end=f"{end:g}",
        data_low=f"{scale.low:.8g}",
        data_high=f"{scale.high:.8g}",
        data_log="log" if scale.log else None,
        data_height=HEIGHT,
    )
    legend = [(_swatch(line), line.label) for line in panel.lines]
    legend += [(_bound_look(bound), f"{bound.label} ({number(bound.value)})") for bound in bounds]
    if any(map(_uncertain, panel.lines)):
        legend.append(("interval", "interval of 95%"))
    if panel.spread is not None:
        legend += [("spread", "all layers"), ("half", "middle half"), ("middle", "median of all")]
    notes = [*panel.notes, *_notes(panel, scale, bounds)]
    return Chart(panel.key, panel.title, panel.about, drawing, legend + legend_of(strips), notes)


def _swatch(line: Line) -> str:
    """Look of a line in the legend."""
    if line.bounds_only:
        return f"up {line.look}"
    return f"line {line.look}{' dots' if _dotted(line) else ''}"


def _dotted(line: Line) -> bool:
    return line.dots or len(line.column.value) <= _FEW


def _bound_look(bound: Bound) -> str:
    return "bound limit" if bound.limit else "bound"


# -- scale ---------------------------------------------------------------------------------------------------


def _scale(panel: Panel) -> tuple[Scale, list[Bound]]:
    """The scale of a panel, and which of its levels lie within reach."""
    parts = [line.column.finite.value for line in panel.lines]
    if panel.spread is not None:
        parts += [panel.spread.low, panel.spread.high]
    values = np.concatenate([*parts, [bound.value for bound in panel.bounds if bound.always]])
    scale = linear_scale(values) if panel.linear else loss_scale(values)
    if panel.from_zero and len(values) and values.min() >= 0:
        scale = Scale(0.0, scale.high)
    span = scale.high - scale.low
    reached = []
    for bound in panel.bounds:
        if scale.log and bound.value <= 0:
            continue
        at = float(scale(np.array([bound.value]))[0])
        if -_ROOM_FOR_A_BOUND <= at <= 1 + _ROOM_FOR_A_BOUND:
            place = scale.low + at * span
            scale = Scale(
                min(scale.low, place - span * 0.05), max(scale.high, place + span * 0.05), scale.log
            )
            reached.append(bound)
    return scale, reached


def _notes(panel: Panel, scale: Scale, bounds: list[Bound]) -> list[str]:
    notes = [
        f"The level of {number(bound.value)} ({bound.label}) lies outside the axis."
        for bound in panel.bounds
        if bound not in bounds
    ]
    if scale.log:
        notes.append("Logarithmic axis.")
    for line in panel.lines:
        column = line.column.finite
        at = scale(column.value)
        outside = (at < 0) | (at > 1)
        if outside.any():
            index = int(np.flatnonzero(outside)[np.abs(column.value[outside]).argmax()])
            notes.append(
                f"{count(int(outside.sum()), 'value')} of {line.label} beyond the axis, marked at its edge; "
                f"the farthest is {number(column.value[index])} at {panel.axis} "
                f"{step_number(column.step[index])}."
            )
    return notes


# -- lines ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Drawn:
    under: list[Markup]
    """What stretches with the drawing."""
    marks: list[Markup]
    """What keeps its size."""


def _draw_line(line: Line, scale: Scale, start: float, end: float, columns: int) -> _Drawn:
    column = line.column
    x, y = _places(column.step, start, end), HEIGHT * (1 - np.clip(scale(column.value), 0.0, 1.0))
    y = np.where(np.isfinite(column.value), y, np.nan)
    if line.bounds_only:
        return _Drawn([], _marks(x, y, f"dot {line.look}", _UPWARDS))
    under = _interval(line, scale, start, end)
    smoothed = line.smoothed and len(column.value) >= _SMOOTHED_FROM
    raw = element(
        "path",
        d=line_path(strokes(x, y, columns, 0.0, 1.0), UNITS),
        class_=f"line {line.look}{' faint' if smoothed else ''}",
        data_label=line.label,
    )
    under.append(raw)
    if smoothed:
        under.append(_smooth(line, scale, start, end))
    return _Drawn(under, _marks(x, y, f"dot {line.look}", _DOT) if _dotted(line) else [])


def _places(step: Floats, start: float, end: float) -> Floats:
    return np.asarray((step - start) / ((end - start) or 1.0), dtype=np.float64)


def _smooth(line: Line, scale: Scale, start: float, end: float) -> Markup:
    column = line.column.finite
    step, value = medians(column.step, column.value, min(_MEDIANS, len(column.value) // _LEAST_MEDIAN))
    y = HEIGHT * (1 - np.clip(scale(value), 0.0, 1.0))
    path = line_path(strokes(_places(step, start, end), y, len(step), 0.0, 1.0), UNITS)
    return element("path", d=path, class_=f"line {line.look}")


def _interval(line: Line, scale: Scale, start: float, end: float) -> list[Markup]:
    """What lies within 1.96 standard errors: an area, or a bar at each of few values."""
    if not _uncertain(line):
        return []
    _, here, there = np.intersect1d(line.column.row, line.error.row, return_indices=True)
    step, value, error = line.column.step[here], line.column.value[here], line.error.value[there]
    known = np.isfinite(value) & np.isfinite(error)
    step, value, error = step[known], value[known], error[known]
    order = np.argsort(step, kind="stable")
    kept = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), _MOST_DOTS)).astype(int))]
    x = _places(step[kept], start, end)
    low, high = value[kept] - INTERVAL * error[kept], value[kept] + INTERVAL * error[kept]
    if scale.log:
        low = np.maximum(low, 10**scale.low)
    upper, lower = (HEIGHT * (1 - np.clip(scale(edge), 0.0, 1.0)) for edge in (high, low))
    if _dotted(line):
        bars = [Stroke(np.array([at, at]), np.array(ends)) for at, *ends in zip(x, upper, lower, strict=True)]
        return [element("path", d=line_path(bars, UNITS), class_=f"error {line.look}")]
    area = area_path(Stroke(x, upper), Stroke(x, lower), UNITS)
    return [element("path", d=area, class_=f"interval {line.look}")]


def _uncertain(line: Line) -> bool:
    """Whether its errors are known; those of numbers that were not estimated are 0."""
    return bool((line.error.finite.value > 0).any())


def _draw_spread(panel: Panel, scale: Scale, start: float, end: float) -> list[Markup]:
    spread = panel.spread
    if spread is None:
        return []
    x = _places(spread.step, start, end)

    def y(values: Floats) -> Floats:
        return HEIGHT * (1 - np.clip(scale(values), 0.0, 1.0))

    def area(upper: Floats, lower: Floats, look: str) -> Markup:
        return element("path", d=area_path(Stroke(x, y(upper)), Stroke(x, y(lower)), UNITS), class_=look)

    middle = element("path", d=line_path([Stroke(x, y(spread.middle))], UNITS), class_="line middle")
    return [area(spread.high, spread.low, "spread"), area(spread.third, spread.first, "half"), middle]


def _marks(x: Floats, y: Floats, look: str, shape: str) -> list[Markup]:
    known = np.flatnonzero(np.isfinite(y))
    if len(known) > _MOST_DOTS:
        return []
    return [
        element("svg", element("path", d=shape, class_=look), x=percent(x[i]), y=f"{y[i]:.1f}", class_="open")
        for i in known
    ]


def _draw_bound(bound: Bound, scale: Scale) -> Markup:
    y = f"{HEIGHT * (1 - float(scale(np.array([bound.value]))[0])):.1f}"
    words = hover(f"{bound.label}: {number(bound.value)}")
    return element("g", words, element("line", x1="0", x2="100%", y1=y, y2=y, class_=_bound_look(bound)))


def _beyond(line: Line, scale: Scale, start: float, end: float) -> Markup:
    column = line.column.finite
    at = scale(column.value)
    outside = (at < 0) | (at > 1)
    return draw_beyond(_places(column.step[outside], start, end), at[outside] > 1, HEIGHT)


def draw_beyond(x: Floats, above: Bools, height: float) -> Markup:
    """A triangle at the edge for values that the axis does not reach, one a column."""
    places = sorted(
        {(round(float(place) * _MARK_COLUMNS), bool(up)) for place, up in zip(x, above, strict=True)}
    )
    return Markup("").join(
        element(
            "svg",
            element("path", d="M-4 7L0 1L4 7Z" if up else "M-4 -7L0 -1L4 -7Z", class_="beyond"),
            x=percent(place / _MARK_COLUMNS),
            y="0" if up else height,
            class_="open",
        )
        for place, up in places
    )


# -- what is not a number, and what happened ----------------------------------------------------------------


def _all_steps(panel: Panel) -> Floats:
    steps: Floats = np.unique(np.concatenate([line.column.step for line in panel.lines]))
    return steps


def _not_finite(panel: Panel) -> Strip:
    bad = [line.column.step[~np.isfinite(line.column.value)] for line in panel.lines]
    return Strip("nonfinite", "not finite", np.isin(_all_steps(panel), np.concatenate(bad)))


def _draw_events(events: Sequence[EventLine], bottom: float) -> Markup:
    """Lines through the chart. The pointer follows them to the table; the keyboard reaches that by itself."""
    parts = []
    for event in events:
        line = element(
            "line",
            x1=percent(event.at),
            x2=percent(event.at),
            y1="0",
            y2=f"{bottom:g}",
            class_=f"event {event.severity}",
        )
        # A line is too thin to be pointed at.
        target = element(
            "line", x1=percent(event.at), x2=percent(event.at), y1="0", y2=f"{bottom:g}", class_="reach"
        )
        inside = (hover(event.words), line, target)
        if event.href is None:
            parts.append(element("g", *inside))
        else:
            parts.append(element("a", *inside, href=event.href, tabindex="-1"))
    return Markup("").join(parts)


def _describe(panel: Panel, strips: list[Strip], steps: Floats) -> str:
    told = [panel.about]
    for line in panel.lines:
        column = line.column.finite
        if column:
            first, last = (
                f"{number(column.value[place])} at {panel.axis} {step_number(column.step[place])}"
                for place in (0, -1)
            )
            told.append(
                f"{line.label}: from {first} to {last}, lowest {number(column.value.min())}, highest "
                f"{number(column.value.max())}."
            )
    told.append(describe_strips(strips, steps))
    return " ".join(part for part in told if part)
