"""What went wrong on the way: numbers that are none, steps that were skipped, messages, starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from palingenesis.findings.skips import scaled_away, skips_of
from palingenesis.findings.status.limits import StatusLimits
from palingenesis.runlogs.table import LogEvent, RunLog

#: The exponential of a loss is infinite long before the loss is.
_DERIVED = ("ppl", "perplexity")
#: Numbers whose meaning is not known, and who may say "none" by NaN.
_UNKNOWN = "other/"
_NORM = "grad_norm"
#: What makes a warning of some library one about the run. Others tell programmers of things to come.
_ABOUT_THE_RUN = re.compile(
    r"out of memory|\boom\b|alloc|\bnan\b|\binf\b|non-?finite|overflow|underflow|diverg|spike|skipp"
    r"|time[d ]?-?out|watchdog|nccl|sigterm|sigkill|killed|\becc\b|\bxid\b|corrupt|stall|preempt",
    re.IGNORECASE,
)
#: Formats of our own records and logs begin with this.
_OWN = "palingenesis"
_DIGITS = re.compile(r"\d+")
#: Characters of a message that are shown.
_LONGEST = 240


@dataclass(frozen=True)
class NonFinite:
    """A metric that was no number."""

    metric: str
    first_step: float
    last_step: float
    count: int
    still: bool
    """Its last value is one."""
    ordinary: bool
    """A gradient norm at steps that a loss scale skipped: the first ones, or such as the log tells of."""


@dataclass(frozen=True)
class Skipped:
    """Steps that did not change the weights."""

    count: int
    share: float
    """Of the steps so far; the first ones, in which a loss scale finds its level, are left out."""
    at_most: bool = False
    """The share is the most that it can be: rows are counted, and may each stand for several steps."""


@dataclass(frozen=True)
class Message:
    """A kind of message, told once."""

    text: str
    count: int
    first_step: float | None
    last_step: float | None


def nonfinite(log: RunLog) -> tuple[NonFinite, ...]:
    """Every metric that was no number, the earliest first."""
    found = []
    for name in log.columns:
        column = log.live(name)
        bad = ~np.isfinite(column.value)
        if name.endswith(_DERIVED) or not bad.any():
            continue
        steps = column.step[bad]
        ordinary = _NORM in name and scaled_away(log, column)
        found.append(
            NonFinite(name, float(steps[0]), float(steps[-1]), int(bad.sum()), bool(bad[-1]), ordinary)
        )
    # Of one row, what training is about comes first.
    order = {"train": 0, "eval": 1, "health": 2}
    return tuple(sorted(found, key=lambda one: (one.first_step, order.get(one.metric.split("/")[0], 3))))


def known(one: NonFinite) -> bool:
    """Whether it is known what the metric means."""
    return not one.metric.startswith(_UNKNOWN)


def skipped(log: RunLog, limits: StatusLimits) -> Skipped:
    """Steps that were skipped, by what the log says of them."""
    found = skips_of(log)
    if not found.steps or found.of <= 0:
        return Skipped(found.steps, 0.0, found.at_most)
    share = found.steps / found.of
    if share < limits.skipped_most:
        share = max(found.steps - _at_first(found.at), 0) / found.of
    return Skipped(found.steps, min(share, 1.0), found.at_most)


def _at_first(at: Sequence[float]) -> int:
    """How many steps without a gap were skipped from the beginning on."""
    length = 0
    while length < len(at) and at[length] <= length + 1:
        length += 1
    return length


def messages(events: tuple[LogEvent, ...]) -> tuple[Message, ...]:
    """Messages that differ by more than their numbers, the most recent last."""
    groups: dict[str, list[LogEvent]] = {}
    for event in events:
        key = _DIGITS.sub("#", event.text)
        groups.setdefault(key, []).append(event)
    return tuple(
        Message(_shown(group[-1].text), len(group), group[0].step, group[-1].step)
        for group in sorted(groups.values(), key=lambda group: group[-1].line)
    )


def _shown(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rstrip()}…"


def errors(log: RunLog) -> tuple[Message, ...]:
    return messages(tuple(event for event in log.events if event.kind == "error"))


def warnings(log: RunLog) -> tuple[Message, ...]:
    """Warnings about the run: all of our own, and those of other programs that tell of its health."""
    own = _own(log)
    return messages(
        tuple(e for e in log.events if e.kind == "warning" and (own or _ABOUT_THE_RUN.search(e.text)))
    )


def remarks(log: RunLog) -> tuple[Message, ...]:
    """All other warnings."""
    own = _own(log)
    return messages(
        tuple(e for e in log.events if e.kind == "warning" and not own and not _ABOUT_THE_RUN.search(e.text))
    )


def _own(log: RunLog) -> bool:
    return log.format.startswith(_OWN)


def crash_loop(log: RunLog, limits: StatusLimits) -> bool:
    """Whether the last starts got no further than the one before them."""
    reached = [restart.from_step for restart in log.restarts[-limits.loop :]]
    if len(reached) < limits.loop or log.last_step is None:
        return False
    return max(reached[1:]) <= reached[0] and log.last_step <= reached[0]
