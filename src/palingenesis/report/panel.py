"""What a chart is made of before it is drawn: lines, levels that mean something, the range of many layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from palingenesis.record.columns import Floats
from palingenesis.runlogs.table import EMPTY, Column

#: Classes of the looks of lines, in the order in which they are given out; report.css has their colours.
LOOKS = ("one", "two", "three", "four", "five", "six")
#: A panel with more lines than looks would repeat them; further sources are named in a note.
MOST_LINES = len(LOOKS)


@dataclass(frozen=True)
class Line:
    """One signal of a chart."""

    label: str
    column: Column
    look: str
    error: Column = EMPTY
    """Standard errors, at steps of the column; drawn as an interval of 95%."""
    bounds_only: bool = False
    """The values are lower bounds of something that could not be estimated: marks that point upwards."""
    dots: bool = False
    """Few values, each of which is to be seen."""
    smoothed: bool = False
    """Noisy: drawn thin, with medians of neighbouring values on it."""


@dataclass(frozen=True)
class Bound:
    """A level that means something."""

    value: float
    label: str
    limit: bool = False
    """Beyond it something is wrong."""
    always: bool = False
    """The axis is made to hold it, however far off it lies."""


@dataclass(frozen=True)
class Spread:
    """Where many layers lie at each step: the lowest, the middle half, the highest."""

    step: Floats
    low: Floats
    first: Floats
    middle: Floats
    third: Floats
    high: Floats


@dataclass(frozen=True)
class Panel:
    """One chart."""

    key: str
    title: str
    about: str
    """How it is read, in a sentence or two."""
    lines: tuple[Line, ...]
    bounds: tuple[Bound, ...] = ()
    from_zero: bool = False
    linear: bool = False
    """Never on a logarithmic axis: zero and below are values like others."""
    notes: tuple[str, ...] = ()
    spread: Spread | None = None
    axis: str = "step"
    """What the axis counts."""
    claims: frozenset[str] = field(default_factory=frozenset)
    """Names that are told by this panel, and not once more among the others."""
