"""Seconds of training, apart from what evaluation and checkpoints take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Wall time from lap to lap."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Training begins now."""
        self._since = time.perf_counter()
        self._apart: dict[str, float] = {}

    @contextmanager
    def apart(self, what: str) -> Iterator[None]:
        """What is done inside is not training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._apart[what] = self._apart.get(what, 0.0) + time.perf_counter() - began

    def lap(self) -> tuple[float, dict[str, float]]:
        """Seconds of training since the last lap, and of what was done apart; begins the next lap."""
        now = time.perf_counter()
        apart, since = self._apart, self._since
        self._since, self._apart = now, {}
        return now - since - sum(apart.values()), apart
