"""Long series and big tables made small without losing an extreme.

A curve keeps the lowest and the highest value of every column of pixels; a table of checks keeps the
most extreme cell of every bin. Nothing is averaged: an average is how a one-step spike disappears. Where
medians are drawn, they are drawn on the extremes and not instead of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Stroke:
    """Points to be joined by one line."""

    x: Floats
    y: Floats


def strokes(x: Floats, y: Floats, columns: int, start: float, end: float) -> list[Stroke]:
    """The finite points of a series as unbroken strokes, at most two points a column.

    A stroke ends where a value is missing, unless the values on both sides fall into one column. A
    series that is short enough is kept as it is.
    """
    finite = np.isfinite(y)
    if not finite.any():
        return []
    keep = np.flatnonzero(finite)
    if len(keep) > 2 * columns:
        keep = _extremes(keep, x, y, columns, start, end)
    # Two neighbours are joined when nothing missing lies between them in the series.
    missing_before = np.cumsum(~finite)[keep]
    breaks = np.flatnonzero(np.diff(missing_before) > 0) + 1
    same_column = _column(x[keep[breaks]], columns, start, end) == _column(
        x[keep[breaks - 1]], columns, start, end
    )
    if len(x) > 2 * columns:
        breaks = breaks[~same_column]
    return [Stroke(x[part], y[part]) for part in np.split(keep, breaks)]


def _extremes(keep: Ints, x: Floats, y: Floats, columns: int, start: float, end: float) -> Ints:
    column = _column(x[keep], columns, start, end)
    edges = np.flatnonzero(np.diff(column)) + 1
    kept: list[int] = []
    for part in np.split(keep, edges):
        values = y[part]
        kept.extend(sorted({int(part[values.argmin()]), int(part[values.argmax()])}))
    return np.asarray(kept, dtype=np.int64)


def _column(x: Floats, columns: int, start: float, end: float) -> Ints:
    width = (end - start) or 1.0
    return np.clip(((x - start) / width * columns).astype(np.int64), 0, columns - 1)


def medians(x: Floats, y: Floats, most: int) -> tuple[Floats, Floats]:
    """A finite series as medians of at most ``most`` parts of neighbouring values, equal in size."""
    size = max(1, -(-len(y) // most))
    edges = np.arange(0, len(y), size)
    middles = [(float(np.median(x[i : i + size])), float(np.median(y[i : i + size]))) for i in edges]
    both = np.array(middles, dtype=np.float64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def stretches(x: Floats, mask: Bools, least_gap: float) -> list[tuple[int, int, int]]:
    """Where a mask is true, as (first, last, how many) of runs; runs nearer than ``least_gap`` are one."""
    where = np.flatnonzero(mask)
    if not len(where):
        return []
    apart = (np.diff(where) > 1) & (np.diff(x[where]) > least_gap)
    parts = np.split(where, np.flatnonzero(apart) + 1)
    return [(int(part[0]), int(part[-1]), len(part)) for part in parts]


def bin_edges(n: int, most: int) -> Ints:
    """Edges that part ``n`` things into at most ``most`` bins whose sizes differ by one at most."""
    return np.linspace(0, n, min(n, most) + 1).round().astype(np.int64)


def most_extreme(codes: NDArray[np.uint8], score: Floats, edges: Ints) -> tuple[NDArray[np.uint8], Floats]:
    """Of every bin along the first axis, the code with the highest score, and that score."""
    if len(edges) - 1 == len(codes):
        return codes, score
    kept_codes, kept_scores = [], []
    for first, last in pairwise(edges):
        where = score[first:last].argmax(axis=0)[None, :]
        kept_codes.append(np.take_along_axis(codes[first:last], where, axis=0)[0])
        kept_scores.append(np.take_along_axis(score[first:last], where, axis=0)[0])
    return np.stack(kept_codes), np.stack(kept_scores)
