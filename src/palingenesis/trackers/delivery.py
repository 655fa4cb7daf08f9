"""Rows to one backend, in order and each once, whatever it held before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palingenesis.trackers.base import Row, Tracker, last_steps

#: Times that a backend refuses one row before a later one is tried in its place.
REFUSALS = 3


class Delivery:
    """Sends rows to a tracker and remembers, a metric, the last step sent.

    Rows come in the order of their steps, so that one number a metric says what the backend has: a row that
    comes again, from the record or from steps that are run again after a crash, is left out.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._held: dict[str, int] = {}
        self.sent = 0  # rows
        self.already = 0  # rows of which the backend had everything
        #: Rows waiting to be sent again: the one that failed, and before it one that was passed over.
        self.failed: list[Row] = []
        self._suspect: tuple[int, int] = (-1, 0)  # step refused last, and how often in a row
        self._passed: Row | None = None
        #: Steps that the backend refuses while it takes others.
        self.refused: set[int] = set()

    @property
    def progress(self) -> tuple[int, int]:
        """Changes whenever it comes further."""
        return self.sent, len(self.refused)

    def open(self, run_id: str, name: str, config: Mapping[str, Any]) -> None:
        """Open the tracker, and learn what it holds."""
        self._passed, self.already = None, 0
        self._held = dict(self.tracker.open(run_id, name, config) or {})

    def send(self, row: Row) -> None:
        """Send what the backend lacks of a row. What it raises is raised, and the row is in ``failed``."""
        values = {key: value for key, value in row.values.items() if self._held.get(key, -1) < row.step}
        if not values or row.step in self.refused:
            self.already += not values
            return
        if self._passed is None and self._suspect == (row.step, REFUSALS):
            self._passed = row
            return
        try:
            self.tracker.log(row.step, values, row.time)
        except BaseException:
            self._note_failure(row)
            raise
        self.sent += 1
        last_steps(self._held, row.step, values)
        if self._passed is not None and self._passed.step != row.step:
            # A later row went through: it is not the backend that is broken, but that row that it refuses.
            self.refused.add(self._passed.step)
            self._passed = None
        if row.step == self._suspect[0]:
            self._suspect = (-1, 0)

    def _note_failure(self, row: Row) -> None:
        if self._passed is not None:
            self.failed = [self._passed, row]
            self._passed, self._suspect = None, (-1, 0)
            return
        self.failed = [row]
        step, times = self._suspect
        self._suspect = (row.step, times + 1 if step == row.step else 1)

    def take_failed(self) -> list[Row]:
        """The rows to be sent again; nothing is kept of them here."""
        failed, self.failed = self.failed, []
        return failed

    def leftover(self) -> Row | None:
        """A row that was passed over when no later one came to tell whether it is the row or the backend."""
        passed, self._passed = self._passed, None
        return passed
