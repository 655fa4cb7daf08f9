"""The heat map: layers down, checks across, each cell the distance of a norm from its own baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from palingenesis.report import palette
from palingenesis.report.axes import Tick, round_values, x_axis
from palingenesis.report.episodes import Episode
from palingenesis.report.frames import SMALLEST_FRAME, Grid, alarm_frames, row_labels, runs
from palingenesis.report.history import History
from palingenesis.report.png import data_uri
from palingenesis.report.svg import element, hover, percent, picture, text
from palingenesis.report.thin import Ints, bin_edges, most_extreme
from palingenesis.report.words import count, number, step_number, times, visible

_TALLEST_ROW = 18
_HEIGHT = 620
_CELLS_WITH_WORDS = 1500
_ROWS_WITH_WORDS = 1000
_MOST_PATCHES = 400
_MOST_FRAMES = 1500
_LEGEND_WIDTH = 280
_LEGEND_HEIGHT = 12
_X_TICKS = 7


@dataclass(frozen=True)
class HeatMap:
    """The drawing, its names and what was left out of it."""

    picture: Markup
    labels: Markup
    scale: Markup
    notes: list[str]
    alarms: bool
    """Whether there is any frame."""
    accepted: bool
    """Whether any of them is of an alarm that ended because its level was accepted."""
    looks: list[tuple[str, str]]
    """Class and meaning of the cells that are no departure, those that occur."""


def draw_heatmap(history: History, episodes: Sequence[Episode], columns: int, rows: int) -> HeatMap:
    """All layers over all checks, at most ``rows`` by ``columns`` cells."""
    norms = history.norms
    codes, score = palette.codes_and_scores(history)
    occurring = set(np.unique(codes).tolist())
    column_edges, row_edges = bin_edges(len(codes), columns), bin_edges(codes.shape[1], rows)
    codes, score = most_extreme(codes, score, column_edges)
    codes, _ = most_extreme(np.ascontiguousarray(codes.T), np.ascontiguousarray(score.T), row_edges)
    row_height = max(1, min(_TALLEST_ROW, _HEIGHT // len(codes)))
    grid = Grid(codes, row_edges, column_edges, row_height)
    frames = alarm_frames(episodes, history, grid)
    drawing = picture(
        "heatmap",
        "Gradient norm of each layer over the checks, relative to its own baseline",
        _describe(history, episodes),
        grid.height + 26,
        *_images(grid),
        _patches(grid),
        *_words(grid, history),
        *frames[:_MOST_FRAMES],
        x_axis(_check_ticks(norms.steps, column_edges), grid.height),
        class_="plot",
    )
    return HeatMap(
        picture=drawing,
        labels=row_labels(grid, norms.names, episodes),
        scale=_scale(),
        alarms=bool(frames),
        accepted=any(episode.accepted for episode in episodes if not episode.superseded),
        notes=_notes(grid, history, len(frames)),
        looks=[(kind, words) for code, kind, words in _LOOKS if code in occurring],
    )


_LOOKS = (
    (palette.UNWATCHED, "unwatched", "not watched"),
    (palette.NO_BASELINE, "no-baseline", "no baseline yet"),
    (palette.ABSENT, "absent", "no gradient (None)"),
    (palette.ZERO, "zero", "exactly zero"),
    (palette.NONFINITE, "nonfinite", "not finite"),
)


def _images(grid: Grid) -> list[Markup]:
    return [
        element(
            "image",
            href=data_uri(grid.codes, theme.colours),
            x="0",
            y="0",
            width="100%",
            height=grid.height,
            preserveAspectRatio="none",
            class_=f"cells {name}",
        )
        for name, theme in (("on-light", palette.LIGHT), ("on-dark", palette.DARK))
    ]


def _patches(grid: Grid) -> Markup:
    """A pattern over cells that are absent or not finite, where cells are large enough to carry one."""
    if grid.row_height < SMALLEST_FRAME:
        return Markup("")
    patches = []
    for code, kind in ((palette.ABSENT, "absent"), (palette.NONFINITE, "nonfinite")):
        for row, cells in enumerate(grid.codes == code):
            for first, last in runs(cells):
                patches.append(
                    element(
                        "rect",
                        x=percent(first / len(cells)),
                        y=row * grid.row_height,
                        width=percent((last - first + 1) / len(cells)),
                        height=grid.row_height,
                        class_=f"patch {kind}",
                    )
                )
    if not 0 < len(patches) <= _MOST_PATCHES:
        return Markup("")
    return _PATTERNS + Markup("").join(patches)


_PATTERNS = element(
    "defs",
    *(
        element(
            "pattern",
            element("path", d=lines, class_="hatch-line"),
            id=name,
            width=6,
            height=6,
            patternUnits="userSpaceOnUse",
        )
        for name, lines in (
            ("hatch", "M-1 7L7 -1M-1 1L1 -1M5 7L7 5"),
            ("cross", "M-1 -1L7 7M-1 5L1 7M5 -1L7 1"),
        )
    ),
)


def _words(grid: Grid, history: History) -> list[Markup]:
    """What the pointer says: of every cell on a small map, of every row on a larger one."""
    rows, columns = grid.codes.shape
    whole = len(history.norms.steps) == columns and len(history.norms.names) == rows
    if whole and rows * columns <= _CELLS_WITH_WORDS:
        return [_cell(grid, history, row, column) for row in range(rows) for column in range(columns)]
    if rows > _ROWS_WITH_WORDS:
        return []
    return [
        element(
            "rect",
            hover(_row_words(grid, history, row)),
            x="0",
            y=row * grid.row_height,
            width="100%",
            height=grid.row_height,
            class_="cell",
        )
        for row in range(rows)
    ]


def _cell(grid: Grid, history: History, row: int, column: int) -> Markup:
    norms = history.norms
    words = f"{visible(norms.names[row], 80)}, step {step_number(norms.steps[column])}: "
    return element(
        "rect",
        hover(words + describe_value(history, column, row)),
        x=percent(column / grid.codes.shape[1]),
        y=row * grid.row_height,
        width=percent(1 / grid.codes.shape[1]),
        height=grid.row_height,
        class_="cell",
    )


def describe_value(history: History, check: int, layer: int) -> str:
    """One reading in words."""
    norms = history.norms
    if norms.unwatched[check, layer]:
        return "not watched"
    if norms.absent[check, layer]:
        return "no gradient (None)"
    if norms.zero[check, layer]:
        return "exactly zero"
    if norms.nonfinite[check, layer]:
        return "not finite"
    departure = float(history.departure[check, layer])
    relative = f"{times(departure)} its baseline" if np.isfinite(departure) else "no baseline yet"
    return f"norm {number(norms.norm[check, layer])}, {relative}"


def _row_words(grid: Grid, history: History, row: int) -> str:
    first, last = int(grid.row_edges[row]), int(grid.row_edges[row + 1])
    name = visible(history.norms.names[first], 80)
    if last - first > 1:
        return f"{name} and {count(last - first - 1, 'more layer')}"
    departure = history.departure[:, first]
    if not np.isfinite(departure).any():
        return f"{name}: no baseline"
    worst = int(np.nanargmax(np.abs(departure)))
    step = step_number(history.norms.steps[worst])
    return f"{name}: farthest at step {step}, {times(float(departure[worst]))} its baseline"


def _scale() -> Markup:
    """The colour scale with its ends in words."""
    codes = np.arange(palette.LEVELS, dtype=np.uint8)[None, :]
    images = [
        element(
            "image",
            href=data_uri(codes, theme.colours),
            x="0",
            y="0",
            width=_LEGEND_WIDTH,
            height=_LEGEND_HEIGHT,
            preserveAspectRatio="none",
            class_=f"cells {name}",
        )
        for name, theme in (("on-light", palette.LIGHT), ("on-dark", palette.DARK))
    ]
    labels = (
        ("1/100", 0.0, "start"),
        ("1/10", 0.25, "middle"),
        ("baseline", 0.5, "middle"),
        ("×10", 0.75, "middle"),
        ("×100", 1.0, "end"),
    )
    marks = [
        text(f"{at * _LEGEND_WIDTH:g}", _LEGEND_HEIGHT + 14, words, anchor, "axis")
        for words, at, anchor in labels
    ]
    return element(
        "svg",
        element("title", "Colour scale: from a hundredth of the layer's own baseline to a hundred times it"),
        *images,
        *marks,
        role="img",
        width=_LEGEND_WIDTH,
        height=_LEGEND_HEIGHT + 20,
        class_="colour-scale",
    )


def _check_ticks(steps: Ints, edges: Ints) -> list[Tick]:
    """Under the columns that hold the checks nearest after round steps, the true steps of these checks."""
    columns = len(edges) - 1
    checks = sorted(
        {int(np.searchsorted(steps, v)) for v in round_values(steps[0], steps[-1], _X_TICKS, whole=True)}
    )
    places = [(int(np.searchsorted(edges, check, side="right")) - 1, steps[check]) for check in checks]
    return [Tick((column + 0.5) / columns, step_number(step)) for column, step in places]


def _notes(grid: Grid, history: History, frames: int) -> list[str]:
    checks, layers = history.norms.norm.shape
    rows, columns = grid.codes.shape
    notes = []
    if columns < checks:
        notes.append(
            f"{checks:,} checks are drawn in {columns:,} columns of up to {-(-checks // columns)} checks."
        )
    if rows < layers:
        notes.append(f"{layers:,} layers are drawn in {rows:,} rows of up to {-(-layers // rows)} layers.")
    if notes:
        notes.append(
            "Such a cell shows the most extreme of its readings: not finite before exactly zero before no "
            "gradient before the largest departure. Nothing is averaged."
        )
    if frames > _MOST_FRAMES:
        notes.append(f"{frames - _MOST_FRAMES:,} of {frames:,} alarm frames are not drawn.")
    return notes


def _describe(history: History, episodes: Sequence[Episode]) -> str:
    norms = history.norms
    departure = np.abs(history.departure)
    told = [f"{count(len(norms.names), 'layer')}, {count(len(norms.steps), 'check')}."]
    if np.isfinite(departure).any():
        check, layer = np.unravel_index(int(np.nanargmax(departure)), departure.shape)
        told.append(
            f"The farthest from its baseline is {visible(norms.names[layer], 120)} at step "
            f"{step_number(norms.steps[check])}: {describe_value(history, int(check), int(layer))}."
        )
    alarmed = len({episode.layer for episode in episodes if not episode.superseded})
    told.append(
        f"{count(alarmed, 'layer')} with an alarm, framed. The table of layers has the same in figures."
    )
    return " ".join(told)
