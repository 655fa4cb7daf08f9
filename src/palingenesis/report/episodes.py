"""Alarms paired with what ended them: an episode has a beginning and, perhaps, an end.

After a resume, steps may be run again. The alarms of steps that were are marked ``superseded``: they stay
in the table of events, and are kept out of everything that speaks of how the run is now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from palingenesis.events import Event
from palingenesis.report.words import step_number

DIAGNOSES = {
    "no_gradient": "no gradient",
    "vanishing": "vanishing",
    "exploding": "exploding",
    "never_trained": "never trained",
}

IN_RANGE = "in_range"
"""``ended`` of an alarm whose layer came back into its range."""
ACCEPTED = "level_accepted"
"""``ended`` of an alarm whose layer stayed out of range until that became its normal."""
CHANGED = "changed"
"""``ended`` of an alarm that turned into another one."""


@dataclass(frozen=True)
class Episode:
    """One alarm of one layer, from its first check out of range to the check that ended it."""

    layer: str
    diagnosis: str
    step: int
    """The step of the alarm."""
    since: int
    """The step of the first check out of range."""
    cleared_step: int | None
    """The step at which the alarm ended, in whichever way; None while it has not."""
    ended: str | None
    """How: ``in_range``, ``level_accepted`` or ``changed``."""
    parameter: str | None
    value: float | None
    """log10 of the norm at the alarm."""
    baseline: float | None
    """The mean log10 norm it was compared with."""
    std: float | None
    sigma: float | None
    relative: float | None
    """Decades from the baseline with the common factor taken out, where the monitor gave it."""
    cause: str | None
    incident: str | None
    superseded: bool

    @property
    def accepted(self) -> bool:
        """Whether it ended only because the monitor took the new level for normal."""
        return self.ended == ACCEPTED

    @property
    def decades(self) -> float | None:
        """How far the value was from its baseline, in powers of ten."""
        if self.relative is not None:
            return self.relative
        if self.value is None or self.baseline is None:
            return None
        return self.value - self.baseline


def pair_alarms(events: Sequence[Event]) -> list[Episode]:
    """Every alarm as an episode, in the order of the record."""
    episodes: list[Episode] = []
    still_open: dict[tuple[str, str | None], int] = {}
    for event in events:
        key = (event.layer, event.parameter)
        before = still_open.get(key)
        if event.event == "alarm":
            # An alarm that turns into another, as vanishing into no gradient, is not cleared in between.
            if before is not None and not episodes[before].superseded:
                episodes[before] = replace(episodes[before], cleared_step=event.step, ended=CHANGED)
            still_open[key] = len(episodes)
            episodes.append(_episode(event))
        elif event.event == "alarm_cleared" and before is not None:
            del still_open[key]
            how = str(event.reason or IN_RANGE)
            episodes[before] = replace(episodes[before], cleared_step=event.step, ended=how)
    return episodes


def over_in_words(episode: Episode) -> str:
    """Whether the alarm is over, and how, in a few words: for captions and tooltips."""
    if episode.cleared_step is None:
        return "not cleared"
    how = {ACCEPTED: "new level accepted", CHANGED: "turned into another alarm"}.get(str(episode.ended))
    return f"{how or 'cleared'} at step {step_number(episode.cleared_step)}"


def _episode(event: Event) -> Episode:
    return Episode(
        layer=str(event.layer),
        diagnosis=str(event.diagnosis),
        step=event.step,
        since=int(event.since) if event.since is not None else event.step,
        cleared_step=None,
        ended=None,
        parameter=event.parameter,
        value=as_float(event.value),
        baseline=as_float(event.baseline),
        std=as_float(event.std),
        sigma=as_float(event.sigma),
        relative=as_float(event.relative),
        cause=event.cause,
        incident=None if event.incident is None else str(event.incident),
        superseded=bool(event.superseded),
    )


def as_float(value: object) -> float | None:
    """A number of an event; the record writes non-finite ones as strings."""
    return float(value) if isinstance(value, (int, float, str)) else None
