"""One JSON object a line, of any program; also behind a prefix::

    {"step": 10, "train/loss": 1.2345, "train/lr": 2e-05}

Shows whatever numbers the objects have, those of objects in them as ``outer/inner``. What a number means is
told by its name only: whether a loss is of a step or a mean cannot be known.
"""

from __future__ import annotations

import json

from palingenesis.runlogs.formats.base import LineFormat, Parsed
from palingenesis.runlogs.formats.entries import entry

_DECODER = json.JSONDecoder()
_UNKNOWN_MEAN = "The log does not say whether a loss is of one step or a mean."


def parse(text: str) -> Parsed | None:
    """What the first object of a line says."""
    start = text.find("{")
    try:
        value, _ = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):  # no JSON from there on, or cut off
        return None
    return entry(value.items()) if isinstance(value, dict) else None


FORMAT = LineFormat("jsonl", parse, marks=('{"', '{ "'), cannot_show=(_UNKNOWN_MEAN,))
