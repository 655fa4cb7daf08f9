"""A loss curve drawn in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from palingenesis.findings.curve.analysis import CurveAnalysis

_WIDEST, _NARROWEST, _HEIGHT = 110, 40, 16
#: Losses a column that are drawn; more would fill the same place.
_A_COLUMN = 4
#: Positive losses that span more than this factor are drawn on a logarithmic axis.
_LOGARITHMIC = 30.0
_LABELS, _ROOM = 6, 11


def plot(analysis: CurveAnalysis, width: int, *, plain: bool) -> list[str]:
    """The lines of the drawing; none for a curve of one point.

    Args:
        analysis: the curve.
        width: columns of the terminal.
        plain: characters that any pipe can hold, and no colour.
    """
    if analysis.rows < 2:
        return []
    width = min(max(width, _NARROWEST), _WIDEST) - _ROOM
    step, loss = analysis.step, analysis.loss
    log = bool(loss.min() > 0 and loss.max() / loss.min() > _LOGARITHMIC)
    values = np.log10(loss) if log else loss
    low, high = float(values.min()), float(values.max())
    span = (high - low) or 1.0
    at = np.clip(((step - step[0]) / ((step[-1] - step[0]) or 1.0) * width).astype(int), 0, width - 1)
    grid = [[" "] * width for _ in range(_HEIGHT)]
    for column in np.unique(at):
        inside = values[at == column]
        rows = ((high - inside) / span * (_HEIGHT - 1)).round().astype(int)
        for row in range(int(rows.min()), int(rows.max()) + 1):
            grid[row][column] = "." if plain else "·"
        grid[int(np.median(rows))][column] = "#" if plain else "█"
    _mark(grid, analysis, width, plain=plain)
    lines = []
    for number, marks in enumerate(grid):
        value = high - span * number / (_HEIGHT - 1)
        shown = number % (_HEIGHT // _LABELS) == 0 or number == _HEIGHT - 1
        label = f"{10**value if log else value:9.4g}" if shown else " " * 9
        lines.append(f"{label} {'|' if plain else '│'}{''.join(marks).rstrip()}")
    first, last = f"{step[0]:.0f}", f"{step[-1]:.0f}"
    lines.append(" " * 10 + ("+" if plain else "└") + ("-" if plain else "─") * width)
    lines.append(" " * _ROOM + first + " " * max(width - len(first) - len(last), 1) + last)
    return lines


def _mark(grid: list[list[str]], analysis: CurveAnalysis, width: int, *, plain: bool) -> None:
    """Spikes as a sign above them, plateaus as a line below."""
    step = analysis.step

    def column(at: float) -> int:
        return min(int((at - step[0]) / ((step[-1] - step[0]) or 1.0) * width), width - 1)

    for spike in analysis.spikes:
        grid[0][column(spike.step)] = "v" if plain else "▼"
    for plateau in analysis.plateaus:
        for place in range(column(plateau.first_step), column(plateau.last_step) + 1):
            grid[_HEIGHT - 1][place] = "=" if plain else "═"
