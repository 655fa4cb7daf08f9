"""How long a tracker may take, and how much of the training it may use: every number in one place."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """What a worker allows its tracker.

    Attributes:
        rows: rows that wait in memory. More than the record keeps back before it writes them (64 KiB, or one
            check), so that what falls out of the queue is in the file.
        poll: seconds between two looks at the queue. The training loop does not wake the thread: on a busy
            machine the one that wakes another is often the one that has to wait.
        first_pause, longest_pause: seconds until a failed backend is tried again; doubled each time.
        silence: seconds after which a call that has not come back is told of.
        warn_every: least seconds between two warnings of one worker.
        open: seconds that the start of training waits for trackers, so that opening them, which takes them
            most work, is not done beside the first steps.
        close: seconds that the end of training waits for a tracker.
    """

    rows: int = 2048
    poll: float = 0.1
    first_pause: float = 1.0
    longest_pause: float = 60.0
    silence: float = 120.0
    warn_every: float = 300.0
    open: float = 15.0
    close: float = 30.0


@dataclass
class Pace:
    """Keeps a thread that has much to do from taking the interpreter from the training loop.

    Attributes:
        burst: seconds of work at a stretch. A loop that wants the interpreter waits no longer than that.
        rest: seconds of rest after each.
    """

    burst: float = 0.0005
    rest: float = 0.004
    _since: float = field(default=0.0, init=False)

    def breathe(self) -> None:
        """Called between two pieces of work."""
        now = time.perf_counter()
        if now - self._since > self.burst:
            time.sleep(self.rest)
            self._since = time.perf_counter()
