"""What came first: the warnings and critical events of a run in the order in which they *began*.

An alarm is written at its second check out of range, so its place in the record is not its place in the
story. Here each is put at its onset, and the alarms of one incident are told as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palingenesis.events import Event
from palingenesis.report.episodes import CHANGED, DIAGNOSES, Episode
from palingenesis.report.words import Name, Sentence, count, step_number, times

_LONG_MESSAGE = 400
_TOLD_ELSEWHERE = {"run_ended", "alarm", "incident"}


@dataclass(frozen=True)
class Moment:
    """One thing that went wrong, at the step where it began."""

    onset: int
    severity: str
    kind: str
    sentence: Sentence
    layer: str | None
    events: int = 1
    """How many events of the record it stands for."""


def what_came_first(events: Sequence[Event], episodes: Sequence[Episode]) -> list[Moment]:
    """All moments, the earliest onset first; at one step, in the order of the record.

    Those of steps that were run again after a resume are left out, as they are from the verdict.
    """
    moments: list[Moment] = []
    told: set[str] = set()
    alarms = iter(episodes)
    for event in events:
        if event.event == "alarm":
            episode = next(alarms)
            if episode.superseded:
                continue
            if episode.incident is None:
                moments.append(_of_alarm(episode))
            elif episode.incident not in told:
                told.add(episode.incident)
                moments.append(_of_incident(episode.incident, events, episodes))
        elif _is_moment(event):
            moments.append(_of_event(event))
    # A stable sort: things that began at the same step stay in the order of the record.
    return sorted(moments, key=lambda moment: moment.onset)


def _is_moment(event: Event) -> bool:
    if event.superseded or event.ordinary:
        return False
    return event.severity != "info" and event.event not in _TOLD_ELSEWHERE


def _of_alarm(episode: Episode) -> Moment:
    return Moment(
        onset=episode.since,
        severity="warning",
        kind="alarm",
        sentence=tell_alarm(episode),
        layer=episode.layer,
    )


def _of_incident(incident: str, events: Sequence[Event], episodes: Sequence[Episode]) -> Moment:
    members = [episode for episode in episodes if episode.incident == incident and not episode.superseded]
    summary = next(
        (e for e in events if e.event == "incident" and e.incident == incident and not e.superseded), None
    )
    named = None if summary is None else summary.origin
    origin = first_to_look_at(members, named)
    sentence = tell_alarm(origin)
    others = len(members) - 1
    if others:
        sentence += (
            f" {count(others, 'more layer')} left their range in the same incident."
            if others > 1
            else " One more layer left its range in the same incident.",
        )
    if summary is not None and summary.why and origin.layer == named:
        why = _in_words(str(summary.why)).rstrip(".")
        sentence += (" Look first at ", Name(origin.layer), f": {why}.")
    return Moment(
        onset=min(episode.since for episode in members),
        severity="warning",
        kind="incident",
        sentence=sentence,
        layer=origin.layer,
        events=len(members) + (summary is not None),
    )


def first_to_look_at(members: Sequence[Episode], origin: object) -> Episode:
    """Of an incident's alarms the one of its ``origin``; where that has none, the one that began first."""
    return next((e for e in members if e.layer == origin), min(members, key=lambda e: e.since))


def _of_event(event: Event) -> Moment:
    message = str(event.message)
    if len(message) > _LONG_MESSAGE:
        message = message[:_LONG_MESSAGE] + "…"
    return Moment(
        onset=event.step,
        severity=event.severity,
        kind=event.event,
        sentence=_set_apart(event.layer, message),
        layer=layer_of(event),
    )


def layer_of(event: Event) -> str | None:
    """The layer that an event is about; of several the one to look at first."""
    layer = event.layer
    if event.event == "incident":
        layer = event.origin
    elif event.event == "unconfirmed" and event.layers:
        layer = event.layers[0]
    return None if layer is None else str(layer)


def tell_alarm(episode: Episode) -> Sentence:
    """One alarm as a sentence that says what, where and when, and whether it is over."""
    layer: Sentence = (Name(episode.layer),)
    if episode.parameter:
        layer += (" (its ", Name(episode.parameter), ")")
    if episode.diagnosis in _MOVES:
        return ("The gradient of ", *layer, " ", *_what_happened(episode))
    return (*layer, " ", *_what_happened(episode))


def tell_briefly(episode: Episode) -> Sentence:
    """The same where the layer is named already."""
    subject: Sentence = ("Its ", Name(episode.parameter), " ") if episode.parameter else ("It ",)
    return (*subject, *_what_happened(episode))


_MOVES = {"vanishing": "fell to", "exploding": "rose to"}


def _what_happened(episode: Episode) -> Sentence:
    since = step_number(episode.since)
    if episode.diagnosis == "never_trained":
        told = "is meant to train but had no gradient in the whole warm-up"
    elif episode.diagnosis == "no_gradient" and episode.cleared_step is None:
        told = f"has had no gradient since step {since}"
    elif episode.diagnosis == "no_gradient":
        told = f"had no gradient from step {since}"
    else:
        went = _MOVES.get(episode.diagnosis, episode.diagnosis)
        far = "a level far from" if episode.decades is None else times(episode.decades)
        told = f"{went} {far} its own baseline at step {since}"
    return (told, _how_it_went(episode))


def _how_it_went(episode: Episode) -> str:
    alarm = "" if episode.step == episode.since else f"; the alarm came at step {step_number(episode.step)}"
    if episode.cleared_step is None:
        return alarm + " and was not cleared." if alarm else ", and this was not cleared."
    if episode.accepted:
        end = f"the new level was accepted at step {step_number(episode.cleared_step)}"
    elif episode.ended == CHANGED:
        end = f"turned into another alarm at step {step_number(episode.cleared_step)}"
    else:
        end = f"was cleared at step {step_number(episode.cleared_step)}"
    return f"{alarm} and {end}." if alarm else f"; this {end}."


def diagnosis_in_words(diagnosis: str) -> str:
    """A diagnosis as a table shows it."""
    return DIAGNOSES.get(diagnosis, diagnosis.replace("_", " "))


def _set_apart(layer: str | None, message: str) -> Sentence:
    """A message as a sentence; a layer's name that it opens with stays as it is written."""
    if layer and message.startswith(f"{layer}: "):
        return (Name(layer), ": " + _ended(message[len(layer) + 2 :]))
    return (_as_sentence(message),)


def _in_words(text: str) -> str:
    for diagnosis, words in DIAGNOSES.items():
        text = text.replace(diagnosis, words)
    return text


def _as_sentence(text: str) -> str:
    ended = _ended(text)
    return ended[:1].upper() + ended[1:]


def _ended(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?", "…")) or not text else text + "."
