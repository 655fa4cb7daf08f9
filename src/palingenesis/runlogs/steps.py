"""Steps of a log that has none: from epochs and the progress bar, else counted."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from palingenesis.record.columns import Bools, Floats, Ints
from palingenesis.runlogs import names
from palingenesis.runlogs.cells import Cells


def inferred_steps(cells: Cells, key: Ints, training: Bools) -> Floats:
    """A step for every row.

    Rows of training are taken as evenly spaced; the others have the step of the one before. How far they are
    apart is worked out from the progress bar, where there is one; else each counts as one step. Where epochs
    go back the run began again, and so do the steps.
    """
    index = np.flatnonzero(training)
    epoch = _of_rows(cells, names.EPOCH, key)[index]
    every = _interval(cells, key[index], epoch)
    counted = _counted(epoch) * every
    steps = np.zeros(len(key))
    place = np.searchsorted(index, np.arange(len(key)), "right") - 1
    known = place >= 0
    steps[known] = counted[place[known]]
    return steps


def _of_rows(cells: Cells, name: str, key: Ints) -> Floats:
    keys, values = cells.column(name)
    found = np.full(len(key), np.nan)
    if len(keys):
        place = np.searchsorted(keys, key)
        inside = place < len(keys)
        same = np.zeros(len(key), np.bool_)
        same[inside] = keys[place[inside]] == key[inside]
        found[same] = values[place[same]]
    return found


def _counted(epoch: Floats) -> Floats:
    """1, 2, 3, …; where the epoch goes back, on from the row that had it first."""
    counted = np.arange(1, len(epoch) + 1, dtype=np.float64)
    known = np.isfinite(epoch)
    if not known.all():
        return counted
    if not np.any(np.diff(epoch) < 0):
        return counted
    # What counts so far, by epoch: a return cuts off what came after it.
    epochs: list[float] = []
    steps: list[float] = []
    for row, value in enumerate(epoch.tolist()):
        if epochs and value < epochs[-1]:
            place = bisect_left(epochs, value)
            first = steps[place]
            del epochs[place:], steps[place:]
        else:
            first = steps[-1] + 1 if steps else 1.0
        epochs.append(value)
        steps.append(first)
        counted[row] = first
    return counted


def _interval(cells: Cells, key: Ints, epoch: Floats) -> int:
    """Steps from one row to the next, by a progress bar that moves with them; 1 where none is known."""
    keys, bars = cells.column(names.BAR)
    known = np.isfinite(epoch) & (epoch > 0)
    if not len(keys) or np.count_nonzero(known) < 2:
        return 1
    place = np.searchsorted(keys, key[known], "right") - 1
    seen = place >= 0
    rises = np.diff(epoch[known])
    rises = rises[rises >= 0]
    if not seen.any() or not np.any(rises > 0):
        return 1
    # The bar lags behind, it never runs ahead; epochs are rounded, which matters least where they are large.
    epochs = epoch[known][seen]
    late = epochs >= epochs.max() / 2
    steps_per_epoch = float(np.max((bars[place[seen]] / epochs)[late]))
    return max(1, round(steps_per_epoch * float(np.mean(rises))))
