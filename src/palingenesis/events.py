"""Event: something that happened at a step, with the numbers that made it.

Made by ``watch/`` and by ``monitor.py``, stored by ``record/``, read by everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    An event's own fields (``layer``, ``diagnosis``, ``value``, ``baseline``, ``sigma``, …) are
    attributes too; one that it does not have is ``None``. Events read from, or written to, a record
    also have ``seq``, ``time``, ``prev`` and ``hash``.
    """

    event: str
    step: int
    severity: Severity
    message: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        # Only reached for names that are not dataclass fields. Dunder and private look-ups come from
        # copy and pickle on half-built objects and must fail the normal way.
        if name.startswith("_") or name == "fields":
            raise AttributeError(name)
        return self.fields.get(name)
