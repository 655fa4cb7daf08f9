"""Steps that a log says were skipped: how many, of how many, and which gradient norms are theirs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from palingenesis.record.columns import Bools
from palingenesis.runlogs.table import Column, LogEvent, RunLog

#: What tells of a step that did not change the weights.
KINDS = ("skipped", "overflow")
#: Cumulative counts of skipped steps.
_COUNTS = ("train/skipped_steps", "train/spikes_skipped")
#: Which process tells it.
_RANK = re.compile(r"rank[ _=:]?\s?(\d{1,6})", re.IGNORECASE)
#: A norm that was finite in none of so many last rows is lost, whatever is skipped.
_LAST_ROWS = 10


class Skips(NamedTuple):
    """Steps that did not change the weights."""

    steps: int
    at: tuple[float, ...]
    """Steps of the rows that messages of skips stand with."""
    of: float
    """Steps so far; 0 where nothing is known of them."""
    at_most: bool
    """A row stands for several steps, nobody knows how many: there are ``of`` at least."""


def skips_of(log: RunLog) -> Skips:
    """What a log tells of skipped steps.

    Two messages of one step (an overflow, and that it is skipped; those of several ranks) are one. Between
    two rows that are ten steps apart there can be ten.
    """
    told = [event for event in log.events if event.kind in KINDS]
    by_row: dict[float | None, list[LogEvent]] = defaultdict(list)
    for event in told:
        by_row[event.step].append(event)
    # Without steps and a progress bar, rows are counted, and any number of steps may lie between them.
    counted = log.step_inferred and log.total_steps is None
    gap = np.inf if counted else _gap(log)
    at = sorted(step for step in by_row if step is not None)
    counts = [min(_distinct(by_row[step]), gap) for step in at]
    count = int(sum(counts)) + (_distinct(by_row[None]) if None in by_row else 0)
    for name in _COUNTS:
        column = log.live(name).finite
        count = max(count, int(column.value[-1]) if column else 0)
    last = log.last_step or 0.0
    return Skips(count, tuple(at), last * max([1, *counts]) if counted else last, counted)


def _gap(log: RunLog) -> float:
    """Steps from one row to the next, as a rule."""
    apart = np.diff(log.live(log.loss_name).step)
    return max(float(np.median(apart)), 1.0) if len(apart) else np.inf


def _distinct(events: Iterable[LogEvent]) -> int:
    """How many steps they tell of: as many as one process told in one way."""
    ways = Counter((event.kind, rank[1] if (rank := _RANK.search(event.text)) else "") for event in events)
    return max(ways.values(), default=0)


def scaled_away(log: RunLog, norms: Column) -> bool:
    """Whether all gradient norms that are not finite are those of steps that a loss scale skipped.

    These are the first ones, in which the scale finds its level, and such as the log tells of.
    """
    bad = ~np.isfinite(norms.value)
    if bad[-_LAST_ROWS:].all():
        return False
    told = [event.step for event in log.events if event.kind in KINDS and event.step is not None]
    for name in _COUNTS:
        column = log.live(name).finite
        told += column.step[np.diff(column.value, prepend=0.0) > 0].tolist()
    return bool(np.all(_at_start(bad)[bad] | np.isin(norms.step[bad], told)))


def _at_start(bad: Bools) -> Bools:
    """The values before the first good one."""
    good = np.flatnonzero(~bad)
    return np.arange(len(bad)) < (good[0] if len(good) else len(bad))
