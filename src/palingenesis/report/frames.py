"""What stands on and beside the heat map: frames around alarms, and the names of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from palingenesis.report.episodes import Episode, over_in_words
from palingenesis.report.history import History
from palingenesis.report.moments import diagnosis_in_words
from palingenesis.report.svg import element, hover, percent
from palingenesis.report.thin import Ints
from palingenesis.report.words import count, step_number, tail, visible

SMALLEST_FRAME = 7
"""Pixels; a row thinner than this gets a frame of this height around it."""

_LABEL_EVERY = 14
_WIDE_LABEL, _NARROW_LABEL = 30, 14


@dataclass(frozen=True)
class Grid:
    """The cells that are drawn: bins of layers by bins of checks."""

    codes: NDArray[np.uint8]
    """``[rows, columns]``"""
    row_edges: Ints
    column_edges: Ints
    row_height: int

    @property
    def height(self) -> int:
        return self.row_height * len(self.codes)

    def row_of(self, layer: int) -> int:
        return int(np.searchsorted(self.row_edges, layer, side="right")) - 1

    def column_of(self, check: int) -> int:
        return int(np.searchsorted(self.column_edges, check, side="right")) - 1


def runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    where = np.flatnonzero(mask)
    if not len(where):
        return []
    parts = np.split(where, np.flatnonzero(np.diff(where) > 1) + 1)
    return [(int(part[0]), int(part[-1])) for part in parts]


def alarm_frames(episodes: Sequence[Episode], history: History, grid: Grid) -> list[Markup]:
    """A frame around every alarm, one around neighbouring rows that share it."""
    place = {name: index for index, name in enumerate(history.norms.names)}
    steps = history.norms.steps
    shared: dict[tuple[int, int, str, bool], dict[int, Episode]] = {}
    for episode in episodes:
        if episode.superseded or episode.layer not in place or not len(steps):
            continue
        first = int(np.searchsorted(steps, episode.since))
        last = (
            len(steps) if episode.cleared_step is None else int(np.searchsorted(steps, episode.cleared_step))
        )
        first = min(first, len(steps) - 1)
        last = max(last, first + 1)
        span = (grid.column_of(first), grid.column_of(last - 1) + 1)
        look = (*span, episode.diagnosis, episode.accepted)
        shared.setdefault(look, {})[grid.row_of(place[episode.layer])] = episode
    return [
        frame
        for (first, last, diagnosis, _), rows in shared.items()
        for frame in _frames(first, last, diagnosis, rows, grid)
    ]


def _frames(first: int, last: int, diagnosis: str, rows: dict[int, Episode], grid: Grid) -> list[Markup]:
    mask = np.zeros(len(grid.codes), dtype=np.bool_)
    mask[list(rows)] = True
    columns = grid.codes.shape[1]
    frames = []
    for top, bottom in runs(mask):
        episode, others = rows[top], bottom - top
        since = step_number(episode.since)
        words = (
            f"{visible(episode.layer, 80)}: {diagnosis_in_words(diagnosis)} from step {since}, "
            f"{over_in_words(episode)}"
        )
        if others:
            words += f", and {count(others, 'more row')} below it"
        height = (bottom - top + 1) * grid.row_height
        shown = max(height, SMALLEST_FRAME)
        place = {
            "x": percent(first / columns),
            "y": f"{top * grid.row_height - (shown - height) / 2:g}",
            "width": percent((last - first) / columns),
            "height": shown,
        }
        # Around a thin row a frame must not cover what it frames.
        thin = grid.row_height < SMALLEST_FRAME
        halo = [] if thin else [element("rect", **place, class_="frame-halo")]
        look = f"frame{' thin' if thin else ''}{' accepted' if episode.accepted else ''}"
        frame = element("rect", **place, class_=look)
        frames.append(element("g", hover(words), *halo, frame))
    return frames


def row_labels(grid: Grid, names: Sequence[str], episodes: Sequence[Episode]) -> Markup:
    """Names beside the rows: of alarmed layers first, then as many others as find room."""
    place = {name: index for index, name in enumerate(names)}
    alarmed = list(dict.fromkeys(place[e.layer] for e in episodes if e.layer in place and not e.superseded))
    every = max(1, -(-_LABEL_EVERY // grid.row_height))
    others = [int(layer) for layer in grid.row_edges[:-1][::every]]
    taken: list[float] = []
    parts: list[Markup] = []
    marked = set(alarmed)
    for layer in [*alarmed, *others]:
        # A label of a thin row at the edge would be cut off there.
        y = (grid.row_of(layer) + 0.5) * grid.row_height
        y = min(max(y, _LABEL_EVERY / 2), grid.height - _LABEL_EVERY / 2) if len(grid.codes) > 1 else y
        if any(abs(y - other) < _LABEL_EVERY for other in taken):
            continue
        taken.append(y)
        kind = "alarmed" if layer in marked else ""
        parts.extend(
            element(
                "text",
                hover(visible(names[layer])),
                label,
                x="100%",
                y=f"{y:g}",
                dy="0.32em",
                text_anchor="end",
                class_=f"{size} {kind}".strip(),
            )
            for size, label in (
                ("wide", visible(names[layer], _WIDE_LABEL)),
                ("narrow", tail(names[layer], _NARROW_LABEL)),
            )
        )
    return element("svg", *parts, height=grid.height + 26, class_="row-names", aria_hidden="true")
