"""One number a line, the loss; or two, the step and the loss::

    4.613                              10 4.613
    4.402                              20 4.402

Shows a curve and nothing else; with one number a line steps are counted.
"""

from __future__ import annotations

import re

from palingenesis.runlogs.formats.base import LineFormat, Parsed
from palingenesis.runlogs.names import LOSS, STEP
from palingenesis.runlogs.spelling import NUMBER, number

_ONE = re.compile(rf"\s*({NUMBER})\s*[,;]?\s*")
_TWO = re.compile(rf"\s*(\d{{1,15}}(?:\.0*)?)(?:\s*[,;:]\s*|\s+)({NUMBER})\s*[,;]?\s*")


def _parse_one(text: str) -> Parsed | None:
    found = _ONE.fullmatch(text)
    value = number(found[1]) if found else None
    return None if value is None else Parsed({LOSS: value})


def _parse_two(text: str) -> Parsed | None:
    found = _TWO.fullmatch(text)
    value = number(found[2]) if found else None
    return None if found is None or value is None else Parsed({STEP: float(found[1]), LOSS: value})


_ONLY = "There is nothing but the loss, and whether it is of one step or a mean is not said."

ONE = LineFormat(
    "numbers", _parse_one, cannot_show=(_ONLY, "Steps are counted by lines."), broad=True, whole=True
)
TWO = LineFormat("step_and_number", _parse_two, cannot_show=(_ONLY,), broad=True, whole=True)
