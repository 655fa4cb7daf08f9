"""The curve of one alarmed layer: its norm, the baseline and range it was judged by, and its alarms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from palingenesis.report.axes import Scale, decade_ticks, padded, step_ticks, x_axis, y_axis
from palingenesis.report.episodes import CHANGED, Episode, over_in_words
from palingenesis.report.history import History
from palingenesis.report.moments import Moment, diagnosis_in_words, tell_alarm, tell_briefly
from palingenesis.report.strips import Strip, describe_strips, draw_strips, legend_of, strips_height
from palingenesis.report.svg import (
    UNITS,
    area_path,
    element,
    hover,
    line_path,
    percent,
    picture,
    stretched,
    text,
)
from palingenesis.report.thin import Floats, Stroke, strokes
from palingenesis.report.words import Sentence, count, step_number, visible

_HEIGHT = 130
_TOP = 14
_COLUMNS = 320
_LEAST_SPAN = 1.0
_TOLD = 3

FLAGS = {
    "alarm": "M-5.5 -11L5.5 -11L0 -2Z",
    "clear": "M-5.5 -11L5.5 -11L0 -2Z",
    "accepted": "M-4.5 -11H4.5V-2H-4.5Z",
}
"""Outlines of the marks above a curve, by kind."""


@dataclass(frozen=True)
class Curve:
    """One layer's figure."""

    layer: str
    sentences: list[Sentence]
    picture: Markup
    legend: list[tuple[str, str]]
    more: int
    """Episodes of the layer that are drawn but not told."""


def order_of_layers(episodes: Sequence[Episode], moments: Sequence[Moment]) -> list[str]:
    """Alarmed layers: of incidents those to look at first, then by the step at which they left range."""
    origins = {moment.layer for moment in moments if moment.kind == "incident"}
    live = sorted((e for e in episodes if not e.superseded), key=lambda e: (e.layer not in origins, e.since))
    return list(dict.fromkeys(episode.layer for episode in live))


def draw_curve(
    key: str, layer: str, history: History, episodes: Sequence[Episode], start: float, end: float
) -> Curve:
    """The figure of ``layer`` on the axis of steps from ``start`` to ``end``."""
    norms = history.norms
    index = norms.names.index(layer)
    own = [e for e in episodes if e.layer == layer and not e.superseded]
    steps = norms.steps.astype(np.float64)
    x = (steps - start) / ((end - start) or 1.0)
    log, mean, reach = norms.log[:, index], history.mean[:, index], history.reach[:, index]
    strips = [
        Strip("zero", "exactly zero", norms.zero[:, index]),
        Strip("absent", "no gradient", norms.absent[:, index]),
        Strip("nonfinite", "not finite", norms.nonfinite[:, index]),
    ]
    scale = _scale(np.concatenate([log, mean - reach, mean + reach]))
    bottom = _TOP + _HEIGHT
    floor = bottom + strips_height(strips)

    def y(values: Floats) -> Floats:
        return _HEIGHT * (1 - scale(values))

    drawn = stretched(
        _HEIGHT,
        *_band(x, y(mean + reach), y(mean - reach)),
        element("path", d=line_path(strokes(x, y(mean), _COLUMNS, 0, 1), UNITS), class_="line mean"),
        element("path", d=line_path(strokes(x, y(log), _COLUMNS, 0, 1), UNITS), class_="line norm"),
    )
    if np.isfinite(log).any():
        axis = y_axis(decade_ticks(scale.low, scale.high, 4), _HEIGHT)
    else:
        axis = text("50%", _HEIGHT / 2, "There was never a norm to draw.", "middle", "empty")
    parts = [
        *(_shade(episode, start, end, floor) for episode in own),
        element("svg", axis, drawn, y=_TOP, class_="open"),
        draw_strips(strips, steps, start, end, bottom),
        *(_mark(episode, start, end) for episode in own),
        element("line", x1="0", x2="100%", y1=floor, y2=floor, class_="base"),
        x_axis(step_ticks(start, end, 5), floor),
    ]
    description = " ".join(["".join(tell_alarm(e)) for e in own[:_TOLD]] + [describe_strips(strips, steps)])
    title = f"Gradient norm of {visible(layer, 120)}"
    return Curve(
        layer=layer,
        sentences=[tell_briefly(episode) for episode in own[:_TOLD]],
        picture=picture(key, title, visible(description), floor + 24, *parts, class_="plot"),
        legend=legend_of(strips),
        more=max(0, len(own) - _TOLD),
    )


def _scale(values: Floats) -> Scale:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return padded(-_LEAST_SPAN, _LEAST_SPAN)
    low, high = float(finite.min()), float(finite.max())
    if high - low < _LEAST_SPAN:
        middle = (low + high) / 2
        low, high = middle - _LEAST_SPAN / 2, middle + _LEAST_SPAN / 2
    return padded(low, high)


def _band(x: Floats, upper: Floats, lower: Floats) -> list[Markup]:
    """The range within which no alarm can come."""
    both = np.isfinite(upper) & np.isfinite(lower)
    areas = []
    for part in np.split(np.arange(len(x)), np.flatnonzero(np.diff(both)) + 1):
        if not both[part].any():
            continue
        kept = part[np.unique(np.linspace(0, len(part) - 1, min(len(part), _COLUMNS)).astype(int))]
        areas.append(
            element(
                "path",
                d=area_path(Stroke(x[kept], upper[kept]), Stroke(x[kept], lower[kept]), UNITS),
                class_="band",
            )
        )
    return areas


def _shade(episode: Episode, start: float, end: float, bottom: float) -> Markup:
    width = (end - start) or 1.0
    until = end if episode.cleared_step is None else episode.cleared_step
    what = diagnosis_in_words(episode.diagnosis)
    return element(
        "rect",
        hover(f"{what} from step {step_number(episode.since)}, {over_in_words(episode)}"),
        x=percent((episode.since - start) / width),
        y=_TOP,
        width=percent(max(0.002, (until - episode.since) / width)),
        height=bottom - _TOP,
        class_="shade",
    )


def _mark(episode: Episode, start: float, end: float) -> Markup:
    """A filled triangle at the alarm; at its end an open one, or a square where its level was accepted.

    Where it turned into another alarm, that one's triangle stands there already.
    """
    width = (end - start) or 1.0
    places = [(episode.step, "alarm", f"alarm at step {step_number(episode.step)}")]
    if episode.cleared_step is not None and episode.ended != CHANGED:
        kind = "accepted" if episode.accepted else "clear"
        places.append((episode.cleared_step, kind, over_in_words(episode)))
    return Markup("").join(
        element(
            "svg",
            element("path", hover(words), d=FLAGS[kind], class_=f"flag {kind}"),
            x=percent((step - start) / width),
            y=_TOP,
            class_="open",
        )
        for step, kind, words in places
    )


def describe_missing(shown: int, all_layers: int) -> str | None:
    """What to say when not every alarmed layer has a figure."""
    if shown >= all_layers:
        return None
    return (
        f"Curves of {shown} of {count(all_layers, 'alarmed layer')} are drawn: of incidents those to look at "
        f"first, then by the step at which they left their range. {all_layers - shown:,} more are in the "
        "tables."
    )
