"""What the lines of one skeleton say, learnt from one of them by trying.

Every number of a line is changed in turn, and the line read again by its format. What then changes in what is
read says what the number is: a value, nothing, or a part of a name. So the reader of single lines stays the
only one that knows a format, and whatever it would not read in this way is left to it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from palingenesis.runlogs import names
from palingenesis.runlogs.formats.base import Parsed

#: What a line is read by: nothing for a line that says nothing, ``None`` if it must be read by itself.
Read = Callable[[str], "Parsed | Unfit | None"]

_CHANGED = bytes.maketrans(b"0123456789", b"1234567898")
_STAMP = re.compile(
    rb"(?<!\d)(?:(\d{4})-(\d\d)-(\d\d)|(\d\d)/(\d\d)/(\d{4}))[T ](\d\d):(\d\d):(\d\d)(?:([.,])(\d{1,9}))?"
    rb"(?![\d:]|Z|[+-]\d\d)"
)
#: Units that formats turn values by.
_FACTORS = (1.0, 1e-3, 1e-2, 1e3, 1e6, 1e9, 1e12, 2**30 / 1e9, 2**20 / 1e9)
_MOST_NUMBERS = 60
_PLAIN = re.compile(rb"\d+(?:,\d{3})*(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?")


class Unfit:
    """A line that is not to be learnt from."""


class Value(NamedTuple):
    """A column that a number of the line gives."""

    run: int
    name: str
    factor: float


class Stamp(NamedTuple):
    """Which numbers are a time: year to second, and what comes behind the second where that is one too."""

    parts: tuple[int, int, int, int, int, int]
    fraction: int | None
    grouped: bool
    """The fraction is in the number of the second, behind a comma."""


class Template(NamedTuple):
    """What lines of one skeleton say."""

    runs: int
    """Numbers in a line."""
    values: tuple[Value, ...]
    constant: Mapping[str, float]
    """Values that are not written as numbers: NaN, infinity."""
    fixed: Mapping[int, bytes]
    """Numbers that have to be as they are here."""
    stamp: Stamp | None
    goes_on: bool
    is_row: bool


def learn(line: bytes, spans: list[tuple[int, int]], read: Read) -> Template | None:
    """What lines like this one say.

    Args:
        line: without its line break.
        spans: of its numbers.
        read: reads a line.
    """
    if len(spans) > _MOST_NUMBERS or b"\r" in line[:-1]:
        return None
    parsed = read(_text(line))
    if isinstance(parsed, Unfit) or (parsed is not None and parsed.ended):
        return None
    stamp, stamped = _find_stamp(line, spans)
    values = {} if parsed is None else dict(parsed.values)
    timed = values.pop(names.TIME, None)
    if (timed is not None) != (stamp is not None) and parsed is not None:
        stamp = None
        if timed is not None and stamped:
            return None
        if timed is not None:
            values[names.TIME] = timed  # a number like any other
    found: list[Value] = []
    fixed: dict[int, bytes] = {}
    for run, (start, end) in enumerate(spans):
        if run in stamped and stamp is not None:
            continue
        written = line[start:end]
        changed = written.translate(_CHANGED)
        again = read(_text(line[:start] + changed + line[end:]))
        given = _same_but_for(parsed, again, values, stamp is not None)
        if given is None:
            fixed[run] = written
            continue
        for name, new in given.items():
            factor = _factor(written, values[name], changed, new)
            if factor is None or any(value.name == name for value in found):
                return None
            found.append(Value(run, name, factor))
    constant = {name: value for name, value in values.items() if all(v.name != name for v in found)}
    if any(math.isfinite(value) for value in constant.values()) and not fixed:
        return None  # a number that no change of a number changes: read in a way that is not known here
    goes_on = parsed is not None and parsed.goes_on
    has_stamp = stamp if parsed is not None and not goes_on else None
    return Template(len(spans), tuple(found), constant, fixed, has_stamp, goes_on, parsed is not None)


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").decode("utf-8", "replace")


def _same_but_for(
    parsed: Parsed | None, again: Parsed | Unfit | None, values: Mapping[str, float], stamped: bool
) -> dict[str, float] | None:
    """The values that changed; nothing where the line has become another."""
    if isinstance(again, Unfit):
        return None
    if parsed is None or again is None:
        return {} if parsed is again else None
    now = dict(again.values)
    if stamped:
        now.pop(names.TIME, None)
    if now.keys() != values.keys() or again.ended or again.goes_on != parsed.goes_on:
        return None
    return {name: now[name] for name in now if not _equal(now[name], values[name])}


def _equal(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _factor(written: bytes, value: float, changed: bytes, new: float) -> float | None:
    """What the number is multiplied by, if it is that alone."""
    if _PLAIN.fullmatch(written) is None or _PLAIN.fullmatch(changed) is None:
        return None
    first, second = float(written.replace(b",", b"")), float(changed.replace(b",", b""))
    for factor in _FACTORS:
        for signed in (factor, -factor):
            if first * signed == value and second * signed == new:
                return signed
    return None


def _find_stamp(line: bytes, spans: list[tuple[int, int]]) -> tuple[Stamp | None, frozenset[int]]:
    """The time at the beginning of a line, as numbers of it, and all numbers that are part of one."""
    found = _STAMP.search(line[:80])
    if found is None:
        return None, frozenset()
    american = found[4] is not None
    groups = (6, 4, 5, 7, 8, 9) if american else (1, 2, 3, 7, 8, 9)
    runs = [_run_at(spans, *found.span(group)) for group in groups]
    inside = frozenset(
        run for run, (start, end) in enumerate(spans) if start < found.end() and end > found.start()
    )
    second = _run_at(spans, found.start(9), found.end(11) if found[11] else found.end(9))
    fraction: int | None = None
    if found[10] == b"," and second is None:
        fraction = _run_at(spans, *found.span(11))
        if fraction is None:
            return None, inside
    elif second is not None:
        runs[5] = second
    numbers = [run for run in runs if run is not None]
    if len(numbers) != len(groups):
        return None, inside
    grouped = found[10] == b"," and fraction is None
    year, month, day, hour, minute, last = numbers
    return Stamp((year, month, day, hour, minute, last), fraction, grouped), inside


def _run_at(spans: list[tuple[int, int]], start: int, end: int) -> int | None:
    return spans.index((start, end)) if (start, end) in spans else None
