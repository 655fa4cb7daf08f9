"""Worker: a tracker in a thread of its own, so that whatever becomes of it, training does not wait.

The training loop puts rows into a bounded queue and goes on; of a full queue the oldest row falls out. All of
them are in the record, and a backend that answers again gets what it missed from there.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from palingenesis.errors import RecordError
from palingenesis.journal import one_line
from palingenesis.trackers.base import TIME_KEY, Row, Tracker, metric_values
from palingenesis.trackers.delivery import REFUSALS, Delivery
from palingenesis.trackers.identity import Identity
from palingenesis.trackers.journal import Journal
from palingenesis.trackers.limits import Limits, Pace

_log = logging.getLogger("palingenesis")

#: Tries, once training has ended, without one more row: enough to tell a row that is refused from an outage.
_LAST_TRIES = REFUSALS + 2


class _Given(NamedTuple):
    number: int  # of the call, from 1
    step: int
    time: float
    values: Mapping[str, Any]


class Worker:
    """Hands rows to one tracker. No method but :meth:`close` waits for anything.

    Args:
        tracker: the backend.
        identity: which run it is there.
        config: what the backend is to show as the run's configuration.
        journal: where rows that the queue lost are read again; ``None`` where there is no record.
        limits: how long it may take.
    """

    def __init__(
        self,
        tracker: Tracker,
        identity: Identity,
        config: Mapping[str, Any],
        journal: Journal | None,
        limits: Limits | None = None,
    ) -> None:
        self.tracker, self._identity, self._config = tracker, identity, config
        self._journal, self._limits = journal, limits or Limits()
        self._delivery = Delivery(tracker)
        # SimpleQueue: putting a row in never waits for a lock that the other thread holds.
        self._queue: queue.SimpleQueue[_Given] = queue.SimpleQueue()
        self._pace = Pace()
        self._given = 0
        self._taken = 0  # number of the last row taken from the queue
        self._waiting: list[Row] = []  # taken, and not delivered
        self._needed = -1  # a row of this step or a later one has to be in the record, before others are sent
        self._opened, self._closing, self._finished = (threading.Event() for _ in range(3))
        self._busy_since: float | None = None
        self._warned_at = -float("inf")
        self._troubled = False
        #: Whether the backend has every row, and was closed. Known after :meth:`close`.
        self.complete = False
        self._thread = threading.Thread(target=self._run, name=f"pgs-{tracker.name}", daemon=True)
        self._watch = threading.Thread(target=self._tell_of_silence, name=f"pgs-{tracker.name}-watch")
        self._watch.daemon = True
        self._thread.start()
        self._watch.start()

    # ------------------------------------------------------------------ the training loop's side

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Hand on the numbers of a step."""
        if self._closing.is_set():
            return
        self._given += 1
        self._queue.put(_Given(self._given, step, time.time(), dict(values)))
        if self._queue.qsize() > self._limits.rows:
            try:
                self._queue.get_nowait()
            except queue.Empty:  # the other thread took it meanwhile
                return

    def wait_until_open(self, timeout: float) -> bool:
        """Wait until the backend has answered for the first time, but no longer than ``timeout`` seconds."""
        return self._opened.wait(timeout)

    def ask_to_close(self) -> None:
        """Let the tracker end; :meth:`close` waits for it."""
        self._closing.set()

    def close(self, timeout: float | None = None) -> bool:
        """Wait until the backend has everything, but no longer than ``timeout`` seconds.

        To be called when the record is flushed or closed: what fell out of the queue is read from there.

        Returns:
            Whether it has. Where not, ``pgs sync`` can still bring the rest.
        """
        self.ask_to_close()
        self._thread.join(self._limits.close if timeout is None else timeout)
        self._finished.set()
        if not self.complete:
            folder = self._journal.folder if self._journal is not None else "RUN"
            _log.warning(
                "%s did not get every row of this run; they are in the record, and "
                "'pgs sync %s --to %s' sends what is missing",
                self.tracker.name,
                folder,
                self.tracker.name,
            )
        return self.complete

    # ------------------------------------------------------------------ the tracker's side

    def _run(self) -> None:
        pause, tries = self._limits.first_pause, _LAST_TRIES
        while True:
            reached = self._delivery.progress
            try:
                self._connect()
                self._deliver()
                self._call(self.tracker.close)
                self.complete = not self._delivery.refused
                return
            except BaseException as error:  # noqa: BLE001 - anyone's library, over anyone's network
                self._busy_since = None
                self._waiting = [*self._delivery.take_failed(), *self._waiting]
                self._warn(error)
            self._let_go()
            if self._delivery.progress != reached:
                pause, tries = self._limits.first_pause, _LAST_TRIES
            if self._closing.is_set():
                tries -= 1
                if tries == 0 or self._finished.wait(self._limits.first_pause):
                    return
            else:
                self._closing.wait(pause)
                pause = min(2 * pause, self._limits.longest_pause)

    def _call(self, method: Any, *given: Any) -> None:
        self._busy_since = time.monotonic()
        method(*given)
        self._busy_since = None

    def _connect(self) -> None:
        identity = self._identity
        self._call(self._delivery.open, identity.run_id, identity.name, self._config)
        self._opened.set()
        self._catch_up()
        waiting, self._waiting = self._waiting, []
        for index, row in enumerate(waiting):
            self._waiting = waiting[index + 1 :]
            self._send(row)
        self._waiting = []

    def _deliver(self) -> None:
        """Until the run ends, and nothing is left to send."""
        while (given := self._next()) is not None:
            fell_out = given.number > self._taken + 1
            self._taken = given.number
            row = _row(given)
            if fell_out:
                self._waiting, self._needed = [row], row.step
                self._catch_up()
                self._waiting = []
            self._send(row)
        left = self._delivery.leftover()
        if left is not None:
            self._send(left)
        self._tell_of_recovery()

    def _next(self) -> _Given | None:
        """The next row; ``None`` once the run ends."""
        while True:
            closing = self._closing.is_set()
            try:
                return self._queue.get_nowait()
            except queue.Empty:
                self._tell_of_recovery()
                if closing:
                    return None
                self._closing.wait(self._limits.poll)

    def _catch_up(self) -> None:
        """Send what the record has, once it has what fell out of the queue: it writes rows some time later.

        To go on without them would leave a gap that the backend's last step does not show.
        """
        pause = self._limits.first_pause
        while self._journal is not None and self._send_recorded(self._journal) < self._needed:
            if self._closing.is_set():
                raise RecordError(f"rows up to step {self._needed} are not in the record's file")
            self._closing.wait(pause)
            pause = min(2 * pause, self._limits.longest_pause)

    def _send_recorded(self, journal: Journal) -> int:
        """Send every row of the record; the last step it has."""
        last = -1
        for row in journal.rows():
            last = max(last, row.step)
            try:
                self._send(row)
            except BaseException:
                self._delivery.take_failed()  # it is read again from where it came
                raise
        return last

    def _send(self, row: Row) -> None:
        if not self._closing.is_set():
            self._pace.breathe()
        refused = len(self._delivery.refused)
        self._call(self._delivery.send, row)
        if len(self._delivery.refused) > refused:
            _log.warning(
                "%s refuses the row of step %d, and takes others: it is in the record only",
                self.tracker.name,
                max(self._delivery.refused),
            )

    def _let_go(self) -> None:
        try:
            self._call(self.tracker.close)
        except BaseException as error:  # noqa: BLE001 - it is broken already
            self._busy_since = None
            _log.debug("%s could not be closed: %s", self.tracker.name, one_line(error))

    # ------------------------------------------------------------------ what is said of it

    def _warn(self, error: BaseException) -> None:
        self._troubled = True
        self._say(f"{one_line(error)}; training goes on, rows wait in the record and it is tried again")

    def _say(self, what: str) -> None:
        now = time.monotonic()
        if now - self._warned_at >= self._limits.warn_every:
            self._warned_at = now
            _log.warning("tracker %s: %s", self.tracker.name, what)

    def _tell_of_recovery(self) -> None:
        if self._troubled:
            self._troubled = False
            _log.info("tracker %s answers again and has every row up to now", self.tracker.name)

    def _tell_of_silence(self) -> None:
        """A hang raises nothing: a second thread has to notice it."""
        while not self._finished.wait(self._limits.silence / 4):
            if not self._thread.is_alive():
                return
            since = self._busy_since
            if since is not None and time.monotonic() - since > self._limits.silence:
                self._troubled = True
                self._say(
                    f"no answer for {time.monotonic() - since:.0f} s; training goes on, and rows wait in "
                    "the record"
                )


def _row(given: _Given) -> Row:
    when = given.values.get(TIME_KEY)
    return Row(given.step, when if isinstance(when, float) else given.time, metric_values(given.values))


def close_all(workers: Iterable[Worker], timeout: float | None = None) -> bool:
    """End several workers at once: the slowest of them counts, not their sum.

    Returns:
        Whether every backend has every row.
    """
    group = list(workers)
    for worker in group:
        worker.ask_to_close()
    deadline = time.monotonic() + (Limits.close if timeout is None else timeout)
    complete = [worker.close(max(0.0, deadline - time.monotonic())) for worker in group]
    return all(complete)
