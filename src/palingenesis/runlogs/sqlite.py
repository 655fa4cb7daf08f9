"""trackio's SQLite files: one a project, with all its runs; the newest run is read.

Shows every number as it was logged, with times. Steps are those of the run; rows that were logged again after
a resume are both there. Only the standard library is needed.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from palingenesis.errors import RunLogError
from palingenesis.runlogs import names
from palingenesis.runlogs.assemble import Facts, assemble
from palingenesis.runlogs.cells import Cells
from palingenesis.runlogs.formats.entries import entry
from palingenesis.runlogs.table import RunLog
from palingenesis.runlogs.times import seconds

MAGIC = b"SQLite format 3\x00"
_UNKNOWN_MEAN = "The file does not say whether a loss is of one step or a mean."
_OTHERS = "The file holds {count} runs; the newest, {name!r}, is read."


def read_trackio(source: str, path: Path) -> RunLog:
    """The table of the newest run in a file.

    Raises:
        RunLogError: it is damaged, or another program's.
    """
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            return _read(source, connection)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise RunLogError(
            f"{source} is an SQLite file that cannot be read as trackio's ({error}): give the .db of a "
            f"project"
        ) from None


def _read(source: str, connection: sqlite3.Connection) -> RunLog:
    columns = {str(row[1]) for row in connection.execute("PRAGMA table_info(metrics)")}
    if not {"run_name", "step", "metrics"} <= columns:
        raise RunLogError(
            f"{source} is an SQLite file without trackio's table of metrics: give the .db of a project"
        )
    which = "run_id" if "run_id" in columns else "run_name"
    runs = connection.execute(
        f"SELECT {which}, max(run_name), max(id) FROM metrics GROUP BY {which} ORDER BY max(id)"
    ).fetchall()
    facts = Facts(source, "trackio", cannot_show=(_UNKNOWN_MEAN,), has_lines=False)
    cells = Cells()
    if runs:
        run, name, _ = runs[-1]
        if len(runs) > 1:
            facts.cannot_show += (_OTHERS.format(count=len(runs), name=name),)
        found = connection.execute(
            f"SELECT step, timestamp, metrics FROM metrics WHERE {which} IS ? ORDER BY id", (run,)
        )
        for key, (step, timestamp, metrics) in enumerate(found):
            _add(cells, facts, key, step, timestamp, metrics)
    return assemble(cells, facts)


def _add(cells: Cells, facts: Facts, key: int, step: Any, timestamp: Any, metrics: Any) -> None:
    try:
        values = json.loads(metrics)
    except (TypeError, ValueError, RecursionError):  # damaged, or of a newer version
        values = None
    parsed = entry(values.items()) if isinstance(values, dict) else None
    if parsed is None:
        facts.unread += 1
        return
    if parsed.ended:
        facts.ended = True
    places = {names.STEP: float(step)} if isinstance(step, (int, float)) else {}
    when = seconds(str(timestamp))
    if when is not None:
        places[names.TIME] = when
    cells.add(key, {**places, **parsed.values})
