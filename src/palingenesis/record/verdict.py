"""One word on a run, from what its record holds and nothing else.

Worst first; the first that holds is the verdict:

    CRITICAL          a critical event
    NOT MONITORED     checks were made and none saw a gradient
    PARTLY MONITORED  some checks saw no gradient, some layers' gradients cannot be read, or a part of the
                      monitor failed
    WARNING           an event of severity warning
    INTERRUPTED       no end in the record, or an exception ended the run
    UNKNOWN           no check was made, no alarm could have fired, or events are missing from the record
    HEALTHY           none of these

Events whose steps were run again after a resume do not count, but the sentence mentions them. So it does
events that are missing, which also keep a run from being HEALTHY: nobody knows what they said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from palingenesis.events import Event

CRITICAL = "CRITICAL"
NOT_MONITORED = "NOT MONITORED"
PARTLY_MONITORED = "PARTLY MONITORED"
WARNING = "WARNING"
INTERRUPTED = "INTERRUPTED"
UNKNOWN = "UNKNOWN"
HEALTHY = "HEALTHY"

#: All of them, worst first.
WORDS = (CRITICAL, NOT_MONITORED, PARTLY_MONITORED, WARNING, INTERRUPTED, UNKNOWN, HEALTHY)

#: How the run ended is a verdict of its own, INTERRUPTED, and no finding about the model.
_ENDINGS = frozenset({"run_ended"})
#: Of events at the same step, what says most about where it began.
_TELLING_FIRST = ("incident", "alarm")
_LONGEST_ERROR = 160


class Verdict(NamedTuple):
    word: str
    sentence: str


def judge(
    events: Sequence[Event],
    checks: int,
    checks_without_gradients: int,
    judged: int,
    end: Mapping[str, Any] | None,
) -> Verdict:
    """The verdict on a run.

    Args:
        events: all events so far.
        checks: how many checks were made.
        checks_without_gradients: how many of them saw no gradient in any layer.
        judged: how many layers were judged; 0 unless at least ``consecutive`` checks judged some, since
            fewer cannot raise an alarm.
        end: ``end`` of run.json, ``None`` while the run has none.
    """
    word, fact = _decide(
        [event for event in events if not event.superseded], checks, checks_without_gradients, judged, end
    )
    parts = [fact]
    error = _error(end)
    if error is not None and word != INTERRUPTED:
        parts.append(f"the run then ended with {error}")
    rerun = sum(bool(event.superseded) and _is_bad(event) for event in events)
    if rerun:
        noun = "event" if rerun == 1 else "events"
        parts.append(f"{rerun} bad {noun} of steps that were run again after a resume not counted")
    return Verdict(word, "; ".join(parts))


def lacking(events: Sequence[Event], end: Mapping[str, Any] | None) -> str | None:
    """What a record's events lack by their own numbers and by the record's end; ``None`` if nothing.

    Args:
        events: all that could be read, in the order of the record.
        end: ``end`` of run.json.
    """
    counted, last_hash = (None, None) if end is None else (end.get("events"), end.get("last_hash"))
    numbers = [event.seq for event in events] + [counted]
    expected = max((number for number in numbers if isinstance(number, int)), default=0)
    missing = expected - len(events)
    if missing > 0:
        are = "is" if missing == 1 else "are"
        return f"{missing} of {_count(expected, 'event')} {are} missing from the record"
    if not events or events[0].event != "run_started":
        return "its beginning is missing from the record"
    if last_hash is not None and events[-1].hash != last_hash:
        return "the events in the record are not the ones that the run ended with"
    return None


def qualified(verdict: Verdict, lack: str | None) -> Verdict:
    """The verdict that is left where the record lacks something."""
    if lack is None:
        return verdict
    told = f"{lack}: run `pgs verify` on it"
    if verdict.word in (UNKNOWN, HEALTHY):
        return Verdict(UNKNOWN, told)
    return Verdict(verdict.word, f"{verdict.sentence}; {told}")


def _decide(
    events: Sequence[Event],
    checks: int,
    without: int,
    judged: int,
    end: Mapping[str, Any] | None,
) -> tuple[str, str]:
    critical = [event for event in events if event.severity == "critical"]
    if critical:
        return CRITICAL, _first(critical)
    unread = [
        event for event in events if event.event == "signal_unavailable" and event.signal == "gradient_norm"
    ]
    if checks and without >= checks and unread:
        return NOT_MONITORED, _first(unread)
    if checks and without >= checks:
        every = "the only check" if checks == 1 else f"none of the {checks} checks"
        seen = "saw no gradient" if checks == 1 else "saw a gradient"
        return NOT_MONITORED, f"{every} {seen}: was step() called before loss.backward()?"
    failed = [event for event in events if event.event == "monitor_error"]
    if failed:
        return PARTLY_MONITORED, _first(failed)
    if unread:
        return PARTLY_MONITORED, _first(unread)
    if without:
        return PARTLY_MONITORED, f"{without} of {checks} checks saw no gradient"
    warnings = [event for event in events if _is_bad(event)]
    if warnings:
        return WARNING, _first(warnings)
    return _without_findings(checks, judged, end, sum(bool(event.ordinary) for event in events))


def _without_findings(
    checks: int, judged: int, end: Mapping[str, Any] | None, ordinary: int
) -> tuple[str, str]:
    if end is None:
        return INTERRUPTED, "the record has no end: the run was killed, or is still running"
    error = _error(end)
    if error is not None:
        return INTERRUPTED, f"the run ended with {error} after {_count(end.get('steps'), 'step')}"
    length = _count(end.get("steps"), "step")
    if not checks:
        return UNKNOWN, f"no check was made: the run ended after {length}, before the first check"
    if not judged:
        return UNKNOWN, (
            f"still warming up after {length}: {_count(checks, 'check')} did not judge any layer "
            "often enough, so no alarm could have fired"
        )
    rang = f"only {_count(ordinary, 'warning')} that is ordinary in training from scratch"
    if ordinary > 1:
        rang = f"only {_count(ordinary, 'warning')} that are ordinary in training from scratch"
    return HEALTHY, f"{_count(checks, 'check')} in {length}, and {rang if ordinary else 'nothing rang'}"


def _is_bad(event: Event) -> bool:
    return event.severity != "info" and event.event not in _ENDINGS and not event.ordinary


def _first(events: Sequence[Event]) -> str:
    """What happened first, and how much more did."""
    step = min(event.step for event in events)
    together = [event for event in events if event.step == step]
    telling = [event for name in _TELLING_FIRST for event in together if event.event == name]
    first = (telling or together)[0]
    text = _describe(first)
    more = len(events) - 1
    return f"{text} (and {more} more)" if more else text


def _describe(event: Event) -> str:
    return f"step {event.step}: {_one_line(event.message)}"


def _error(end: Mapping[str, Any] | None) -> str | None:
    if end is None or end.get("reason") != "exception":
        return None
    return _one_line(str(end.get("error") or "an exception"))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_ERROR else line[: _LONGEST_ERROR - 1] + "…"


def _count(number: Any, noun: str) -> str:
    if not isinstance(number, int):
        return f"an unknown number of {noun}s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
