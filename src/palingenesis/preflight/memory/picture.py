"""Memory over a step, drawn in characters."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from palingenesis.preflight.memory.categories import Phase

if TYPE_CHECKING:
    from palingenesis.preflight.memory.trace import Use

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_GB, _MB = 10**9, 10**6
_SIGNS = {
    Phase.FORWARD: "f",
    Phase.LOSS: "L",
    Phase.BACKWARD: "b",
    Phase.CLIPPING: "c",
    Phase.OPTIMIZER: "o",
}
LEGEND = "f forward, L head and loss, b backward, c clipping, o optimizer"


@dataclass(frozen=True)
class Picture:
    """Lines of text, top to bottom; ``plain`` of ASCII alone."""

    lines: tuple[str, ...]


def draw(use: Use, *, width: int = 76, height: int = 10, plain: bool = False) -> Picture:
    """The curve: a column for the most in its share of the step's allocations, and below it the part."""
    axis = 8
    columns = max(10, min(width - axis - 2, len(use.curve)))
    edges = np.linspace(0, len(use.curve), columns + 1).astype(int)
    pieces = [slice(start, max(end, start + 1)) for start, end in itertools.pairwise(edges)]
    tops = [float(use.curve[piece].max()) for piece in pieces]
    parts = [Phase(int(use.phases[piece][use.curve[piece].argmax()])) for piece in pieces]
    most = max(tops)
    unit, name = (_GB, "GB") if most >= _GB else (_MB, "MB")
    lines = []
    for row in range(height, 0, -1):
        low, step = most * (row - 1) / height, most / height
        cells = "".join(_cell((top - low) / step, plain) for top in tops)
        label = f"{most * row / height / unit:6.2f} " if row in (height, height // 2) else " " * (axis - 1)
        lines.append(f"{label}|{cells}")
    lines.append(f"{0:6.2f} +{'-' * columns}")
    lines.append(f"{name:>6}  {''.join(_SIGNS[part] for part in parts)}")
    lines.append(f"{'':8}{LEGEND}")
    return Picture(tuple(line.rstrip() for line in lines))


def _cell(filled: float, plain: bool) -> str:
    if plain:
        return "#" if filled >= 0.5 else " "
    return _EIGHTHS[round(min(max(filled, 0.0), 1.0) * 8)]
