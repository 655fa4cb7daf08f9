"""Lines without their numbers: where the numbers of many lines are, and which lines are otherwise the same.

The skeleton of a line has a ``0`` for every number and one blank for several; so most lines of a log share a
few.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from palingenesis.record.columns import Bools, Ints
from palingenesis.runlogs.digits import Bytes, equal, pieces

_LINE, _BLANK, _ZERO, _POINT, _COMMA = 10, 32, 48, 46, 44
_THOUSAND = 3


@dataclass(frozen=True)
class Skeletons:
    """A piece of a log, whole lines, taken apart.

    Attributes:
        data: the bytes.
        start: of every line.
        end: of every line, where its line break is.
        run_start: of every number.
        run_end: of every number.
        bones: the skeletons of all lines, with line breaks.
        bone_start: of every line's skeleton.
        bone_end: of every line's skeleton.
    """

    data: Bytes
    start: Ints
    end: Ints
    run_start: Ints
    run_end: Ints
    bones: Bytes
    bone_start: Ints
    bone_end: Ints

    @cached_property
    def first_run(self) -> Ints:
        """For every line, how many numbers come before it in the piece."""
        return np.searchsorted(self.run_start, self.start)

    def text(self, line: int) -> bytes:
        """A line as it is."""
        return self.data[self.start[line] : self.end[line]].tobytes()

    def bone(self, line: int) -> bytes:
        """A line's skeleton."""
        return self.bones[self.bone_start[line] : self.bone_end[line]].tobytes()

    def with_bone(self, lines: Ints, bone: Bytes) -> Bools:
        """Which of these lines, all with a skeleton of its length, have this one."""
        size = len(bone)
        begins = self.bone_start[lines]
        if len(lines) and begins[-1] - begins[0] == (len(lines) - 1) * (size + 1):
            # They follow each other, so they are a matrix already.
            block = self.bones[begins[0] : begins[-1] + size + 1]
            return np.asarray(np.all(block.reshape(len(lines), size + 1)[:, :-1] == bone, axis=1))
        return equal(pieces(self.bones, begins, size), bone.tobytes())


def take_apart(data: bytes, *, thousands: bool) -> Skeletons:
    """Take whole lines apart.

    Args:
        data: ends with a line break.
        thousands: a comma before three digits belongs to the number.
    """
    chars = np.frombuffer(data, dtype=np.uint8)
    number = _numbers(chars, thousands=thousands)
    before = np.empty_like(number)
    before[0] = False
    before[1:] = number[:-1]
    # Numbers begin and end by turns; the line break behind the last one ends it.
    edges = np.flatnonzero(number != before)
    run_start, run_end = np.ascontiguousarray(edges[::2]), np.ascontiguousarray(edges[1::2])
    blank = chars == _BLANK
    drop = number & before
    drop[1:] |= blank[1:] & blank[:-1]
    bones = chars.copy()
    bones[run_start] = _ZERO
    bones = bones[drop < True]  # "not", in the form that numpy does many bytes at a time
    end = np.flatnonzero(chars == _LINE)
    start = np.concatenate([[0], end[:-1] + 1])
    bone_end = np.flatnonzero(bones == _LINE)
    bone_start = np.concatenate([[0], bone_end[:-1] + 1])
    return Skeletons(chars, start, end, run_start, run_end, bones, bone_start, bone_end)


def _numbers(chars: Bytes, *, thousands: bool) -> Bools:
    """Which bytes belong to a number: digits, a point beside one, an exponent behind. Signs do not."""
    # One byte around, so that every byte has neighbours.
    padded = np.empty(len(chars) + 4, dtype=np.uint8)
    padded[0], padded[-3:] = 0, 0
    padded[1:-3] = chars
    digit = (padded - np.uint8(_ZERO)) < 10
    here, before, behind = digit[1:-3], digit[:-4], digit[2:-2]
    number: Bools = here | ((chars == _POINT) & (before | behind))
    exponent = ((chars | np.uint8(32)) == ord("e")) & before
    if exponent.any():
        sign = (padded == ord("-")) | (padded == ord("+"))
        signed = exponent & sign[2:-2] & digit[3:-1]
        number |= (exponent & behind) | signed
        number[1:] |= signed[:-1]
    if thousands:
        comma = (chars == _COMMA) & before & behind & digit[3:-1]
        places = np.flatnonzero(comma)
        # Three digits, and no fourth.
        places = places[places + _THOUSAND < len(chars)]
        inside = places + 1
        fourth = np.where(inside + 4 < len(padded), digit[np.minimum(inside + 4, len(padded) - 1)], False)
        number[places[digit[inside + 3] & ~fourth]] = True
    return number
