"""Rows of metrics that wait for what is still to arrive of their steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Rows:
    """One row a step, written in order, each once.

    Args:
        most: rows that may wait; where what they wait for never comes, the oldest are dropped.
        most_own: the same where the training loop has rows of its own.
    """

    def __init__(self, most: int, most_own: int | None = None) -> None:
        self._most, self._most_own = most, most if most_own is None else most_own
        self._rows: dict[int, dict[str, Any]] = {}
        # What the training loop itself says of a step, which holds against everything else.
        self._own: dict[int, dict[str, Any]] = {}
        # The last step whose row was handed out: what comes for it later is too late.
        self._done = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add to a step's row."""
        if step <= self._done:
            return
        self._rows.setdefault(step, {}).update(values)
        while len(self._rows) > self._most:
            oldest = min(self._rows)
            del self._rows[oldest]
            self._own.pop(oldest, None)

    def add_own(self, step: int, values: Mapping[str, Any]) -> None:
        """Add what the training loop says of a step: where both have a number, this one counts."""
        self._most = self._most_own
        if step > self._done:
            self.add(step, {})
            self._own.setdefault(step, {}).update(values)

    def take(self, until: int) -> list[dict[str, Any]]:
        """The rows of steps up to ``until``, in order."""
        steps = sorted(step for step in self._rows if step <= until)
        self._done = max(self._done, until)
        return [
            {"train/global_step": step, **self._rows.pop(step), **self._own.pop(step, {})} for step in steps
        ]

    def restart(self, step: int) -> None:
        """Go on from a step, which may be an earlier one."""
        self._rows, self._own, self._done = {}, {}, step
