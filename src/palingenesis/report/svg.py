"""SVG elements as escaped markup.

Drawings stretch to the width of the page while their text keeps its size: positions along x are per
cents of the drawing, positions along y are pixels, and curves sit in a nested drawing of their own that
is stretched (``stretched``). No element has a style attribute, so the page's content policy can forbid
them.
"""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape

from palingenesis.report.thin import Stroke

UNITS = 1000
"""Width of a stretched drawing in its own units."""


def element(kind: str, *inside: str | Markup, **attributes: object) -> Markup:
    """``<kind …>inside</kind>``; an attribute whose value is None is left out.

    ``class_`` and the like lose their underscore, other underscores become hyphens.
    """
    written = Markup("").join(
        Markup(' {}="{}"').format(Markup(name.rstrip("_").replace("_", "-")), value)
        for name, value in attributes.items()
        if value is not None
    )
    content = Markup("").join(inside)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(kind), written, content)


def percent(fraction: float) -> str:
    """A place along x."""
    return f"{round(fraction * 100, 2):g}%"


def stretched(height: float, *inside: Markup, y: float = 0) -> Markup:
    """A drawing of ``UNITS`` by ``height`` units, drawn over the full width."""
    return element(
        "svg",
        *inside,
        x="0",
        y=y,
        width="100%",
        height=height,
        viewBox=f"0 0 {UNITS} {height:g}",
        preserveAspectRatio="none",
        class_="stretched",
    )


def picture(
    key: str, title: str, description: str, height: float, *inside: Markup, class_: str, **data: object
) -> Markup:
    """A drawing that says what it is to those who do not see it; ``data_…`` is for the page's script."""
    return element(
        "svg",
        element("title", title, id=f"{key}-title"),
        element("desc", description, id=f"{key}-desc"),
        *inside,
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
        width="100%",
        height=f"{height:g}",
        class_=class_,
        **data,
    )


def line_path(strokes: Iterable[Stroke], width: float = UNITS) -> str:
    """Strokes whose coordinates are fractions of the width and units of the height, as path data."""
    parts = []
    for stroke in strokes:
        points = [f"{round(x * width, 1):g} {round(y, 1):g}" for x, y in zip(stroke.x, stroke.y, strict=True)]
        # A point on its own becomes a line of no length, which a round cap shows as a dot.
        parts.append("M" + "L".join(points if len(points) > 1 else points * 2))
    return "".join(parts)


def area_path(upper: Stroke, lower: Stroke, width: float = UNITS) -> str:
    """The area between two strokes."""
    there = [(x, y) for x, y in zip(upper.x, upper.y, strict=True)]
    back = [(x, y) for x, y in zip(lower.x[::-1], lower.y[::-1], strict=True)]
    return "M" + "L".join(f"{round(x * width, 1):g} {round(y, 1):g}" for x, y in there + back) + "Z"


def text(x: str, y: float, words: str, anchor: str = "start", class_: str | None = None) -> Markup:
    """A line of text."""
    return element("text", words, x=x, y=f"{y:g}", text_anchor=anchor, class_=class_)


def hover(words: str) -> Markup:
    """What the pointer, and a screen reader, say of the element around it."""
    return element("title", escape(words))
