"""What the timeline marks below the loss: alarms with their span, and all other events at their step.

Alarms of one incident are one mark, which says at which layer to look first. Other alarms that began and
ended together share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palingenesis.events import Event
from palingenesis.report.conclusions import anchor_of, title_of
from palingenesis.report.episodes import Episode, over_in_words
from palingenesis.report.facts import Facts
from palingenesis.report.moments import diagnosis_in_words, first_to_look_at, layer_of
from palingenesis.report.words import step_number, tail, visible

_WIDE_LABEL, _NARROW_LABEL = 30, 14

#: Events of alarms, by layer, step and diagnosis.
_Places = Mapping[tuple[str, int, str], int]

_FINDINGS_LANE = "Findings"
_ALARM_LANE = "Layer alarms"
_BOUNDS_LANE = "Weights and outputs"
_RANKS_LANE = "Ranks"
#: From top to bottom.
LANES = (
    _FINDINGS_LANE,
    _ALARM_LANE,
    "Not finite",
    "Loss",
    "Gradients between checks",
    "Gradients",
    _BOUNDS_LANE,
    _RANKS_LANE,
    "Skipped steps",
    "Run",
)

_ENDINGS = {
    "nonfinite": "nonfinite_cleared",
    "loss_spike": "loss_recovered",
    "bound_crossed": "bound_cleared",
    "rank_outlier": "rank_outlier_cleared",
}
_LANE_OF = {
    "unconfirmed": _ALARM_LANE,
    "nonfinite": "Not finite",
    "loss_spike": "Loss",
    "loss_level_shift": "Loss",
    "gradient_spike": "Gradients between checks",
    "no_gradients": "Gradients",
    "global_shift": "Gradients",
    "level_shift": "Gradients",
    "clipped_gradients": "Gradients",
    "bound_at_start": _BOUNDS_LANE,
    "bound_crossed": _BOUNDS_LANE,
    "rank_outlier": _RANKS_LANE,
    "replica_divergence": _RANKS_LANE,
    "skipped_step": "Skipped steps",
    "skipped_steps": "Skipped steps",
    "not_optimized": "Run",
    "parameters_changed": "Run",
    "run_resumed": "Run",
    "run_ended": "Run",
    "monitor_error": "Run",
}
_LABELS = {"nonfinite": "not finite", "replica_divergence": "replicas differ"}
# Their label begins with the layer they are about.
_OF_A_LAYER = {"unconfirmed", "bound_at_start", "bound_crossed", "rank_outlier", "replica_divergence"}
_USUAL_END = ("run_ended", "info")


@dataclass
class Mark:
    """One mark of the timeline."""

    lane: str
    severity: str
    start: float
    end: float | None
    """None for something that happened at one step."""
    label: str
    short_label: str
    title: str
    events: int = 1
    accepted: bool = False
    """It ended because the monitor took the new level for normal."""
    place: int | None = None
    """Of the first event that it stands for, among those of the record."""
    href: str | None = None
    """Where the page says more."""


def marks_of(facts: Facts, start: float, end: float) -> list[Mark]:
    """Everything that is marked on the axis from ``start`` to ``end``."""
    episodes = [episode for episode in facts.episodes if not episode.superseded]
    places = _places_of_alarms(facts)
    marks = [
        *_of_findings(facts, start),
        *_of_incidents(facts, episodes, end, places),
        *_of_alarms(episodes, end, places),
    ]
    for index, event in enumerate(facts.events):
        lane = _LANE_OF.get(event.event)
        if lane is None or event.superseded or (event.event, event.severity) == _USUAL_END:
            continue
        last = _end_of(facts.events, index, end)
        words = f"step {step_number(event.step)}: {visible(event.message, 300)}"
        what = _what(event)
        layer = layer_of(event) if event.event in _OF_A_LAYER else None
        label = what if layer is None else f"{visible(layer, _WIDE_LABEL)}, {what}"
        # What was so before the first step is marked where the axis begins.
        at = max(float(event.step), start)
        severity = "info" if event.ordinary else event.severity
        marks.append(Mark(lane, severity, at, last, label, tail(what, _NARROW_LABEL), words, place=index))
    return marks


def _of_findings(facts: Facts, start: float) -> list[Mark]:
    """Conclusions that belong to a step."""
    return [
        Mark(
            _FINDINGS_LANE,
            finding.severity,
            max(float(finding.since), start),
            None,
            title_of(finding.check),
            tail(finding.check.partition(".")[2].replace("_", " "), _NARROW_LABEL),
            f"from step {step_number(finding.since)}: {visible(finding.message, 300)}",
            href=f"#{anchor_of(finding.check)}",
        )
        for finding in facts.findings
        if finding.since is not None and finding.severity != "info"
    ]


def _places_of_alarms(facts: Facts) -> dict[tuple[str, int, str], int]:
    """The event of each alarm, by its layer, step and diagnosis."""
    return {
        (str(event.layer), event.step, str(event.diagnosis)): place
        for place, event in enumerate(facts.events)
        if event.event == "alarm" and not event.superseded
    }


def _what(event: Event) -> str:
    """What a label says happened."""
    if event.event in ("bound_crossed", "bound_at_start"):
        return diagnosis_in_words(str(event.diagnosis))
    if event.event == "rank_outlier":
        return f"rank {event.rank} apart"
    return _LABELS.get(event.event, event.event.replace("_", " "))


def _of_incidents(facts: Facts, episodes: Sequence[Episode], end: float, places: _Places) -> list[Mark]:
    origins = {e.incident: e.origin for e in facts.of_kind("incident") if not e.superseded}
    together: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.incident is not None:
            together.setdefault(episode.incident, []).append(episode)
    return [_of_incident(members, origins.get(name), end, places) for name, members in together.items()]


def _of_incident(members: Sequence[Episode], origin: object, end: float, places: _Places) -> Mark:
    first = first_to_look_at(members, origin)
    ends = [end if e.cleared_step is None else float(e.cleared_step) for e in members]
    return Mark(
        _ALARM_LANE,
        "warning",
        min(e.since for e in members),
        max(ends),
        f"look first at {visible(first.layer, _WIDE_LABEL)}",
        tail(first.layer, _NARROW_LABEL),
        f"Incident; look first at {_told(first)}",
        events=len(members),
        accepted=all(e.accepted for e in members),
        place=places.get((first.layer, first.step, first.diagnosis)),
    )


def _of_alarms(episodes: Sequence[Episode], end: float, places: _Places) -> list[Mark]:
    marks: dict[tuple[object, ...], Mark] = {}
    for episode in episodes:
        if episode.incident is not None:
            continue
        key = (episode.since, episode.step, episode.cleared_step, episode.ended, episode.diagnosis)
        if key in marks:
            marks[key].events += 1
            continue
        marks[key] = Mark(
            _ALARM_LANE,
            "warning",
            episode.since,
            end if episode.cleared_step is None else episode.cleared_step,
            f"{visible(episode.layer, _WIDE_LABEL)}, {diagnosis_in_words(episode.diagnosis)}",
            tail(episode.layer, _NARROW_LABEL),
            _told(episode),
            accepted=episode.accepted,
            place=places.get((episode.layer, episode.step, episode.diagnosis)),
        )
    return list(marks.values())


def _told(episode: Episode) -> str:
    return (
        f"{visible(episode.layer)}: {diagnosis_in_words(episode.diagnosis)} from step "
        f"{step_number(episode.since)}, alarm at step {step_number(episode.step)}, {over_in_words(episode)}"
    )


def _end_of(events: tuple[Event, ...], index: int, end: float) -> float | None:
    event = events[index]
    ending = _ENDINGS.get(event.event)
    if ending is None:
        return None
    left = _subjects(event)
    for later in events[index + 1 :]:
        if later.event != ending or later.superseded:
            continue
        if not left and later.since in (None, event.step):
            return float(later.step)
        if left:
            left -= _subjects(later)
            if not left:
                return float(later.step)
    return end


def _subjects(event: Event) -> set[str]:
    """What an event is about, where one may tell of several that end at steps of their own."""
    if event.outliers:
        return {str(outlier) for outlier in event.outliers}
    return {str(metric) for metric in event.values or ([event.metric] if event.metric else [])}
