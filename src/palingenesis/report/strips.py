"""Strips under a curve: where its value was absent, exactly zero or not finite.

A logarithmic axis has no place for such values. A gap in the curve would not say which of them it was,
so each gets a strip of its own, at its true steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from palingenesis.report.svg import element, hover, percent
from palingenesis.report.thin import Bools, Floats, stretches
from palingenesis.report.words import count, step_number

HEIGHT = 8
_GAP = 4
_COLUMNS = 400


@dataclass(frozen=True)
class Strip:
    """One kind of missing value."""

    kind: str
    """The class that gives it its look: ``absent``, ``zero`` or ``nonfinite``."""
    label: str
    mask: Bools


def strips_height(strips: list[Strip]) -> int:
    """How much room the strips need."""
    return sum(HEIGHT + _GAP for strip in strips if strip.mask.any())


def draw_strips(strips: list[Strip], steps: Floats, start: float, end: float, top: float) -> Markup:
    """The strips that have something to show, one below the other."""
    parts: list[Markup] = []
    width = (end - start) or 1.0
    y = top + _GAP
    for strip in strips:
        if not strip.mask.any():
            continue
        parts.append(element("rect", x="0", y=f"{y:g}", width="100%", height=HEIGHT, class_="rail"))
        for first, last, values in stretches(steps, strip.mask, width / _COLUMNS):
            # One value has no length on the axis; it gets the least that can be seen.
            long = max(1 / _COLUMNS, (steps[last] - steps[first]) / width)
            parts.append(
                element(
                    "rect",
                    hover(f"{strip.label}: {_span(steps[first], steps[last])}, {count(values, 'value')}"),
                    x=percent(min((steps[first] - start) / width, 1 - long)),
                    y=f"{y:g}",
                    width=percent(long),
                    height=HEIGHT,
                    class_=f"strip {strip.kind}",
                )
            )
        y += HEIGHT + _GAP
    return Markup("").join(parts)


def describe_strips(strips: list[Strip], steps: Floats) -> str:
    """The same in words."""
    told = []
    for strip in strips:
        where = steps[strip.mask]
        if len(where):
            told.append(f"{strip.label} {count(len(where), 'time')}, {_span(where.min(), where.max())}.")
    return " ".join(told)


def _span(first: float, last: float) -> str:
    if first == last:
        return f"step {step_number(first)}"
    return f"steps {step_number(first)} to {step_number(last)}"


def legend_of(strips: list[Strip]) -> list[tuple[str, str]]:
    """Class and label of the strips shown."""
    return [(strip.kind, strip.label) for strip in strips if strip.mask.any()]
