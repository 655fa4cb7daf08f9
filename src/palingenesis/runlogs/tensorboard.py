"""TensorBoard's event files, of one run: scalars, with steps and times.

Shows every number as it was logged, in single precision. Of a folder with several runs the newest is read. A
value is whatever the script logged: of a step, or a mean.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from palingenesis.runlogs import blocks, names
from palingenesis.runlogs.assemble import Facts, assemble
from palingenesis.runlogs.cells import Cells
from palingenesis.runlogs.table import RunLog

#: Every file begins with a record that says its version, in the third field.
MAGIC = b"brain.Event:"
NAME = "events.out.tfevents"
_CANNOT = (
    "Values are kept in single precision.",
    "The file does not say whether a loss is of one step or a mean.",
)
_DOUBLE, _FLOAT = struct.Struct("<d"), struct.Struct("<f")
# Fields of Event, Summary, Summary.Value, TensorProto.
_TIME, _STEP, _SUMMARY = 1, 2, 5
_VALUE, _TAG, _SIMPLE, _TENSOR = 1, 1, 2, 8
_DTYPE, _CONTENT, _FLOATS, _DOUBLES = 1, 4, 5, 6
_FORMS = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}
#: transformers writes it when training has ended.
_AT_END = "train/train_runtime"
_HIGHEST = 1 << 63


def is_events(head: bytes) -> bool:
    """Whether a file that begins so is of TensorBoard."""
    return MAGIC in head[:100]


def read_events(source: str, path: Path) -> RunLog:
    """The table of an event file, together with the others of its folder, oldest first.

    Each of them is of one process; a run that was resumed has several.
    """
    files = sorted(path.parent.glob(f"*{NAME}*")) if NAME in path.name else [path]
    facts = Facts(source, "tensorboard", cannot_show=_CANNOT, has_lines=False)
    cells = Cells()
    key = 0
    for file in files if path in files else [path]:
        key = _add_file(cells, facts, file.read_bytes(), key)
    return assemble(cells, facts)


def _add_file(cells: Cells, facts: Facts, data: bytes, key: int) -> int:
    """Scalars of one step that follow each other are one row."""
    at: int | None = None
    seen: set[str] = set()
    for _, record in blocks.records(data):
        event = _event(record)
        for tag, value in event.scalars:
            name = names.metric_name(tag)
            if event.step != at or name in seen:
                key, at, seen = key + 1, event.step, set()
                cells.add(key, {names.STEP: float(event.step), names.TIME: event.time})
            seen.add(name)
            if tag == _AT_END:
                facts.ended = True
            if name not in names.PLACES:
                cells.add(key, {name: value})
    return key + 1


class _Event(NamedTuple):
    time: float
    step: int
    scalars: list[tuple[str, float]]


def _event(record: bytes) -> _Event:
    time, step, scalars = 0.0, 0, []
    for number, _, value in blocks.fields(record):
        if number == _TIME and isinstance(value, bytes) and len(value) == 8:
            (time,) = _DOUBLE.unpack(value)
        elif number == _STEP and isinstance(value, int):
            step = value - 2 * _HIGHEST if value >= _HIGHEST else value
        elif number == _SUMMARY and isinstance(value, bytes):
            for inner, _, message in blocks.fields(value):
                if inner == _VALUE and isinstance(message, bytes) and (found := _scalar(message)) is not None:
                    scalars.append(found)
    return _Event(time, step, scalars)


def _scalar(message: bytes) -> tuple[str, float] | None:
    tag, number = "", None
    for field, _, value in blocks.fields(message):
        if not isinstance(value, bytes):
            continue
        if field == _TAG:
            tag = value.decode("utf-8", "replace")
        elif field == _SIMPLE and len(value) == 4:
            (number,) = _FLOAT.unpack(value)
        elif field == _TENSOR:
            number = _tensor(value)
    return None if number is None or not tag else (tag, float(number))


def _tensor(message: bytes) -> float | None:
    """A tensor of one number, as ``tf.summary.scalar`` of version 2 writes it."""
    dtype, content = 0, None
    for field, _, value in blocks.fields(message):
        if field == _DTYPE and isinstance(value, int):
            dtype = value
        elif field in (_CONTENT, _FLOATS, _DOUBLES) and isinstance(value, bytes):
            content = value
    form = _FORMS.get(dtype)
    if form is None or content is None or len(content) != struct.calcsize(form):
        return None
    return float(struct.unpack(form, content)[0])
