"""Numbers as logs write them: NaN and infinities in any spelling, thousands separators, units behind."""

from __future__ import annotations

import math
import re
from typing import Any

#: A number, without what stands before or behind it. No group of its own.
NUMBER = (
    r"(?:[-+]?(?:\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
    r"|[-+]?1\.\#(?:QNAN|SNAN|IND|INF)\d*"
    r"|[-+]?(?i:nan(?![a-z])|inf(?:inity)?(?![a-z])))"
)

_TEXT_NAN = re.compile(r"[-+]?(?:nan|nan\(.*\)|1\.#(?:qnan|snan|ind)\d*|#num!|n/a)", re.IGNORECASE)
_TEXT_INF = re.compile(r"([-+]?)(?:inf|infinity|∞|1\.#inf\d*)", re.IGNORECASE)
_SCALES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def number(text: str) -> float | None:
    """The number that a text is, or nothing.

    >>> number("1,234.5"), number("-Inf"), number("1.02K"), number("fast")
    (1234.5, -inf, 1020.0, None)
    """
    text = text.strip().strip("'\"")
    try:
        return float(text) if "_" not in text else None
    except ValueError:
        pass
    if not text:
        return None
    plain = text.replace(",", "")
    if plain != text and re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?:[eE][-+]?\d+)?", text):
        return float(plain)
    if text[-1].lower() in _SCALES and re.fullmatch(r"[-+]?\d[\d,]*\.?\d*", text[:-1]):
        base = number(text[:-1])
        return None if base is None else base * _SCALES[text[-1].lower()]
    if _TEXT_NAN.fullmatch(text):
        return math.nan
    found = _TEXT_INF.fullmatch(text)
    if found:
        return -math.inf if found[1] == "-" else math.inf
    wrapped = re.fullmatch(
        r"(?:np|numpy|torch)?\.?(?:float\d+|bfloat16|tensor|array)\(([^(),]*)(?:,[^()]*)?\)", text
    )
    return number(wrapped[1]) if wrapped else None


def as_number(value: Any) -> float | None:
    """The number that a value of JSON is: a number itself, a text that is one, or neither."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return number(value) if isinstance(value, str) and len(value) < _LONGEST else None


#: Characters of the longest text that is tried as a number.
_LONGEST = 64
