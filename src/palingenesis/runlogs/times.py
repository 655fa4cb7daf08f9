"""Time stamps in lines of text."""

from __future__ import annotations

import re
from datetime import datetime
from functools import lru_cache

#: ``2026-01-01 10:00:00,123`` with or without a zone; ``01/31/2026 10:00:00`` as nanotron has it.
_STAMP = re.compile(
    r"(?<!\d)(?:(\d{4}-\d{2}-\d{2})|(\d{2}/\d{2}/\d{4}))[T ](\d{2}:\d{2}:\d{2})(?:[.,](\d{1,9}))?"
    r"(Z|[+-]\d{2}:?\d{2})?(?!\d)"
)
#: Characters at the beginning of a line in which its stamp is looked for.
_BEGINNING = 80


def stamp(line: str) -> float | None:
    """Seconds since 1970 at which a line was written, if it begins with a time."""
    return seconds(line[:_BEGINNING]) if ":" in line[:_BEGINNING] else None


def seconds(text: str) -> float | None:
    """Seconds since 1970 of the first time stamp in a text; one without a zone is of this machine's."""
    found = _STAMP.search(text)
    if found is None:
        return None
    day, american, clock, fraction, zone = found.groups()
    if american is not None:
        day = f"{american[6:]}-{american[:5].replace('/', '-')}"
    whole = _whole_seconds(day, clock, zone or "")
    return None if whole is None else whole + (float(f"0.{fraction}") if fraction else 0.0)


@lru_cache(maxsize=4096)
def _whole_seconds(day: str, clock: str, zone: str) -> float | None:
    zone = zone.replace("Z", "+00:00")
    if zone and ":" not in zone:
        zone = f"{zone[:3]}:{zone[3:]}"
    try:
        return datetime.fromisoformat(f"{day}T{clock}{zone}").timestamp()
    except (ValueError, OverflowError, OSError):  # no such day, or none that the clock knows
        return None
