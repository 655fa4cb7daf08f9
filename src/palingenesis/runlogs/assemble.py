"""Cells become the table: rows numbered, steps settled, ranks told apart, restarts found."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from palingenesis.record.columns import Bools, Floats, Ints
from palingenesis.runlogs import names
from palingenesis.runlogs.cells import Cells
from palingenesis.runlogs.happenings import is_fatal
from palingenesis.runlogs.order import find_restarts, repeated_rows
from palingenesis.runlogs.steps import inferred_steps
from palingenesis.runlogs.table import Column, EventKind, LogEvent, LossKind, Restart, RunLog

#: Bits of a key below the line number: parts of a line between carriage returns.
PART_BITS = 24
#: Steps above this are no steps.
_HIGHEST_STEP = 1e15
#: Decimals that are looked for in written losses; values with more are taken as exact.
_MOST_DECIMALS = 6
#: Losses that are looked at for it.
_ENOUGH_LOSSES = 2000


@dataclass
class Facts:
    """What is known of a log besides its numbers."""

    source: str
    format: str = ""
    loss_kind: LossKind = "unknown"
    cannot_show: tuple[str, ...] = ()
    has_lines: bool = True
    ended: bool = False
    ended_key: int | None = None
    """Of the line that says that training has ended; a row of training behind it is of another run."""
    total_steps: int | None = None
    lines: int = 0
    unread: int = 0
    happened: list[tuple[EventKind, int, str]] = field(default_factory=list)
    """Kind, key and text."""


@dataclass
class _Rows:
    """Everything that all rows have."""

    key: Ints
    step: Floats
    training: Bools
    inferred: bool
    processes: int = 1


def assemble(cells: Cells, facts: Facts) -> RunLog:
    """The table of all that was read."""
    rows = _rows(cells)
    keep = np.ones(len(rows.key), np.bool_)
    drop, processes = _of_other_ranks(cells, rows)
    keep &= ~drop
    rows = _Rows(rows.key[keep], rows.step[keep], rows.training[keep], rows.inferred, processes)
    restarts = find_restarts(rows.step, rows.training)
    columns = _columns(cells, rows)
    total = facts.total_steps if facts.total_steps is not None else _total(cells)
    last = float(np.nanmax(rows.step)) if len(rows.step) else None
    if total is not None and last is not None and last > total:
        total = None  # a bar of something else
    losses = columns.get(names.LOSS) or columns.get(names.CE)
    started, ended = _times(cells)
    return RunLog(
        source=facts.source,
        format=facts.format,
        columns=columns,
        rows=len(rows.key),
        step_inferred=rows.inferred,
        total_steps=total,
        finished=_finished(facts, rows, total, last),
        started=started,
        ended=ended,
        loss_kind=facts.loss_kind,
        resolution=None if losses is None else resolution_of(losses.value),
        cannot_show=facts.cannot_show,
        events=_events(facts, rows, restarts),
        restarts=restarts,
        processes=rows.processes,
        lines=facts.lines,
        unread=facts.unread,
    )


def _rows(cells: Cells) -> _Rows:
    metrics = [name for name in cells.names() if name not in names.PLACES or name == names.SKIPPED_NOW]
    key = _united([cells.column(name)[0] for name in metrics])
    training = np.zeros(len(key), np.bool_)
    for name in (names.LOSS, names.CE):
        training |= np.isfinite(_spread(cells, name, key, present=True))
    if not training.any():
        training[:] = True
    step = _spread(cells, names.STEP, key)
    step[~((step >= 0) & (step < _HIGHEST_STEP))] = np.nan
    if np.isfinite(step).any():
        return _Rows(key, _filled(step), training, inferred=False)
    return _Rows(key, inferred_steps(cells, key, training), training, inferred=True)


def _united(keys: list[Ints]) -> Ints:
    """All keys once, in order. Most columns have the same ones, so sorting them all is seldom needed."""
    key = max(keys, key=len, default=np.empty(0, dtype=np.int64))
    for one in keys:
        if len(one) and not _are_in(one, key):
            key = np.union1d(key, one)
    return key


def _are_in(some: Ints, key: Ints) -> bool:
    return bool(np.all(_places(some, key)[1]))


def _places(some: Ints, key: Ints) -> tuple[Ints, Bools]:
    """Where some keys are among all, of which there is one at least; and which of them are there."""
    if len(some) == len(key) and np.array_equal(some, key):  # most columns: no need to search
        return np.arange(len(key)), np.ones(len(key), np.bool_)
    place = np.minimum(np.searchsorted(key, some), len(key) - 1)
    return place, key[place] == some


def _spread(cells: Cells, name: str, key: Ints, *, present: bool = False) -> Floats:
    """A value for each row, NaN where it has none; ``present`` puts 1 in place of any value."""
    keys, values = cells.column(name)
    spread = np.full(len(key), np.nan)
    if len(keys) and len(key):
        place, same = _places(keys, key)
        spread[place[same]] = 1.0 if present else values[same]
    return spread


def _filled(step: Floats) -> Floats:
    """Rows without a step have that of the row before; those before the first have 0, or the first's."""
    known = np.isfinite(step)
    last = np.maximum.accumulate(np.where(known, np.arange(len(step)), -1))
    filled = np.where(last >= 0, step[np.maximum(last, 0)], 0.0)
    return np.asarray(filled, dtype=np.float64)


