"""Status: how a run is going, read from its log while it goes on.

:func:`status_of` makes a :class:`Status` of a log: where it is, loss and evaluations, speed, time left,
what is wrong. One file a part of it; ``words.py`` says it to people.
"""

from __future__ import annotations

from palingenesis.findings.status.limits import StatusLimits
from palingenesis.findings.status.status import Status, status_of

__all__ = ["Status", "StatusLimits", "status_of"]
