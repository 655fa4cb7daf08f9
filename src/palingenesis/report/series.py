"""The numbers of a run by name, whether they come from a record or from a log of any trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from palingenesis.runlogs.table import EMPTY, Column

if TYPE_CHECKING:
    from palingenesis.record.reader import Run
    from palingenesis.runlogs.table import RunLog


class Signals(Mapping[str, Column]):
    """Columns by name, in the order of their steps; each is made when it is first asked for.

    A name that is not there is an empty column, so that what is drawn can ask for everything it knows.
    """

    def __init__(self, names: list[str], make: Callable[[str], Column]) -> None:
        self._names = dict.fromkeys(names)
        self._make = make
        self._made: dict[str, Column] = {}

    @classmethod
    def of_run(cls, run: Run) -> Signals:
        """Of a record."""
        metrics = run.metrics

        def column(name: str) -> Column:
            rows, values = metrics.logged(name)
            return Column(rows, metrics.step[rows], values)

        return cls(list(metrics), column)

    @classmethod
    def of_log(cls, log: RunLog) -> Signals:
        """Of a log, without rows that a restart has run again."""
        return cls(list(log.columns), log.live)

    def __getitem__(self, name: str) -> Column:
        if name not in self._names:
            return EMPTY
        if name not in self._made:
            column = self._make(name)
            column = column.where(np.isfinite(column.step))
            order = np.argsort(column.step, kind="stable")
            self._made[name] = column.where(order)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def numbers(self, name: str) -> Column:
        """The finite values of a name."""
        return self[name].finite

    def below(self, prefix: str) -> dict[str, Column]:
        """Columns whose name begins so, by the rest of it; those without any finite value are left out."""
        found = {name.removeprefix(prefix): self[name] for name in self._names if name.startswith(prefix)}
        return {rest: column for rest, column in found.items() if column.finite}
