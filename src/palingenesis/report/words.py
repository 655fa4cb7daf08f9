"""Text made safe to show, and numbers made easy to read.

Names of layers, runs and exceptions come from models, data and logs. They may hold control codes that
drive a terminal, marks that reverse the reading direction, or halves of a character that no file can
hold. ``visible`` shows such characters as escapes instead of letting them act. (HTML is escaped in
addition, by the template engine.)
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

ELLIPSIS = "…"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_PLAIN_BELOW = 1e6
_PLAIN_FROM = 1e-3
_SECONDS = (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1))


class Name(str):
    """A piece of a sentence that is the name of something in the model, shown in a fixed-width face."""


Sentence = tuple[str, ...]
"""A sentence in pieces; those that are a ``Name`` are set apart where the output can."""


def visible(text: object, limit: int | None = None) -> str:
    """The text with every character that would act instead of show written as an escape.

    Longer than ``limit``, its middle is left out: names differ at both ends.
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))
    if limit is None or len(shown) <= limit:
        return shown
    head = (limit - len(ELLIPSIS) + 1) // 2
    tail = limit - len(ELLIPSIS) - head
    return shown[:head] + ELLIPSIS + (shown[-tail:] if tail else "")


def sentence(text: str, limit: int | None = None) -> str:
    """A message as a sentence: begun with a capital unless it begins with a name, ended with a full stop."""
    shown = visible(text.strip(), limit)
    ended = shown if shown.endswith((".", "!", "?", ELLIPSIS)) or not shown else shown + "."
    first = ended.split(" ", 1)[0].rstrip(".:,")
    return ended if any(mark in first for mark in "_./") else ended[:1].upper() + ended[1:]


def tail(text: object, limit: int) -> str:
    """The end of a name, where there is room for no more: it tells parts of one block apart."""
    shown = visible(text)
    return shown if len(shown) <= limit else ELLIPSIS + shown[-(limit - len(ELLIPSIS)) :]


def plain(sentence: Sentence) -> str:
    """A sentence as one string."""
    return "".join(visible(piece) for piece in sentence)


def step_number(step: float) -> str:
    """A step as people write it: 12,300."""
    return f"{int(step):,}"


def number(value: Any, digits: int = 4) -> str:
    """A number with few digits; a dash for none; non-finite ones by name."""
    if value is None or value == "":
        return "–"
    if isinstance(value, (str, bool)):
        return visible(value)
    value = float(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value == int(value) and abs(value) < _PLAIN_BELOW:
        return f"{int(value):,}".replace("-", "−")
    if _PLAIN_FROM <= abs(value) < _PLAIN_BELOW:
        return f"{value:,.{digits}g}".replace("-", "−") if abs(value) < 10**digits else f"{value:,.0f}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}".replace("-", "−")


def whole(value: Any) -> str:
    """A count in full, however large; a dash for none."""
    return f"{value:,}" if isinstance(value, int) else number(value)


def power_of_ten(exponent: int) -> str:
    """10³ for 3, for the ticks of a logarithmic axis."""
    return "10" + str(exponent).translate(_SUPERSCRIPT)


def times(decades: float) -> str:
    """How large a departure is, in words: "340 times" above, "1/340 of" below."""
    if not math.isfinite(decades):
        return "a non-finite multiple of"
    exponent = abs(decades)
    if exponent < math.log10(_PLAIN_BELOW):
        ratio = 10**exponent
        shown = f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"
    else:
        shown = f"10^{exponent:.0f}"
    return f"{shown} times" if decades >= 0 else f"1/{shown} of"


def count(n: int, one: str, many: str | None = None) -> str:
    """ "1 layer", "2 layers"."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def moment(time: object) -> str:
    """An ISO-8601 time of a record, as people read it; what is no such time is shown as it is."""
    try:
        return datetime.fromisoformat(str(time).replace("Z", "+00:00")).strftime("%Y-%m-%d %H:%M:%S UTC")
    except ValueError:
        return visible(time)


def duration(start: object, end: object) -> str | None:
    """The time between two ISO-8601 times in its two largest units, or None when one is missing."""
    try:
        first, last = (datetime.fromisoformat(str(t).replace("Z", "+00:00")) for t in (start, end))
    except ValueError:
        return None
    left = max(0, round((last - first).total_seconds()))
    parts = []
    for unit, seconds in _SECONDS:
        n, left = divmod(left, seconds)
        if n:
            parts.append(count(n, unit))
    return " ".join(parts[:2]) or "under a second"


def seconds_in_words(seconds: float) -> str:
    """A time that was measured: "0.52 s", "3 min 20 s", "5 h 12 min"."""
    if seconds < _MINUTE:
        return f"{number(seconds, 3)} s"
    for size, name, smaller, part in _UNITS:
        if seconds >= size:
            whole_units, left = divmod(round(seconds / smaller), size // smaller)
            return f"{whole_units:,} {name} {left} {part}" if left else f"{whole_units:,} {name}"
    return f"{number(seconds, 3)} s"


_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400
_UNITS = ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1, "s"))
