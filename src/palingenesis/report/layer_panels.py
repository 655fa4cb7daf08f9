"""Signals that have a value for each layer or block: where all of them lie, and the few that stand out.

``health/stable_rank/model.layers.3.mlp.up_proj`` is one of a family. A chart with hundreds of lines shows
none of them, so a panel has the range of all layers, the middle half of them, and the layers at the end that
matters for this signal; all are in the table below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from palingenesis.config import MonitorConfig
from palingenesis.report.panel import LOOKS, Bound, Line, Panel, Spread
from palingenesis.report.series import Signals
from palingenesis.report.tables import Rows
from palingenesis.report.thin import bin_edges
from palingenesis.report.words import number, step_number, visible
from palingenesis.runlogs.table import Column

End = Literal["highest", "lowest", "farthest"]

_PREFIX = "health/"
#: Layers that have a line of their own where not all can.
_OUTSTANDING = 5
_LONG_NAME = 60
_MOST_LOOKS = 160
_QUARTILES = (25.0, 50.0, 75.0)


@dataclass(frozen=True)
class _Known:
    """What is known of a family."""

    title: str
    about: str
    end: End
    level: tuple[str, str] | None = None
    linear: bool = False
    """Option of the monitor that holds a level which means something, and what it is called."""


_FAMILIES: dict[str, _Known] = {
    "weight_drift": _Known(
        "Drift of the weights, by layer",
        "Distance from the first weights as a share of their norm. A fine-tuning run that goes far forgets.",
        "highest",
        ("drift_ceiling", "ceiling"),
    ),
    "stable_rank": _Known(
        "Stable rank, by layer",
        "How many directions a weight matrix has in effect. A fall towards 1 is collapse.",
        "lowest",
        ("stable_rank_floor", "floor"),
    ),
    "lora_stable_rank": _Known(
        "Stable rank of adapters, by layer",
        "How many directions an adapter uses of those it has.",
        "lowest",
    ),
    "update_ratio": _Known(
        "Size of one update, by block",
        "What one optimizer step changes, as a share of the weights' norm: 0.001 is usual for Adam.",
        "farthest",
    ),
    "gw_ratio": _Known(
        "Gradient over weight norm, by block",
        "A block that stands far off the others learns far faster, or slower, than they do.",
        "farthest",
    ),
    "weight_norm": _Known(
        "Weight norm, by block",
        "Root mean square of the elements. One that grows without end is on its way to overflow.",
        "farthest",
    ),
    "grad_cosine": _Known(
        "Direction of consecutive gradients, by block",
        "Cosine between two consecutive steps: a block clearly below zero undoes its own steps.",
        "lowest",
        linear=True,
    ),
}


@dataclass(frozen=True)
class LayerPanel:
    """A chart of a family, and its table."""

    panel: Panel
    rows: Rows


@dataclass(frozen=True)
class MemberRow:
    """A layer in the table of a family."""

    name: str
    first: str
    last: str
    lowest: str
    highest: str


def layer_panels(signals: Signals, config: MonitorConfig, most_rows: int) -> list[LayerPanel]:
    """The families that a run has numbers of: those that are known first."""
    families: dict[str, dict[str, Column]] = {}
    for name in signals:
        family, _, layer = name.removeprefix(_PREFIX).partition("/")
        if name.startswith(_PREFIX) and layer:
            column = signals.numbers(name)
            if column:
                families.setdefault(family, {})[layer] = column
    order = [*(name for name in _FAMILIES if name in families), *sorted(families.keys() - _FAMILIES.keys())]
    return [_layer_panel(name, families[name], signals, config, most_rows) for name in order]


def _layer_panel(
    family: str, members: Mapping[str, Column], signals: Signals, config: MonitorConfig, most_rows: int
) -> LayerPanel:
    known = _FAMILIES.get(family) or _Known(
        f"{family.replace('_', ' ').capitalize()}, by layer",
        f"The signal health/{family} of each layer.",
        "farthest",
    )
    ranked = _ranked(members, known.end)
    few = len(members) <= len(LOOKS)
    drawn = list(members) if few else ranked[:_OUTSTANDING]
    lines = [
        Line(visible(name, _LONG_NAME), signals[f"{_PREFIX}{family}/{name}"], look)
        for name, look in zip(drawn, LOOKS, strict=False)
    ]
    bounds = (
        () if known.level is None else (Bound(getattr(config, known.level[0]), known.level[1], limit=True),)
    )
    notes = () if few else (f"{len(members):,} in all; lines are those {_AT_THE_END[known.end]}.",)
    panel = Panel(
        key=f"by-layer-{family}",
        title=known.title,
        about=known.about,
        lines=tuple(lines),
        bounds=bounds,
        linear=known.linear,
        notes=notes,
        spread=None if few else _spread(members),
        claims=frozenset(f"{_PREFIX}{family}/{name}" for name in members),
    )
    kept = set(ranked[:most_rows])
    rows = [_row(name, column) for name, column in members.items() if name in kept]
    return LayerPanel(panel, Rows(rows, len(members)))


_AT_THE_END: dict[End, str] = {
    "highest": "that are highest at the end",
    "lowest": "that are lowest at the end",
    "farthest": "farthest from the others at the end",
}


def _ranked(members: Mapping[str, Column], end: End) -> list[str]:
    """Layers, those that matter first."""
    last = {name: float(column.value[-1]) for name, column in members.items()}
    if end == "highest":
        return sorted(last, key=lambda name: -last[name])
    if end == "lowest":
        return sorted(last, key=lambda name: last[name])
    values = np.array(list(last.values()))
    if (values > 0).all():
        values = np.log(values)
    off = dict(zip(last, np.abs(values - np.median(values)), strict=True))
    return sorted(off, key=lambda name: -off[name])


def _spread(members: Mapping[str, Column]) -> Spread:
    """Where all layers lie, at each step at which any has a value."""
    steps = np.unique(np.concatenate([column.step for column in members.values()]))
    table = np.full((len(members), len(steps)), np.nan)
    for row, column in enumerate(members.values()):
        table[row, np.searchsorted(steps, column.step)] = column.value
    first, middle, third = np.nanpercentile(table, _QUARTILES, axis=0)
    # Of neighbouring looks the lowest and the highest are kept.
    starts = bin_edges(len(steps), _MOST_LOOKS)[:-1]
    return Spread(
        step=steps[starts],
        low=np.minimum.reduceat(np.nanmin(table, axis=0), starts),
        first=first[starts],
        middle=middle[starts],
        third=third[starts],
        high=np.maximum.reduceat(np.nanmax(table, axis=0), starts),
    )


def _row(name: str, column: Column) -> MemberRow:
    low, high = int(column.value.argmin()), int(column.value.argmax())
    return MemberRow(
        visible(name, 160),
        number(float(column.value[0]), 3),
        number(float(column.value[-1]), 3),
        f"{number(float(column.value[low]), 3)} at step {step_number(column.step[low])}",
        f"{number(float(column.value[high]), 3)} at step {step_number(column.step[high])}",
    )