def _of_other_ranks(cells: Cells, rows: _Rows) -> tuple[Bools, int]:
    """Rows that another rank wrote as well, and how many ranks there are."""
    rank = _spread(cells, names.RANK, rows.key)
    known = np.unique(rank[np.isfinite(rank) & rows.training])
    if len(known) > 1:
        return np.isfinite(rank) & (rank != known[0]), len(known)
    if rows.inferred:
        return np.zeros(len(rows.key), np.bool_), 1
    return repeated_rows(rows.step, rows.training)


def _columns(cells: Cells, rows: _Rows) -> dict[str, Column]:
    columns = {}
    known = cells.names()
    for name in known:
        if name in names.PLACES and name not in (names.SKIPPED_NOW, names.TIME, names.ELAPSED):
            continue
        keys, values = cells.column(name)
        if name == names.ELAPSED:
            if names.TIME in known:
                continue
            name = names.TIME  # how far rows are apart is known, and not when they were
        if name == names.SKIPPED_NOW:
            name, values = names.SKIPPED, np.cumsum(np.nan_to_num(values))
        if not len(rows.key):
            continue
        place, kept = _places(keys, rows.key)
        if kept.any():
            place = place[kept]
            columns[name] = Column(place, rows.step[place], values[kept])
    return columns


def _total(cells: Cells) -> int | None:
    """How many steps the run was to have: as said, else by the first progress bar."""
    for name in (names.TOTAL, names.BAR_END):
        _, values = cells.column(name)
        values = values[(values > 0) & (values < _HIGHEST_STEP)]
        if len(values):
            return int(values[-1] if name == names.TOTAL else values[0])
    return None


def _finished(facts: Facts, rows: _Rows, total: int | None, last: float | None) -> bool | None:
    """Whether the log tells of the end: as it should be, or by an error after its last row."""
    ended = facts.ended_key is not None and not np.any(rows.key[rows.training] > facts.ended_key)
    if facts.ended or ended or (total is not None and last is not None and last >= total):
        return True
    after = int(rows.key[-1]) if len(rows.key) else 0
    if any(kind == "error" and key > after and is_fatal(text) for kind, key, text in facts.happened):
        return False
    return None


def _times(cells: Cells) -> tuple[float | None, float | None]:
    _, times = cells.column(names.TIME)
    times = times[np.isfinite(times)]
    return (float(times.min()), float(times.max())) if len(times) else (None, None)


def resolution_of(values: Floats) -> float | None:
    """The smallest decimal place that values use: the smallest difference they can show."""
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    some = np.abs(values[:: max(1, len(values) // _ENOUGH_LOSSES)])
    for decimals in range(_MOST_DECIMALS + 1):
        scale = 10.0**decimals
        # A decimal number and the nearest double differ by its spacing at most.
        if np.all(
            np.abs(np.round(some * scale) - some * scale) <= 4 * np.spacing(np.maximum(some * scale, 1.0))
        ):
            return float(1 / scale)
    return None


def _events(facts: Facts, rows: _Rows, restarts: tuple[Restart, ...]) -> tuple[LogEvent, ...]:
    found = []
    for kind, key, text in facts.happened:
        place = int(np.searchsorted(rows.key, key, "right")) - 1
        step = float(rows.step[place]) if place >= 0 else None
        found.append((key, LogEvent(kind, step, key >> PART_BITS if facts.has_lines else 0, text)))
    for restart in restarts:
        key = int(rows.key[restart.row])
        text = f"the run goes on from step {restart.to_step:g} after step {restart.from_step:g}"
        line = key >> PART_BITS if facts.has_lines else 0
        found.append((key, LogEvent("restart", restart.to_step, line, text)))
    return tuple(event for _, event in sorted(found, key=lambda pair: pair[0]))
