"""The one table that every log becomes: columns by metric, things that happened, and what cannot be known.

Metrics have the names of a record (``train/loss``, ``eval/loss``, ``eval/<source>/loss``, ``train/lr``,
``train/grad_norm``, ``health/…``), so that whatever reads records reads foreign logs as well. A number whose
meaning is not known keeps its own name below ``other/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from palingenesis.record.columns import Floats, Ints

EventKind = Literal["skipped", "overflow", "warning", "error", "nonfinite", "restart"]
#: How the values of ``train/loss`` were made: of one step, a mean since the row before, or a moving average.
LossKind = Literal["step", "interval_mean", "moving_average", "unknown"]


class Column(NamedTuple):
    """One metric: a value for each row that has it, in the order of the log."""

    row: Ints
    """Number of the row in the table, from 0."""
    step: Floats
    value: Floats
    """As logged: NaN and infinities are values here; a row without the metric is not in the column."""

    def __bool__(self) -> bool:
        return len(self.value) > 0

    @property
    def finite(self) -> Column:
        """Without the values that are no numbers."""
        return self.where(np.isfinite(self.value) & np.isfinite(self.step))

    def where(self, keep: np.ndarray) -> Column:
        """The entries for which ``keep`` is true."""
        return Column(self.row[keep], self.step[keep], self.value[keep])


EMPTY = Column(np.empty(0, dtype=np.int64), np.empty(0), np.empty(0))


class LogEvent(NamedTuple):
    """Something the log tells besides numbers."""

    kind: EventKind
    step: float | None
    """Of the row it stands with; ``None`` before the first."""
    line: int
    """Line number in the file, from 1; 0 where the source has no lines."""
    text: str


class Restart(NamedTuple):
    """The run began again: rows from ``row`` on go on from ``to_step`` after the log had reached "
    "``from_step``."""

    row: int
    from_step: float
    to_step: float


@dataclass(frozen=True)
class RunLog:
    """What a log holds."""

    source: str
    """The path as it was given; ``-`` for stdin."""
    format: str
    """Id of the format: ``transformers``, ``megatron``, ``tensorboard``, ``palingenesis``, …"""
    columns: Mapping[str, Column]
    rows: int
    step_inferred: bool = False
    """The log has no steps: they are counted, or worked out from epochs, and only their order is sure."""
    total_steps: int | None = None
    """How many steps the run was to have."""
    finished: bool | None = None
    """The log says that training ended, or that it did not; ``None`` where this format never says so."""
    started: float | None = None
    """Unix seconds of the first and of the last row, if the log has times."""
    ended: float | None = None
    modified: float | None = None
    """Unix seconds at which the file last grew; ``None`` for stdin."""
    loss_kind: LossKind = "unknown"
    resolution: float | None = None
    """The smallest difference that a written loss can show: 1e-4 for four decimals."""
    cannot_show: tuple[str, ...] = ()
    """What this format leaves out or hides, a sentence each."""
    events: tuple[LogEvent, ...] = ()
    restarts: tuple[Restart, ...] = ()
    processes: int = 1
    """Ranks whose lines are mixed in the log; their repeated rows are in the table once."""
    lines: int = 0
    unread: int = 0
    """Lines that are not the format's own: other programs' output, torn lines."""
    _live: dict[str, Column] = field(default_factory=dict, init=False, repr=False, compare=False)

    def column(self, name: str) -> Column:
        """All of a metric as logged; empty where the log has none."""
        return self.columns.get(name, EMPTY)

    def live(self, name: str) -> Column:
        """A metric without rows that a later restart has run again; steps do not go back."""
        if name not in self._live:
            column = self.column(name)
            self._live[name] = column.where(self._counts[column.row]) if column else column
        return self._live[name]

    @cached_property
    def loss_name(self) -> str:
        """The metric that is the loss: cross-entropy if the log has it."""
        return "train/ce_loss" if self.column("train/ce_loss") else "train/loss"

    @cached_property
    def last_step(self) -> float | None:
        """The highest step that counts."""
        steps = [column.step[-1] for column in map(self.live, self.columns) if column]
        return float(max(steps)) if steps else None

    @cached_property
    def _counts(self) -> np.ndarray:
        """For every row: whether no later restart runs its step again."""
        step = np.full(self.rows, np.nan)
        for column in self.columns.values():
            step[column.row] = column.step
        keep = np.ones(self.rows, dtype=np.bool_)
        for restart in self.restarts:
            before = np.arange(self.rows) < restart.row
            keep &= ~(before & (step >= restart.to_step))
        return keep
