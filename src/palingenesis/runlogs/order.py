"""The order of steps: rows that several ranks wrote, and runs that began again."""

from __future__ import annotations

import numpy as np

from palingenesis.record.columns import Bools, Floats, Ints
from palingenesis.runlogs.table import Restart

#: Rows of several ranks with one step stand within so many of each other.
_NEAR_ROWS = 64
#: Steps that a rank's lines may come later than another's.
_MOST_LAG = 3
#: Rows are out of order if their steps go back by fewer intervals.
_OUT_OF_ORDER = 1.5
#: Ranks write every step; a share of repeated steps below this is something else.
_REPEATED_SHARE = 0.5


def repeated_rows(step: Floats, training: Bools) -> tuple[Bools, int]:
    """Rows of training whose step stands close before already, where most steps do; and how many times "
    "they do."""
    none = np.zeros(len(step), np.bool_)
    index = np.flatnonzero(training)
    if len(index) < 4:
        return none, 1
    steps = step[index]
    order = np.argsort(steps, kind="stable")
    same = (np.diff(steps[order]) == 0) & (np.diff(order) <= _NEAR_ROWS)
    if np.count_nonzero(same) < _REPEATED_SHARE * (len(steps) - np.count_nonzero(same)):
        return none, 1
    # A rank may lag a little behind the others; a run that began again comes from far ahead.
    highest = _highest_between(steps, order[:-1][same], order[1:][same])
    apart = np.diff(np.unique(steps))
    lag = _MOST_LAG * (float(np.median(apart)) if len(apart) else 1.0)
    near = order[1:][same][highest <= steps[order[1:][same]] + lag]
    distinct = len(steps) - len(near)
    if len(near) < _REPEATED_SHARE * distinct:
        return none, 1
    none[index[near]] = True
    return none, max(2, round(len(steps) / distinct))


def _highest_between(steps: Floats, first: Ints, last: Ints) -> Floats:
    """The highest value from each first to each last place, both included, which are near each other."""
    highest = np.maximum(steps[first], steps[last])
    length = last - first + 1
    level, size = steps, 1  # the highest of each `size` values
    while size <= _NEAR_ROWS and len(level) > size:
        which = (length >= size) & (length < 2 * size)
        highest[which] = np.maximum(level[first[which]], level[last[which] - size + 1])
        level, size = np.maximum(level[:-size], level[size:]), 2 * size
    return highest


def find_restarts(step: Floats, training: Bools) -> tuple[Restart, ...]:
    """Where the steps of training go back, and go on from there."""
    index = np.flatnonzero(training)
    steps = step[index]
    if len(steps) < 2:
        return ()
    change = np.diff(steps)
    forward = change[change > 0]
    interval = float(np.median(forward)) if len(forward) else 1.0
    found: list[Restart] = []
    start, highest = 0, steps[0]
    checked = 1
    for place in (np.flatnonzero(change < 0) + 1).tolist():
        highest = max(highest, float(np.max(steps[checked - 1 : place])))
        checked = place + 1
        # One row out of order is no restart; a step that was there already is.
        if steps[place] > highest - _OUT_OF_ORDER * interval and not np.any(
            steps[max(start, place - _NEAR_ROWS) : place] == steps[place]
        ):
            continue
        row = _with_rows_before(step, training, int(index[place]))
        found.append(Restart(row, float(highest), float(min(step[row : index[place] + 1]))))
        start, highest = place, steps[place]
    return tuple(found)


def _with_rows_before(step: Floats, training: Bools, row: int) -> int:
    """An evaluation that the restarted run made before its first row of training belongs to it."""
    while row > 0 and not training[row - 1] and step[row - 1] <= step[row]:
        row -= 1
    return row
