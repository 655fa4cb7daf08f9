"""CSV with a header: Lightning's CSVLogger, exports of wandb, any other::

    epoch,step,train_loss,val_loss                       "Step","run - train/loss","run - train/loss__MIN",…
    0,49,0.31,                                           "0","4.613","4.613","4.613"

Shows the columns it has, blanks where a row has none. Lightning counts steps from 0, and a value is whatever
the script logged: of a step, or the mean of an epoch. An export of wandb may be thinned out to 500 points a
curve, and the columns ``__MIN`` and ``__MAX`` are left out; of several runs the first is read.
"""

from __future__ import annotations

import csv
import re

from palingenesis.runlogs import names
from palingenesis.runlogs.formats.base import LineFormat, Parsed
from palingenesis.runlogs.names import metric_name
from palingenesis.runlogs.spelling import number

_DELIMITERS = ",\t;"
_MINMAX = ("__MIN", "__MAX")
#: A run's name stands before its metric in an export of wandb.
_OF_RUN = re.compile(r"(.{1,200}?) - (.{1,200})")
_UNKNOWN_MEAN = "The columns do not say whether a loss is of one step or a mean."
_EXPORT = "An export of wandb may be thinned out: of many steps one is left."
_ONE_RUN = "The export holds several runs; the first is read, the others stand below other/."


def headed(text: str) -> LineFormat | None:
    """The format whose header a line is, if it is one."""
    if "loss" not in text.lower():
        return None
    delimiter = max(_DELIMITERS, key=text.count)
    fields = _fields(text, delimiter)
    if len(fields) < 2 or any(number(field) is not None or not _is_name(field) for field in fields):
        return None
    columns, notes = _columns(fields)
    if not any(name is not None and names.is_loss(name) for name in columns):
        return None

    def parse(line: str) -> Parsed | None:
        return _row(line, delimiter, columns)

    names_of_fields = {field.strip() for field in fields}
    kind = "wandb_csv" if _EXPORT in notes else "lightning" if names_of_fields >= {"epoch", "step"} else "csv"
    return LineFormat(kind, parse, cannot_show=notes)


def _is_name(field: str) -> bool:
    return len(field) <= 200 and re.fullmatch(r"\s*[A-Za-z_][^{}=:]*", field) is not None


def _columns(fields: list[str]) -> tuple[list[str | None], tuple[str, ...]]:
    """The column of each field, and what has to be said of them."""
    columns: list[str | None] = []
    runs: list[str] = []
    for field in fields:
        field = field.strip()
        of_run = _OF_RUN.fullmatch(field)
        if field.endswith(_MINMAX):
            columns.append(None)
        elif of_run is None:
            columns.append(_once(metric_name(field), columns, field))
        else:
            if of_run[1] not in runs:
                runs.append(of_run[1])
            name = of_run[2] if of_run[1] == runs[0] else None
            columns.append(f"other/{field}" if name is None else _once(metric_name(name), columns, field))
    notes = [_UNKNOWN_MEAN]
    if runs:
        notes.append(_EXPORT)
    if len(runs) > 1:
        notes.append(_ONE_RUN)
    return columns, tuple(notes)


def _once(name: str, before: list[str | None], field: str) -> str:
    return f"other/{field}" if name in before else name


def _fields(text: str, delimiter: str) -> list[str]:
    text = text.rstrip("\r\n")
    if '"' not in text:
        return text.split(delimiter)
    try:
        return next(csv.reader([text], delimiter=delimiter), [])
    except csv.Error:  # a quote that never ends in a line that is too long
        return []


def _row(text: str, delimiter: str, columns: list[str | None]) -> Parsed | None:
    fields = _fields(text, delimiter)
    if len(fields) != len(columns):
        return None
    row: dict[str, float] = {}
    for name, field in zip(columns, fields, strict=True):
        if name is not None and field:
            value = number(field)
            if value is None and names.is_loss(name):
                return None  # another header, or another program's line
            if value is not None:
                row[name] = value
    return Parsed(row) if row.keys() - names.PLACES - {names.EPOCH} else None
