"""Pieces of a log read many lines at a time, where lines repeat; what is new is left to the format.

A skeleton that was seen a few times is learnt (``templates.py``). From then on the numbers of all its lines
are read together.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import lru_cache

import numpy as np

from palingenesis.record.columns import Bools, Floats, Ints
from palingenesis.runlogs import names
from palingenesis.runlogs.assemble import PART_BITS
from palingenesis.runlogs.cells import Cells
from palingenesis.runlogs.digits import Bytes, equal, parse, pieces
from palingenesis.runlogs.skeletons import Skeletons, take_apart
from palingenesis.runlogs.templates import Read, Stamp, Template, learn

#: Times a skeleton is seen before it is learnt.
_SEEN = 4
#: Skeletons that are counted, and learnt, at most; a log with more is not of a kind.
_MOST_COUNTED, _MOST_LEARNT = 20000, 400
#: Numbers and bytes that are tried in learning: the time for it is bounded by that of reading.
_LONGEST = 4096
#: Bytes that the arrays of one piece take together, about.
_HELD = 24 << 20
#: Days of the months, from January at 1.
_MONTHS = np.array([31, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])
_EPOCH = datetime(1970, 1, 1)


class Taken:
    """What was read of a piece.

    Attributes:
        left: lines that have to be read one by one.
        rows: lines that begin a row, of all templates.
        unread: lines that say nothing.
    """

    def __init__(self, left: Ints, rows: Ints, unread: int) -> None:
        self.left, self.rows, self.unread = left, rows, unread


class FastReader:
    """Learns the skeletons of a log, and reads lines that have them.

    Args:
        read: reads a line by its format.
        thousands: the format has commas in numbers.
    """

    def __init__(self, read: Read, *, thousands: bool) -> None:
        self._read, self._thousands = read, thousands
        self._seen: dict[bytes, int] = {}
        self._known: dict[int, list[tuple[Bytes, Template]]] = {}
        self._learnt = 0
        # glibc keeps freed memory at hand for requests up to the largest block that was freed before. Without
        # this each array of a piece would be given back, and its pages be cleared again: 40% of all the time.
        np.empty(_HELD, dtype=np.uint8)

    def take_apart(self, data: bytes) -> Skeletons:
        """A piece of whole lines."""
        return take_apart(data, thousands=self._thousands)

    @property
    def learnt(self) -> int:
        """How many skeletons are known."""
        return self._learnt

    def take(self, piece: Skeletons, among: Ints, first_line: int, cells: Cells) -> Taken:
        """Read what is known.

        Args:
            piece: whole lines.
            among: lines to be read.
            first_line: number of the piece's first line.
            cells: where values go.
        """
        left = np.zeros(len(piece.start), dtype=np.bool_)
        left[among] = True
        rows: list[Ints] = []
        unread = 0
        sizes = piece.bone_end - piece.bone_start
        for size in self._known.keys() & set(np.flatnonzero(np.bincount(sizes[among])).tolist()):
            for bone, template in self._known[size]:
                lines = np.flatnonzero((sizes == size) & left)
                lines = lines[piece.with_bone(lines, bone)]
                done = _read_lines(piece, lines, template, first_line, cells) if len(lines) else lines
                left[done] = False
                if template.is_row and not template.goes_on:
                    rows.append(done)
                unread += 0 if template.is_row else len(done)
        every = np.sort(np.concatenate(rows)) if rows else np.empty(0, dtype=np.int64)
        return Taken(np.flatnonzero(left), every, unread)

    def see(self, piece: Skeletons, line: int) -> None:
        """A line was read by itself; one like it may come again."""
        if self._learnt >= _MOST_LEARNT or piece.end[line] - piece.start[line] > _LONGEST:
            return
        bone = piece.bone(line)
        count = self._seen.get(bone, 0) + 1
        if count == 1 and len(self._seen) >= _MOST_COUNTED:
            self._seen.clear()
        self._seen[bone] = count
        if count != _SEEN:
            return
        begin, first = int(piece.start[line]), int(piece.first_run[line])
        last = int(np.searchsorted(piece.run_start, piece.end[line]))
        spans = [
            (int(piece.run_start[run]) - begin, int(piece.run_end[run]) - begin) for run in range(first, last)
        ]
        template = learn(piece.text(line), spans, self._read)
        if template is not None:
            self._learnt += 1
            self._known.setdefault(len(bone), []).append((np.frombuffer(bone, dtype=np.uint8), template))


def _read_lines(piece: Skeletons, lines: Ints, template: Template, first_line: int, cells: Cells) -> Ints:
    """Read lines of one template; those that turn out to be otherwise are left."""
    first = piece.first_run[lines]
    good = np.ones(len(lines), dtype=np.bool_)
    for run, written in template.fixed.items():
        good &= _is(piece, first + run, written)
    if not good.all():
        lines, first = lines[good], first[good]
        good = np.ones(len(lines), dtype=np.bool_)
    read: dict[int, Floats] = {}
    for run in dict.fromkeys(value.run for value in template.values):
        read[run], bad = _numbers(piece, first + run)
        good &= ~bad
    times = None
    if template.stamp is not None:
        times, bad = _times(piece, first, template.stamp)
        good &= ~bad
    keys = ((lines[good] + first_line) << PART_BITS) | 1
    add = cells.add_continued_block if template.goes_on else cells.add_block
    for value in template.values:
        add(value.name, keys, read[value.run][good] * value.factor)
    for name, constant in template.constant.items():
        add(name, keys, np.full(len(keys), constant))
    if times is not None:
        add(names.TIME, keys, times[good])
    return lines[good]


def _numbers(piece: Skeletons, runs: Ints) -> tuple[Floats, Bools]:
    return parse(piece.data, piece.run_start[runs], piece.run_end[runs])


def _is(piece: Skeletons, runs: Ints, written: bytes) -> Bools:
    """Which numbers are written so."""
    start = piece.run_start[runs]
    same = piece.run_end[runs] - start == len(written)
    same[same] = equal(pieces(piece.data, start[same], len(written)), written)
    return np.asarray(same)


def _times(piece: Skeletons, first: Ints, stamp: Stamp) -> tuple[Floats, Bools]:
    """Seconds since 1970; a time is of this machine's zone."""
    bad = np.zeros(len(first), dtype=np.bool_)
    parts = []
    for run in stamp.parts:
        numbers, wrong = _numbers(piece, first + run)
        parts.append(numbers)
        bad |= wrong
    year, month, day, hour, minute, second = parts
    if stamp.grouped:
        second = second / 1000
    elif stamp.fraction is not None:
        runs = first + stamp.fraction
        fraction, wrong = _numbers(piece, runs)
        bad |= wrong
        second = second + fraction / 10.0 ** (piece.run_end[runs] - piece.run_start[runs])
    bad |= ~((month >= 1) & (month <= 12) & (day >= 1) & (year >= 1970) & (year < 2200))
    leap = ((year % 4 == 0) & (year % 100 != 0)) | (year % 400 == 0)
    longest = _MONTHS[np.where(bad, 0, month).astype(np.int64)] + ((month == 2) & leap)
    bad |= (day > longest) | (hour > 23) | (minute > 59) | (second >= 60)
    year, month, day, hour, minute, second = (
        np.where(bad, 1.0, part) for part in (year, month, day, hour, minute, second)
    )
    hours = (_days(year, month, day) * 24 + hour).astype(np.int64)
    new = np.concatenate([[True], np.diff(hours) != 0])
    local = np.array([_hour_of_this_zone(hour) for hour in hours[new].tolist()])[np.cumsum(new) - 1]
    bad |= np.isnan(local)
    return local + minute * 60 + second, bad


def _days(year: Floats, month: Floats, day: Floats) -> Floats:
    """Days since 1970 in the Gregorian calendar, counted in years that begin in March."""
    year = year - (month <= 2)
    era = np.floor(year / 400)
    of_era = year - era * 400
    of_year = np.floor((153 * (month + np.where(month > 2, -3, 9)) + 2) / 5) + day - 1
    return np.asarray(era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468)


@lru_cache(maxsize=4096)
def _hour_of_this_zone(hours: int) -> float:
    try:
        return (_EPOCH + timedelta(hours=hours)).timestamp()
    except (ValueError, OverflowError, OSError):  # beyond what the clock knows
        return float("nan")
