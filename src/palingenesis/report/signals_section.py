"""All signals of a run as charts below each other, with what happened drawn through all of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from palingenesis.config import MonitorConfig
from palingenesis.report.chart import Chart, EventLine, draw_panel
from palingenesis.report.layer_panels import layer_panels
from palingenesis.report.marks import Mark
from palingenesis.report.panels import others_of, panels_of
from palingenesis.report.series import Signals
from palingenesis.report.tables import Rows, event_anchor
from palingenesis.report.words import number, step_number, visible

_RANKS = {"critical": 0, "warning": 1, "info": 2}
_COLUMNS = 200
_CONSTANTS_NAMED = 40
#: Marks without which a curve is not understood, although nothing is wrong.
_ALWAYS = ("run resumed",)


@dataclass(frozen=True)
class SignalLimits:
    """How much is drawn."""

    columns: int = 480
    events: int = 40
    others: int = 60
    layers: int = 400


@dataclass(frozen=True)
class LayerChart:
    """A chart of a signal by layer, and its table."""

    chart: Chart
    rows: Rows


@dataclass(frozen=True)
class SignalsSection:
    """What the page shows of signals."""

    charts: list[Chart]
    layers: list[LayerChart]
    others: list[Chart]
    constant: list[str]
    constant_left_out: int
    others_left_out: int
    events: bool
    """Whether anything is marked in the charts."""

    @property
    def titles(self) -> list[tuple[str, str]]:
        """Key and title of every chart that findings may point to."""
        return [(chart.key, chart.title) for chart in (*self.charts, *(one.chart for one in self.layers))]


def linked(marks: Sequence[Mark], rows: Collection[int]) -> list[Mark]:
    """Marks that lead to the table of events, where the event has a row there."""
    kept = set(rows)
    return [
        replace(mark, href=f"#{event_anchor(mark.place)}")
        if mark.href is None and mark.place in kept
        else mark
        for mark in marks
    ]


def event_lines(marks: Sequence[Mark], start: float, end: float, most: int) -> list[EventLine]:
    """What is drawn through every chart: one line a column, the worst of what fell there."""
    width = (end - start) or 1.0
    best: dict[int, Mark] = {}
    for mark in marks:
        if mark.severity == "info" and mark.label not in _ALWAYS:
            continue
        column = round((mark.start - start) / width * _COLUMNS)
        if column not in best or _RANKS[mark.severity] < _RANKS[best[column].severity]:
            best[column] = mark
    worst = sorted(best.values(), key=lambda mark: (_RANKS[mark.severity], mark.start))[:most]
    return [
        EventLine(
            (mark.start - start) / width,
            mark.severity,
            f"step {step_number(mark.start)}: {mark.title}",
            mark.href,
        )
        for mark in sorted(worst, key=lambda mark: mark.start)
    ]


def draw_signals(
    signals: Signals,
    config: MonitorConfig,
    events: Sequence[EventLine],
    start: float,
    end: float,
    limits: SignalLimits,
) -> SignalsSection:
    """Charts of everything that has numbers."""
    panels = panels_of(signals, config)
    families = layer_panels(signals, config, limits.layers)
    claimed = {name for panel in (*panels, *(family.panel for family in families)) for name in panel.claims}
    others = others_of(signals, claimed, limits.others)
    constants = [f"{visible(name)} {number(value)}" for name, value in others.constant]
    return SignalsSection(
        charts=[draw_panel(panel, start, end, events, limits.columns) for panel in panels],
        layers=[
            LayerChart(draw_panel(family.panel, start, end, events, limits.columns), family.rows)
            for family in families
        ],
        others=[draw_panel(panel, start, end, (), limits.columns) for panel in others.panels],
        constant=constants[:_CONSTANTS_NAMED],
        constant_left_out=max(0, len(constants) - _CONSTANTS_NAMED),
        others_left_out=others.left_out,
        events=bool(events),
    )
