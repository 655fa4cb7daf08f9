"""What has arrived, judged: checks and readings go through ``watch/`` into the journal and the rows.

The other half of ``monitor.py``, which reads and sends; here nothing touches the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palingenesis import lifecycle
from palingenesis.changes import Inventory
from palingenesis.config import MonitorConfig
from palingenesis.describe import describe_layers
from palingenesis.errors import LayerError
from palingenesis.events import Event
from palingenesis.interval import Interval
from palingenesis.journal import Journal
from palingenesis.reading import Reading
from palingenesis.record.reader import Run, load_run
from palingenesis.recording import add_steps, check_metrics, write_check
from palingenesis.run_folder import learn_from, live_verdict
from palingenesis.tiers.console import Console
from palingenesis.tiers.numbers import Numbers
from palingenesis.watch.reading import CheckReading
from palingenesis.watchers import Watchers, refused_as_state


class Judging:
    """Takes intervals and looks as they arrive.

    Args:
        inventory: the layers under watch.
        config: thresholds.
        journal: where events go.
        numbers: what the tiers find.
        gradients: how they arrive; ``"unknown"`` until it is found out.
    """

    def __init__(
        self,
        inventory: Inventory,
        config: MonitorConfig,
        journal: Journal,
        numbers: Numbers,
        gradients: str,
    ) -> None:
        self._inventory, self._config, self._journal, self._numbers = inventory, config, journal, numbers
        self._gradients = gradients
        self.watchers = self._fresh_watchers()
        self.resuming = journal.writer is not None and journal.writer.resumed
        self.newest: Reading | None = None
        self.console = Console()
        self._on_the_way: deque[Interval] = deque()
        self._before: Run | None = None
        # Checks at which some layer was judged, and the step of the last check.
        self._judged = self._checked = 0
        self._loss_reduced = False
        # The last step whose row the training loop has completed, if it does such a thing.
        self._logged: int | None = None

    def _fresh_watchers(self) -> Watchers:
        return Watchers(self._inventory, self._config, raw=self._gradients == "raw")

    # -- a step ------------------------------------------------------------------------------------------

    def judge(self, step: int, changed: Event | None, sent: Interval | None) -> None:
        """Take in what has arrived by a step.

        Args:
            step: the step.
            changed: what changed about the layers at its check.
            sent: the interval that ended with it.
        """
        if self.resuming:
            self._resume(step - 1, learn=True)
        self.arrive(step, wait=False)
        if changed is not None:
            self._follow(step, changed)
        if sent is not None:
            self._on_the_way.append(sent)
            self.arrive(step, wait=False)
        self._numbers.keep_start()
        self._write_rows()

    def log(self, step: int, values: Mapping[str, Any], now: int) -> None:
        """Take in what the training loop says of a step; from then on rows wait for it, and for no check.

        Args:
            step: which may be still to come, and then waits for others to be told of.
            values: by name.
            now: the last step.
        """
        self._numbers.rows.add_own(step, values)
        self._logged = max(self._logged or 0, min(step, now))
        self._write_rows(flush=True)

    def _follow(self, step: int, changed: Event) -> None:
        self.arrive(step, wait=True)
        self.watchers.follow(self._inventory)
        self._journal.note(**describe_layers(self._inventory.layers))
        self._journal.tell([changed])

    def arrive(self, step: int, *, wait: bool) -> None:
        """Take in the checks and looks that have arrived; with ``wait`` also those on their way."""
        while self._on_the_way and (wait or self._on_the_way[0].ready):
            self._check(self._on_the_way.popleft(), step)
        self._tell_numbers(step, until=step if wait else 0)

    def _tell_numbers(self, step: int, *, until: int = 0, last: bool = False) -> None:
        events, readings = self._numbers.arrive(step, until=until, last=last)
        self._journal.tell(events)
        if readings:
            self.newest = readings[-1]
            if not self._journal.rows_are_told:
                for reading in readings:
                    self.console.tell(reading)
            self._journal.hand_on(readings)

    def _check(self, interval: Interval, now: int) -> None:
        reading, losses, scales = interval.decode()
        # What the tiers saw up to here was sent before, and belongs into the same rows.
        self._tell_numbers(now, until=interval.check.step)
        add_steps(self._numbers.rows, interval.times, losses)
        self._checked = interval.check.step
        if isinstance(reading, LayerError):
            self._write_rows()
            self._journal.tell(self.watchers.check_losses(self._checked, losses))
            self._journal.batches.judged(self._checked)
            raise reading
        counts = self._journal.counts
        counts["checks"] += 1
        counts["checks_without_gradients"] += not reading.saw_gradients
        events = self.watchers.check(reading, losses, scales)
        self._judged += self.watchers.layers.judged > 0
        norm = self.watchers.layers.clipped_norm
        if norm is not None:
            self.gradients_are("clipped", lambda: lifecycle.clipped_gradients(reading.step, norm))
        self._record(interval, reading)
        self._journal.tell(events)
        self._journal.batches.judged(self._checked)

    def loss_is_reduced(self, shape: Sequence[int], step: int) -> None:
        """Tell, once, of losses that are more than one number."""
        if not self._loss_reduced:
            self._loss_reduced = True
            self._journal.tell([lifecycle.loss_reduced(step, shape)])

    def gradients_are(self, how: str, event: Callable[[], Event]) -> None:
        """Remember how gradients arrive, and tell it, if that was not known."""
        if self._gradients == "unknown":
            self._gradients = how
            self._journal.note(gradients=how)
            self._journal.tell([event()])

    # -- the record --------------------------------------------------------------------------------------

    def _record(self, interval: Interval, reading: CheckReading) -> None:
        rows, writer = self._numbers.rows, self._journal.writer
        clipped = self._gradients == "clipped"
        rows.add(reading.step, check_metrics(reading, interval.learning_rate, clipped=clipped))
        self._write_rows()
        if writer is not None:
            write_check(writer, reading, self.watchers.layers.judged, interval.layers.names)

    def _write_rows(self, until: int | None = None, *, flush: bool = False) -> None:
        """Write the rows of steps of which everything is known, or those up to a step."""
        if until is None:
            until = self._checked if self._logged is None else self._logged
            if self._on_the_way:
                until = min(until, self._on_the_way[0].check.step - 1)
            until = self._numbers.known_until(until)
        self._journal.write_rows(self._numbers.rows.take(until), flush=flush)

    # -- beginning and end -------------------------------------------------------------------------------

    def _resume(self, from_step: int, *, learn: bool) -> None:
        """Tell the record where it goes on, and take its past into account."""
        self.resuming = False
        self._journal.tell([lifecycle.resumed(from_step)])
        assert self._journal.writer is not None
        self._before = load_run(self._journal.writer.folder)
        if learn:
            learn_from(self._before, from_step, self.watchers)
            self._numbers.learn(self._before, from_step)

    def close(self, step: int, interval: Interval, final_scale: float | None) -> None:
        """Judge the steps after the last check: their losses, and what the guard saw.

        Args:
            step: the last step.
            interval: what was gathered since the last check.
            final_scale: the loss scale now, if there is a scaler.
        """
        self._tell_numbers(step, last=True)
        reading, losses, scales = interval.decode()
        guarded = reading if isinstance(reading, CheckReading) and interval.check.guarded_steps else None
        events = self.watchers.close(step, guarded, losses, scales, final_scale)
        add_steps(self._numbers.rows, interval.times, losses)
        self._write_rows(step)
        self._journal.tell(events)
        self._journal.batches.clear()
        self._numbers.tiers.leave()

    def verdict(self, step: int) -> str:
        """One word on the run as if it ended at ``step``."""
        return live_verdict(self._journal, self._before, self._judged, self._config.consecutive, step)

    # -- state -------------------------------------------------------------------------------------------

    def state_dict(self, step: int) -> dict[str, Any]:
        """Baselines and windows; what is on its way is taken in first."""
        self.arrive(step, wait=True)
        return {"watchers": self.watchers.state_dict(), "numbers": self._numbers.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> int:
        """Go on from a monitor's state; the step that it was taken at.

        Raises:
            ConfigError: it is no such thing; nothing was changed.
        """
        watchers = self._fresh_watchers()
        with refused_as_state():
            step = int(state["step"])
            watchers.load_state_dict(state["watchers"])
            self._numbers.load_state_dict(state["numbers"])
        self.watchers = watchers
        self._journal.batches.clear()
        self._numbers.rows.restart(step)
        self._logged = None if self._logged is None else step
        if self.resuming:
            self._resume(step, learn=False)
        return step
