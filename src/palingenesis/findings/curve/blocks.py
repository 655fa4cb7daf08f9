"""A curve in about a hundred medians, fine at its beginning, each with what it may be off by."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from palingenesis.findings.curve.noise import MAD_TO_STD, MEDIAN_VARIANCE
from palingenesis.record.columns import Bools, Floats, Ints

#: Blocks that a long curve is made of, besides the small ones at its beginning.
BLOCKS = 96
#: Rows from which the small ones begin.
_FIRST = 4


class Blocks(NamedTuple):
    """Medians of parts of a curve."""

    first: Ints
    """The first row of each, among the rows that were used."""
    start: Floats
    """The step of that row."""
    step: Floats
    """The mean step of each."""
    value: Floats
    error: Floats
    """Standard error of each value, with what neighbours have in common."""
    rows: Ints
    """How many losses each is of."""

    def __bool__(self) -> bool:
        return len(self.value) > 0

    def part(self, count: int) -> Blocks:
        """The first ones."""
        return Blocks(
            self.first[:count],
            self.start[:count],
            self.step[:count],
            self.value[:count],
            self.error[:count],
            self.rows[:count],
        )

    @property
    def fall(self) -> float:
        """From the first to the lowest."""
        return float(self.value[0] - self.value.min())


def blocks_of(step: Floats, loss: Floats, use: Bools) -> Blocks:
    """The blocks of a curve, of those rows that ``use`` says: without spikes."""
    rows = np.flatnonzero(use)
    if not len(rows):
        return Blocks(rows, step[rows], step[rows], loss[rows], loss[rows], rows)
    step, loss = step[rows], loss[rows]
    edges = _edges(len(loss))
    sizes = np.diff(edges)
    value = np.array([np.median(loss[a:b]) for a, b in itertools.pairwise(edges)])
    at = np.array([np.mean(step[a:b]) for a, b in itertools.pairwise(edges)])
    error = _errors(loss, value, edges)
    return Blocks(rows[edges[:-1]], step[edges[:-1]], at, value, error * _in_common(value, error), sizes)


def _edges(count: int) -> Ints:
    size = max(1, count // BLOCKS)
    if size <= _FIRST:
        return np.append(np.arange(0, count - size + 1, size), count)
    small = np.geomspace(_FIRST, size, 2 + int(2 * math.log2(size / _FIRST))).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(small)])
    rest = np.arange(starts[-1], count - size + 1, size)
    return np.unique(np.concatenate([starts[:-1], rest, [count]]))


def _errors(loss: Floats, value: Floats, edges: Ints) -> Floats:
    """Of each median, by the scatter of single losses from one to the next but one around it."""
    apart = np.abs(np.diff(loss))
    if len(apart) < 2:
        return np.full(len(value), np.nan)
    # Differences of neighbours: a curve's own fall within a block is no noise.
    single = np.array([np.median(apart[max(a - 8, 0) : b + 8]) for a, b in itertools.pairwise(edges)])
    single = MAD_TO_STD * single / math.sqrt(2)
    floor = np.median(single) / 10 if np.median(single) > 0 else 1e-12 + 1e-9 * float(np.abs(value).max())
    sizes = np.diff(edges)
    spread = np.maximum(single, floor) * np.sqrt(np.where(sizes > 2, MEDIAN_VARIANCE, 1.0) / sizes)
    return np.asarray(spread, dtype=np.float64)


def _in_common(value: Floats, error: Floats) -> float:
    """How much more blocks scatter than their errors say: noise that remembers, and skewed noise."""
    if len(value) < 5:
        return 1.0
    bent = value[2:] - 2 * value[1:-1] + value[:-2]
    expected = np.hypot(np.hypot(error[2:], 2 * error[1:-1]), error[:-2])
    # The steep beginning bends by itself.
    late = len(bent) // 3
    ratio = float(MAD_TO_STD * np.median(np.abs(bent / expected)[late:]))
    return max(1.0, ratio)
