"""Where events go: the record, the log, the caller's ``on_event``, and the counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from palingenesis.events import Event
from palingenesis.reading import Reading
from palingenesis.record.writer import RecordWriter

if TYPE_CHECKING:
    # Not at run time: trackers use this module too, and read logs where torch is not wanted.
    from palingenesis.batches import Batches

log = logging.getLogger("palingenesis")

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}

# Which count an event adds to.
_COUNTED = {
    "alarm": "alarms",
    "alarm_cleared": "alarms_cleared",
    "loss_spike": "loss_spikes",
    "nonfinite": "nonfinite",
    "skipped_step": "skipped_steps",
}


class Journal:
    """Takes every event of a run once.

    Args:
        writer: the record, or ``None`` where there is none (other ranks, an unwritable folder).
        on_event, on_reading, on_row: called with each event, each reading and each row of metrics; what they
            raise becomes a ``monitor_error``.
        batches: told of every event, so that what was in the batch of a spike is kept.
        quiet: log nothing (every rank but the first).
    """

    def __init__(
        self,
        writer: RecordWriter | None,
        on_event: Callable[[Event], object] | None,
        on_reading: Callable[[Reading], object] | None,
        *,
        on_row: Callable[[dict[str, Any]], object] | None = None,
        batches: Batches,
        quiet: bool,
    ) -> None:
        self.writer, self.batches, self._quiet = writer, batches, quiet
        self._callbacks: dict[str, Callable[[Any], object] | None] = {
            "on_event": on_event,
            "on_reading": on_reading,
            "on_row": on_row,
        }
        self.events: list[Event] = []
        self.counts = {
            "alarms": 0,
            "alarms_cleared": 0,
            "loss_spikes": 0,
            "nonfinite": 0,
            "skipped_steps": 0,
            "checks": 0,
            "checks_without_gradients": 0,
        }
        self.errors = 0

    def tell(self, events: Iterable[Event]) -> None:
        """Write, count, log and hand on events, in this order, so that a failing callback loses nothing."""
        told = list(events)
        if not told:
            return
        broken: Exception | None = None
        if self.writer is not None:
            try:
                told = self.writer.events(told)
            except Exception as error:  # noqa: BLE001 - what happened must still be heard of
                broken = error
        for event in told:
            self.events.append(event)
            if event.event in _COUNTED:
                self.counts[_COUNTED[event.event]] += 1
            self._log(event)
        for event in told:
            self._keep_batch(event)
            self._hand_on("on_event", event, event.step)
        if broken is not None:
            self.failed(broken, "the record", told[-1].step)

    def _keep_batch(self, event: Event) -> None:
        try:
            self.batches.told(event)
        except Exception as error:  # noqa: BLE001 - what a batch holds is anyone's; the event stands without
            self.failed(error, "spikes", event.step)

    def _log(self, event: Event) -> None:
        # The alarms of an incident are told by its one line.
        in_incident = event.event == "alarm" and event.incident
        if not self._quiet and not in_incident:
            log.log(_LEVELS[event.severity], "step %d: %s: %s", event.step, event.event, event.message)

    def hand_on(self, readings: Sequence[Reading]) -> None:
        """Hand readings to the caller's ``on_reading``."""
        for reading in readings:
            self._hand_on("on_reading", reading, reading.step)

    @property
    def rows_are_told(self) -> bool:
        """Whether rows have a reader, who then tells of them."""
        return self._callbacks["on_row"] is not None

    def write_rows(self, rows: Sequence[dict[str, Any]], *, flush: bool) -> None:
        """Write rows of metrics, and hand them on."""
        if self.writer is not None:
            for row in rows:
                self.writer.metrics(row)
            if flush:
                self.writer.flush()
        for row in rows:
            self._hand_on("on_row", row, int(row["train/global_step"]))

    def note(self, **facts: Any) -> None:
        """Change what the record says of the run."""
        if self.writer is not None:
            self.writer.update_info(**facts)

    def _hand_on(self, name: str, told: object, step: int) -> None:
        callback = self._callbacks[name]
        if callback is None:
            return
        try:
            callback(told)
        except Exception as error:  # noqa: BLE001 - the callback is anyone's code
            # It is not called again, so that it cannot fail at every event.
            self._callbacks[name] = None
            self.failed(error, name, step)

    def failed(self, error: Exception, where: str, step: int) -> None:
        """Turn a failure of the monitor itself into one ``monitor_error``; later ones are only counted.

        Never raises, even where the failure is in telling.
        """
        self.errors += 1
        if self.errors > 1:
            return
        told = one_line(error)
        message = f"the monitor failed in {where} and training goes on: {told}"
        event = Event("monitor_error", step, "warning", message, {"error": told, "where": where})
        try:
            log.debug("the monitor failed in %s at step %d", where, step, exc_info=error)
            self.tell([event])
        except Exception:  # noqa: BLE001 - the way out is what failed; the event is at least kept
            if event.message not in (kept.message for kept in self.events):
                self.events.append(event)


def one_line(error: BaseException) -> str:
    """Type and first line of an exception, also of one that cannot be printed."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - anyone's exception class
        text = "(no message)"
    return f"{type(error).__name__}: {text}".splitlines()[0].removesuffix(": ")
