"""Values as they are read, by name and key of their row; put in order once all are there.

A key says where in the log a row stands; keys only grow, and leave gaps.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import numpy as np

from palingenesis.record.columns import Floats, Ints
from palingenesis.runlogs.names import STEP


class Cells:
    """Columns that grow."""

    def __init__(self) -> None:
        self._single: dict[str, tuple[array[int], array[float]]] = {}
        self._blocks: dict[str, list[tuple[Ints, Floats]]] = {}
        #: Of lines that go on with the row of an earlier one, by their own keys.
        self._continued: Cells | None = None

    def add(self, key: int, values: Mapping[str, float]) -> None:
        """Put the values of one row in."""
        for name, value in values.items():
            if name not in self._single:
                self._single[name] = array("q"), array("d")
            keys, column = self._single[name]
            keys.append(key)
            column.append(value)

    def add_block(self, name: str, keys: Ints, values: Floats) -> None:
        """Put values of one name in, of many rows."""
        self._blocks.setdefault(name, []).append((keys, values))

    def add_continued(self, key: int, values: Mapping[str, float]) -> None:
        """Put in the values of a line that belongs to the row begun before it, the last that has a step."""
        self._with_continued().add(key, values)

    def add_continued_block(self, name: str, keys: Ints, values: Floats) -> None:
        """The same of many lines."""
        self._with_continued().add_block(name, keys, values)

    def _with_continued(self) -> Cells:
        if self._continued is None:
            self._continued = Cells()
        return self._continued

    def names(self) -> list[str]:
        """Of all columns, in the order in which they were first seen, singles before blocks."""
        more = self._continued.names() if self._continued is not None else []
        return list(dict.fromkeys([*self._single, *self._blocks, *more]))

    def column(self, name: str) -> tuple[Ints, Floats]:
        """Keys, increasing, and values. Where a row has a name twice, the first counts."""
        parts = list(self._blocks.get(name, ()))
        if name in self._single:
            keys, values = self._single[name]
            parts.append((np.array(keys, dtype=np.int64), np.array(values, dtype=np.float64)))
        if self._continued is not None and name in self._continued.names():
            parts.append(self._continued_by_row(self._continued, name))
        if not parts:
            return np.empty(0, dtype=np.int64), np.empty(0)
        key = np.concatenate([part[0] for part in parts])
        value = np.concatenate([part[1] for part in parts])
        if len(key) > 1 and not bool(np.all(key[1:] > key[:-1])):
            order = np.argsort(key, kind="stable")
            key, value = key[order], value[order]
            first = np.concatenate([[True], key[1:] != key[:-1]])
            key, value = key[first], value[first]
        return key, value

    def _continued_by_row(self, continued: Cells, name: str) -> tuple[Ints, Floats]:
        """Values of continued rows, with the keys that those rows began with."""
        keys, values = continued.column(name)
        begun, _ = self.column(STEP)
        if not len(begun):
            return keys, values
        place = np.searchsorted(begun, keys, "right") - 1
        return np.where(place >= 0, begun[place], keys), values
