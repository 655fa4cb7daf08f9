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
        self._apart = 0.0
        self._told: dict[str, float] = {}

    @contextmanager
    def apart(self, what: str) -> Iterator[None]:
        """What is done inside is not training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self._apart += seconds
            self._told[what] = self._told.get(what, 0.0) + seconds

    def lap(self) -> float:
        """Seconds of training since the last lap; begins the next one."""
        now = time.perf_counter()
        seconds = now - self._since - self._apart
        self._since, self._apart = now, 0.0
        return seconds

    def take_apart(self) -> dict[str, float]:
        """Seconds of what was done apart since the last call."""
        told, self._told = self._told, {}
        return told
