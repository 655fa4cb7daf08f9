"""The colours of the heat map.

Departures run from blue (below the baseline) to orange (above): a pair that the common kinds of colour
blindness keep apart, equally strong at equal distance. What is no departure has a look of its own:
pale for "no baseline yet", the colour of the page for "not watched", grey for absent, the colour of ink
for exactly zero, magenta for non-finite. There is one set for a light page and one for a dark one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from palingenesis.report.history import History
from palingenesis.report.png import Colour

LIMIT = 2.0
"""Decades from the baseline at which the scale is saturated."""
LEVELS = 41
"""Levels of the scale, the middle one for "at its baseline": a tenth of a decade each."""

UNWATCHED, NO_BASELINE, ABSENT, ZERO, NONFINITE = range(LEVELS, LEVELS + 5)

# Scores decide what a bin of several checks shows; departures stay below them.
_SCORES = {UNWATCHED: -2.0, NO_BASELINE: -1.0, ABSENT: 1e4, ZERO: 2e4, NONFINITE: 3e4}
_MOST_DECADES = 1e3


@dataclass(frozen=True)
class Theme:
    """The colours of one kind of page."""

    ramp: tuple[Colour, ...]
    """Evenly spaced from far below to far above."""
    special: tuple[Colour, Colour, Colour, Colour, Colour]
    """Not watched, no baseline yet, absent, exactly zero, non-finite."""

    @property
    def colours(self) -> list[Colour]:
        """The whole palette, in the order of the codes."""
        return [_between(self.ramp, level / (LEVELS - 1)) for level in range(LEVELS)] + list(self.special)


LIGHT = Theme(
    ramp=((8, 64, 129), (67, 137, 196), (244, 244, 241), (230, 138, 52), (148, 58, 0)),
    special=((250, 250, 247), (222, 225, 233), (152, 159, 171), (17, 20, 24), (214, 0, 132)),
)
DARK = Theme(
    ramp=((140, 200, 255), (52, 116, 180), (30, 33, 39), (176, 94, 24), (255, 180, 92)),
    special=((20, 22, 26), (52, 56, 66), (106, 113, 125), (244, 246, 248), (255, 84, 178)),
)


def codes_and_scores(history: History) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """The palette code of every cell, ``[checks, layers]``, and how extreme it is."""
    departure, norms = history.departure, history.norms
    known = np.isfinite(departure)
    clipped = np.clip(np.where(known, departure, 0.0), -LIMIT, LIMIT)
    codes = np.round((clipped + LIMIT) / (2 * LIMIT) * (LEVELS - 1)).astype(np.uint8)
    score = np.minimum(np.abs(np.where(known, departure, 0.0)), _MOST_DECADES)
    for mask, code in (
        (~known, NO_BASELINE),
        (norms.unwatched, UNWATCHED),
        (norms.absent, ABSENT),
        (norms.zero, ZERO),
        (norms.nonfinite, NONFINITE),
    ):
        codes[mask] = code
        score[mask] = _SCORES[code]
    return codes, score


def _between(ramp: tuple[Colour, ...], at: float) -> Colour:
    place = at * (len(ramp) - 1)
    index = min(int(place), len(ramp) - 2)
    low, high = list(pairwise(ramp))[index]
    share = place - index
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return red, green, blue
