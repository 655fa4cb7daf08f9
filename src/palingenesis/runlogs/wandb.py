"""wandb's offline files, ``offline-run-*/run-*.wandb``: every row as it was logged, with times.

Shows numbers in full. wandb writes to the file every 15 seconds: what a killed process had logged since is
lost. A run that was resumed offline has a file for each time; the others of the same run are read as well.
Nothing of wandb is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from palingenesis.record.format import decode
from palingenesis.runlogs import blocks
from palingenesis.runlogs.assemble import Facts, assemble
from palingenesis.runlogs.cells import Cells
from palingenesis.runlogs.formats.entries import entry
from palingenesis.runlogs.table import RunLog

MAGIC = b":W&B"
_CANNOT = (
    "Rows of the last 15 seconds before a kill are not in the file.",
    "The file does not say whether a loss is of one step or a mean.",
)
# Fields of Record, HistoryRecord, HistoryItem, and the record of a run's end.
_HISTORY, _EXIT = 2, 18
_ITEM, _KEY, _NESTED, _VALUE = 1, 1, 2, 16


def read_wandb(source: str, path: Path) -> RunLog:
    """The table of a file, together with the others of its run."""
    # Late: trackers bring more along than any other log needs.
    from palingenesis.trackers.wandb_file import whole_records

    again = sorted(path.parent.parent.glob(f"offline-run-*/{path.name}"))
    facts = Facts(source, "wandb", cannot_show=_CANNOT, has_lines=False)
    cells = Cells()
    key = 0
    for file in again if path in again else [path]:
        for record in whole_records(file.read_bytes()):
            key += 1
            _add(cells, facts, key, record)
    return assemble(cells, facts)


def _add(cells: Cells, facts: Facts, key: int, record: bytes) -> None:
    for field, _, value in blocks.fields(record):
        if field == _EXIT:
            facts.ended = True
        if field == _HISTORY and isinstance(value, bytes):
            parsed = entry(_items(value))
            if parsed is not None:
                cells.add(key, parsed.values)


def _items(history: bytes) -> Iterator[tuple[str, object]]:
    for field, _, item in blocks.fields(history):
        if field != _ITEM or not isinstance(item, bytes):
            continue
        key, nested, written = "", [], b""
        for inner, _, value in blocks.fields(item):
            if not isinstance(value, bytes):
                continue
            if inner == _KEY:
                key = value.decode("utf-8", "replace")
            elif inner == _NESTED:
                nested.append(value.decode("utf-8", "replace"))
            elif inner == _VALUE:
                written = value
        try:
            yield key or "/".join(nested), decode(written)
        except ValueError:  # a damaged item; the others of the row stand
            continue
