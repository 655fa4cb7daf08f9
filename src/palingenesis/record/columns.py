"""Rows turned into columns: numpy arrays by name."""

from __future__ import annotations

import difflib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from palingenesis.record.format import NON_FINITE, STEP_KEY, number

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

_STEP = "step"


class Columns(Mapping[str, Floats]):
    """One array a name, all of the same length, NaN where a row has no such value.

    ``columns["step"]`` is the step of each row; it is not one of the names that iteration gives.
    """

    def __init__(self, step: Floats, columns: Mapping[str, Floats]) -> None:
        self.step = step
        self._columns = columns

    def __getitem__(self, name: str) -> Floats:
        if name == _STEP:
            return self.step
        try:
            return self._columns[name]
        except KeyError:
            near = difflib.get_close_matches(str(name), self._columns, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise KeyError(f"no column {name!r} among {len(self._columns)}{hint}") from None

    def logged(self, name: str) -> tuple[Ints, Floats]:
        """Rows that have this name, and their values: NaN is one that was recorded, or a text."""
        if isinstance(self._columns, _Scattered):
            return self._columns.cells(name)
        values = self[name]
        rows = np.flatnonzero(~np.isnan(values))
        return rows, values[rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.step)} rows, {len(self)} columns)"


class LayerColumns(Columns):
    """Gradient norms: one array a layer, one entry a check.

    NaN where the layer had no gradient (``None``), was not watched, or where the norm was not finite;
    :meth:`absent` tells the first apart. ``matrix`` is all of it, checks × layers in the order of iteration.
    """

    def __init__(self, step: Floats, names: Sequence[str], matrix: Floats, absent: Bools) -> None:
        super().__init__(step, {name: matrix[:, column] for column, name in enumerate(names)})
        self.names = tuple(names)
        self.matrix = matrix
        self._absent = {name: absent[:, column] for column, name in enumerate(names)}

    def absent(self, name: str) -> Bools:
        """At which checks the layer's gradient was ``None``."""
        if name not in self._absent:
            raise KeyError(f"no layer {name!r} among {len(self._absent)}")
        return self._absent[name]


class _Scattered(Mapping[str, Floats]):
    """Columns of which few rows have a value: each is made whole when it is asked for.

    A thousand numbers of layers in every hundredth row would otherwise take a hundred times their own memory.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._size = len(rows)
        self._cells: dict[str, tuple[array[int], array[float]]] = {}
        for index, row in enumerate(rows):
            for name, value in row.items():
                if name not in self._cells:
                    self._cells[name] = array("q"), array("d")
                places, values = self._cells[name]
                places.append(index)
                values.append(number(value))

    def __getitem__(self, name: str) -> Floats:
        rows, values = self.cells(name)
        column = np.full(self._size, np.nan)
        column[rows] = values
        return column

    def cells(self, name: str) -> tuple[Ints, Floats]:
        """The rows that have a value, and the values."""
        places, values = self._cells[name]
        return np.frombuffer(places, dtype=np.int64), np.frombuffer(values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


def metric_columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Columns of flat rows whose keys vary."""
    columns = _Scattered(rows)
    return Columns(columns[STEP_KEY] if STEP_KEY in columns else np.full(len(rows), np.nan), columns)


class CheckRow(NamedTuple):
    """One check as recorded."""

    step: int
    judged: int
    names: tuple[str, ...]
    norm: Floats
    absent: Bools

    @property
    def saw_gradients(self) -> bool:
        """Whether any layer had a gradient that was not exactly zero."""
        return bool(np.any((self.norm != 0) & ~self.absent))


def check_row(record: Mapping[str, Any], names: tuple[str, ...]) -> CheckRow:
    """A line of layers.jsonl under its header.

    Raises:
        ValueError: it is not a check of these layers.
    """
    step, judged, norm = record.get("step"), record.get("judged"), record.get("norm")
    if not isinstance(step, int) or not isinstance(judged, int) or not isinstance(norm, list):
        raise ValueError("no step, judged and norm")
    if len(norm) != len(names):
        raise ValueError(f"{len(norm)} norms under a header of {len(names)} layers")
    if not all(_is_norm(value) for value in norm):
        raise ValueError("a norm that is no number")
    values = np.array([np.nan if value is None else number(value) for value in norm], dtype=np.float64)
    absent = np.array([value is None for value in norm], dtype=np.bool_)
    return CheckRow(step, judged, names, values, absent)


def _is_norm(value: Any) -> bool:
    return (
        value is None or isinstance(value, (int, float)) or (isinstance(value, str) and value in NON_FINITE)
    )


def layer_columns(checks: Sequence[CheckRow]) -> LayerColumns:
    """Columns of checks whose layers may change on the way."""
    position: dict[str, int] = {}
    for names in dict.fromkeys(check.names for check in checks):
        for name in names:
            position.setdefault(name, len(position))
    matrix = np.full((len(checks), len(position)), np.nan)
    absent = np.zeros((len(checks), len(position)), dtype=np.bool_)
    places: dict[tuple[str, ...], Ints] = {}
    for row, check in enumerate(checks):
        if check.names not in places:
            places[check.names] = np.array([position[name] for name in check.names], dtype=np.int64)
        matrix[row, places[check.names]] = check.norm
        absent[row, places[check.names]] = check.absent
    step = np.array([check.step for check in checks], dtype=np.float64)
    return LayerColumns(step, list(position), matrix, absent)
