"""What a format of lines is, and the pairs of name and number that most lines are made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from palingenesis.runlogs.names import metric_name
from palingenesis.runlogs.spelling import NUMBER, number
from palingenesis.runlogs.table import LossKind


class Parsed(NamedTuple):
    """What one line says."""

    values: dict[str, float]
    """By name of the column (:mod:`palingenesis.runlogs.names`)."""
    ended: bool = False
    """The line is written when training has ended."""
    goes_on: bool = False
    """The line belongs to the row that an earlier one began."""


@dataclass(frozen=True)
class LineFormat:
    """One format."""

    id: str
    parse: Callable[[str], Parsed | None]
    """A line without colours, to what it says; nothing where it is not of this format."""
    marks: tuple[str, ...] = ()
    """Every line of the format has one of these in it: a first, cheap test. None: every line is tried."""
    loss_kind: LossKind = "unknown"
    thousands: bool = False
    """Numbers may have commas in them."""
    whole: bool = False
    """Lines of the format say nothing of themselves, so nearly all lines of the log have to be of it."""
    cannot_show: tuple[str, ...] = ()
    """A sentence each."""
    broad: bool = False
    """Takes lines of many programs, and stands back where a narrower format fits."""

    def read(self, text: str) -> Parsed | None:
        """What a line says, if it is of this format and has a number."""
        if self.marks and not any(mark in text for mark in self.marks):
            return None
        parsed = self.parse(text)
        return parsed if parsed is not None and (parsed.values or parsed.ended) else None


ROUNDED = "The loss is rounded as it is written."

_UNIT = r"(?P<unit>GiB|GB|MiB|MB|ms|s|%|[KMBGT])?(?![A-Za-z0-9_])"
#: ``loss=1.23``, ``lr: 2e-05``: names are single words. Bounded, so that no line takes more than linear time.
WORD_PAIR = re.compile(
    rf"(?P<key>[A-Za-z][\w./()-]{{0,80}})\s{{0,4}}[:=]\s{{0,12}}(?P<value>{NUMBER}){_UNIT}"
)
#: ``lm loss: 1.085E+01``, a whole cell between bars: names may have blanks in them.
_CELL = re.compile(rf"\s*(?P<key>[A-Za-z][^:=|]{{0,80}}?)\s*[:=]\s*(?P<value>{NUMBER}){_UNIT}")

_SECONDS = {"ms": 1e-3, "s": 1.0}
_GIGABYTES = {"GiB": 2**30 / 1e9, "GB": 1.0, "MiB": 2**20 / 1e9, "MB": 1e-3}
_COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_PERCENT = 0.01


def scaled(name: str, value: float, unit: str | None) -> float:
    """A value in the unit of its column: seconds, 10^9 bytes, a share."""
    if unit is None:
        return value
    if unit in _SECONDS:
        return value * _SECONDS[unit]
    if unit in _GIGABYTES:
        return value * _GIGABYTES[unit]
    if unit == "%":
        return value * _PERCENT if name == "train/mfu" else value
    return value * _COUNTS[unit]


def pairs(found: Iterable[re.Match[str]], named: Mapping[str, str] | None = None) -> dict[str, float]:
    """The numbers of matches of key, value and unit; the first of two with one name counts.

    Args:
        found: the matches.
        named: columns of keys that a format calls by names of its own.
    """
    row: dict[str, float] = {}
    for match in found:
        value = number(match["value"])
        if value is not None:
            name = (named or {}).get(match["key"]) or metric_name(match["key"])
            row.setdefault(name, scaled(name, value, match["unit"]))
    return row


def word_pairs(text: str, start: int = 0) -> dict[str, float]:
    """Numbers behind single words, from ``start`` on."""
    return pairs(WORD_PAIR.finditer(text, start))


def cell_pairs(text: str, named: Mapping[str, str] | None = None) -> dict[str, float]:
    """Numbers of cells between ``|``."""
    return pairs((match for cell in text.split("|") if (match := _CELL.match(cell))), named)
