"""Many decimal numbers at once, from bytes to doubles, each rounded as ``float`` rounds it.

Numbers of one shape (digits, point and exponent at the same places) are products of a matrix of digits. Up to
15 digits and ten to the 22nd, both factors are exact doubles and so the result is the nearest one (Clinger
1990); others are left to ``float``.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from palingenesis.record.columns import Bools, Floats, Ints

Bytes = NDArray[np.uint8]

#: Numbers with more characters are left to the reader of single lines.
WIDEST = 40
_EXACT_DIGITS = 15
_EXACT_POWER = 22
_SHAPE = re.compile(rb"(0{1,3}(?:,000)*|0*)(?:(\.)(0*))?(?:[eE]([-+]?)(0{1,3}))?")
_ZERO = 48
_POWERS = 10.0 ** np.arange(_EXACT_POWER + 1)


def pieces(data: Bytes, start: Ints, size: int) -> Bytes:
    """``size`` bytes from each of these places on, a row each."""
    # Windows over the same memory: numpy then copies a piece at a time, and not a byte.
    windows = np.ndarray((len(data) - size + 1,), dtype=f"V{size}", buffer=data, strides=(1,))
    return windows[start].view(np.uint8).reshape(-1, size)


def equal(rows: Bytes, row: bytes) -> Bools:
    """Which rows are this one."""
    return np.asarray(np.ascontiguousarray(rows).view(f"S{rows.shape[1]}")[:, 0] == row)


def parse(data: Bytes, start: Ints, end: Ints) -> tuple[Floats, Bools]:
    """The numbers between places of ``data``, and which of them are none after all."""
    values = np.zeros(len(start))
    bad = np.zeros(len(start), dtype=np.bool_)
    width = end - start
    bad[width > WIDEST] = True
    counts = np.bincount(np.minimum(width, WIDEST + 1), minlength=WIDEST + 2)
    for size in np.flatnonzero(counts[: WIDEST + 1]).tolist():
        which = np.flatnonzero(width == size) if counts[size] < len(start) else np.arange(len(start))
        _parse_width(pieces(data, start[which], size), which, values, bad)
    return values, bad


def _parse_width(chars: Bytes, which: Ints, values: Floats, bad: Bools) -> None:
    """Numbers of one width, shape by shape."""
    digits = chars - np.uint8(_ZERO)
    # A shape has a 0 for every digit.
    shapes = chars - np.minimum(digits, 10) * (digits < 10)
    while len(which):
        shape = shapes[0].tobytes()
        same = equal(shapes, shape)
        if same.all():
            values[which], bad[which] = _parse_shape(chars, shape)
            return
        values[which[same]], bad[which[same]] = _parse_shape(chars[same], shape)
        rest = np.flatnonzero(~same)
        chars, shapes, which = chars[rest], shapes[rest], which[rest]


def _parse_shape(chars: Bytes, shape: bytes) -> tuple[Floats, bool]:
    found = _SHAPE.fullmatch(shape)
    if found is None or not (found[1] or found[3]):
        return np.zeros(len(chars)), True
    whole, fraction, exponent = found.span(1), found.span(3), found.span(5)
    places = [place for place in range(*whole) if shape[place] == _ZERO]
    decimals = fraction[1] - fraction[0]
    places += range(*fraction)
    if len(places) > _EXACT_DIGITS:
        return _one_by_one(chars), False
    digits = chars.astype(np.float64) - _ZERO
    mantissa = digits[:, places] @ _POWERS[: len(places)][::-1]
    if exponent[0] < 0:
        return mantissa / _POWERS[decimals] if decimals else mantissa, False
    power = digits[:, range(*exponent)] @ _POWERS[: exponent[1] - exponent[0]][::-1]
    if found[4] == b"-":
        power = -power
    power -= decimals
    if np.any(np.abs(power) > _EXACT_POWER):
        return _one_by_one(chars), False
    scale = _POWERS[np.abs(power).astype(np.int64)]
    return np.where(power < 0, mantissa / scale, mantissa * scale), False


def _one_by_one(chars: Bytes) -> Floats:
    texts = chars.tobytes()
    size = chars.shape[1]
    plain = texts.replace(b",", b"") if b"," in texts else texts
    if len(plain) != len(texts):
        return np.array([float(row.tobytes().replace(b",", b"")) for row in chars])
    return np.array([float(texts[place : place + size]) for place in range(0, len(texts), size)])
