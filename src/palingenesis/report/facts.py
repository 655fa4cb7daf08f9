"""Everything a report says about a run, before how it looks: one reading for all three outputs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from palingenesis.config import MonitorConfig
from palingenesis.errors import RecordError
from palingenesis.events import Event
from palingenesis.findings.finding import Finding
from palingenesis.findings.pathologies import pathologies_of
from palingenesis.record.spikes import Spike, read_spikes
from palingenesis.report.episodes import Episode, pair_alarms
from palingenesis.report.history import Bools, Floats, Ints, Norms, config_of, read_norms
from palingenesis.report.moments import Moment, what_came_first
from palingenesis.report.series import Signals

if TYPE_CHECKING:
    from palingenesis.record.reader import Run

LOSS = "train/loss"

_COUNTED = {
    "alarms": "alarm",
    "alarms_cleared": "alarm_cleared",
    "loss_spikes": "loss_spike",
    "nonfinite": "nonfinite",
    "skipped_steps": "skipped_step",
}


@dataclass(frozen=True)
class Facts:
    """What a run's record holds, read once."""

    folder: Path
    info: dict[str, Any]
    verdict: str
    sentence: str
    events: tuple[Event, ...]
    episodes: tuple[Episode, ...]
    moments: tuple[Moment, ...]
    norms: Norms
    judged: Ints
    """Layers with a finished baseline, a number a check."""
    checks_without_gradients: int
    problems: tuple[str, ...]
    """Lines of the record that could not be read."""
    lacking: str | None
    """Which events the record lacks, in words."""
    alarms_possible_from: int | None
    """The first check at which layers had been judged often enough for an alarm; None: there is none."""
    loss_steps: Floats
    loss: Floats
    loss_given: Bools
    """Where a row has a loss at all: a NaN that was logged is a loss, a missing one is not."""
    signals: Signals
    """Every number of the rows, by name."""
    findings: tuple[Finding, ...]
    """Conclusions about the whole run, causes before what follows from them."""
    spikes: tuple[Spike, ...]
    """What was in the batch when the loss spiked or was not finite."""
    training: dict[str, Any]
    """How the training loop was configured; empty where nothing told it."""

    @property
    def name(self) -> str:
        return str(self.info.get("name") or self.folder.resolve().name)

    @property
    def end(self) -> dict[str, Any] | None:
        return self.info.get("end")

    @cached_property
    def config(self) -> MonitorConfig:
        return config_of(self.info)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers watched; before the first check, those that were going to be."""
        return self.norms.names or tuple(self.info.get("layers") or ())

    @property
    def checks(self) -> int:
        return len(self.norms.steps)

    @cached_property
    def last_step(self) -> int:
        """The last step the record knows of; a run that was killed may have gone a little further."""
        ended = (self.end or {}).get("steps") or 0
        seen = (event.step for event in self.events if not event.superseded)
        return max(int(ended), *(int(s[-1]) for s in (self.loss_steps, self.norms.steps) if len(s)), *seen, 0)

    @cached_property
    def first_judged_step(self) -> int | None:
        """The first check at which some layer had a finished baseline."""
        where = np.flatnonzero(self.judged > 0)
        return int(self.norms.steps[where[0]]) if len(where) else None

    @cached_property
    def counts(self) -> dict[str, int]:
        """What the record shows, and what the monitor counted where that is more: events may be missing.

        It is less for a run that was resumed, whose monitor counted only what came after.
        """
        seen = Counter(event.event for event in self.events if not event.superseded)
        shown = {count: seen[event] for count, event in _COUNTED.items()}
        shown["checks"] = self.checks
        shown["checks_without_gradients"] = self.checks_without_gradients
        counted = (self.end or {}).get("counts") or {}
        counts = {**counted, **{name: max(n, _whole(counted.get(name))) for name, n in shown.items()}}
        # The monitor counts both kinds of end together; a level that was accepted has not come back.
        accepted = sum(e.accepted for e in self.episodes if not e.superseded)
        counts["alarms_accepted"] = accepted
        counts["alarms_cleared"] = max(0, counts["alarms_cleared"] - accepted)
        return counts

    @property
    def not_watched(self) -> list[dict[str, str]]:
        return list(self.info.get("not_watched") or [])

    @property
    def open_episodes(self) -> list[Episode]:
        return [e for e in self.episodes if e.cleared_step is None and not e.superseded]

    @property
    def not_optimized(self) -> list[str]:
        """Parameters that train but that no optimizer held when the monitor last looked."""
        found: dict[str, None] = {}
        for event in self.events:
            if event.superseded:
                continue
            if event.event == "not_optimized":
                found |= dict.fromkeys(map(str, event.parameters or ()))
            elif event.event == "parameters_changed":
                for mended in ("optimized", "frozen", "removed"):
                    for name in event.fields.get(mended) or ():
                        found.pop(str(name), None)
                found |= dict.fromkeys(map(str, event.not_optimized or ()))
        return list(found)

    @property
    def unconfirmed(self) -> list[tuple[int, str, str]]:
        """Step, layer and diagnosis of what was out of range at the last check, too late for an alarm."""
        return [
            (event.step, str(layer), str((event.diagnoses or {}).get(layer)))
            for event in self.of_kind("unconfirmed")
            if not event.superseded
            for layer in event.layers or ()
        ]

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.event == kind]


def _whole(value: Any) -> int:
    """A count as the record holds it; 0 where it is none."""
    return value if isinstance(value, int) else 0


def gather(run: Run) -> Facts:
    """Read a run once."""
    events = tuple(run.events)
    episodes = tuple(pair_alarms(events))
    loss_steps, loss, given = _loss(run, events)
    spikes, spike_problems = _spikes(run)
    return Facts(
        folder=Path(run.folder),
        info=run.info,
        verdict=run.verdict,
        sentence=run.verdict_sentence,
        events=events,
        episodes=episodes,
        moments=tuple(what_came_first(events, episodes)),
        norms=read_norms(run),
        judged=run.judged,
        checks_without_gradients=run.checks_without_gradients,
        problems=(*run.problems, *spike_problems),
        lacking=run.lacking,
        alarms_possible_from=run.alarms_possible_from,
        loss_steps=loss_steps,
        loss=loss,
        loss_given=given,
        signals=Signals.of_run(run),
        findings=tuple(pathologies_of(run)),
        spikes=spikes,
        training=run.training,
    )


def _spikes(run: Run) -> tuple[tuple[Spike, ...], list[str]]:
    """What was kept of spikes, and why it cannot be read."""
    try:
        return tuple(read_spikes(run.folder)), []
    except RecordError as error:
        return (), [str(error)]


def _loss(run: Run, events: tuple[Event, ...]) -> tuple[Floats, Floats, Bools]:
    if LOSS not in run.metrics:
        nothing = np.zeros(0)
        return nothing, nothing, np.zeros(0, dtype=np.bool_)
    steps, loss = run.metrics["step"], run.metrics[LOSS]
    on_axis = np.isfinite(steps)
    steps, loss = steps[on_axis], loss[on_axis]
    order = np.argsort(steps, kind="stable")
    steps, loss = steps[order], loss[order]
    return steps, loss, ~np.isnan(loss) | _in_nonfinite_episode(steps, events)


def _in_nonfinite_episode(steps: Floats, events: tuple[Event, ...]) -> Bools:
    """Steps at which a NaN in a column was a NaN in training.

    A column has NaN for a row without a value, too; but no loss is NaN without a ``nonfinite`` event.
    """
    inside = np.zeros(len(steps), dtype=np.bool_)
    since: int | None = None
    for event in events:
        if event.event == "nonfinite" and not event.superseded:
            since = event.step if since is None else min(since, event.step)
            if event.between_checks:
                inside |= steps == event.step
        elif event.event == "nonfinite_cleared" and since is not None:
            inside |= (steps >= since) & (steps < event.step)
            since = None
    return inside if since is None else inside | (steps >= since)
