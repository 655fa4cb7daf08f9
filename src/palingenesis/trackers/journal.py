"""The record's rows as trackers are to have them: what a backend missed is sent again from here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from palingenesis.record.folder import read_info
from palingenesis.record.format import METRICS_FILE, STEP_KEY, decode
from palingenesis.trackers.base import TIME_KEY, Row, metric_values

_BIG = 1 << 20


class Journal:
    """Reads ``metrics.jsonl`` of a run, which may still be written.

    Args:
        folder: the run's folder. Make the journal after the record is opened: a run that replaces another
            must not find that one's rows.
        resumed_from: the step that this process goes on from, if it resumed the run. Rows of later steps
            that are in the file by now will be made again, and are not handed out.
    """

    def __init__(self, folder: str | os.PathLike[str], resumed_from: int | None = None) -> None:
        self.folder = Path(folder)
        self._path = self.folder / METRICS_FILE
        self._cuts: list[tuple[int, int]] = []  # rows before this byte count up to this step only
        #: Lines that could not be read, in the last reading.
        self.unreadable = 0
        if resumed_from is not None and self._path.is_file():
            self._cuts.append((self._path.stat().st_size, resumed_from))

    def rows(self) -> Iterator[Row]:
        """Every row that counts, in order; none where there is no file. Half a last line is left out."""
        self.unreadable = 0
        if not self._path.is_file():
            return
        cuts = [*self._cuts, *_cuts(read_info(self.folder)[0])]
        offset = 0
        with self._path.open("rb", buffering=_BIG) as file:
            for line in file:
                start, offset = offset, offset + len(line)
                if not line.endswith(b"\n"):
                    return
                row = self._row(line)
                if row is not None and not any(start < end and row.step > last for end, last in cuts):
                    yield row

    def _row(self, line: bytes) -> Row | None:
        try:
            found = decode(line)
        except ValueError:
            self.unreadable += 1
            return None
        if not isinstance(found, dict):
            self.unreadable += 1
            return None
        step, when = found.get(STEP_KEY), found.get(TIME_KEY)
        if not isinstance(step, int):
            return None
        return Row(step, when if isinstance(when, (int, float)) else 0.0, metric_values(found))


def _cuts(info: Mapping[str, Any]) -> list[tuple[int, int]]:
    """What earlier resumes made void: bytes of the file then, and the step that the run went on from."""
    recorded = info.get("resumes")
    found = []
    for entry in recorded if isinstance(recorded, list) else []:
        size, last = (
            (entry.get("metrics_bytes"), entry.get("from_step")) if isinstance(entry, dict) else (0, 0)
        )
        if isinstance(size, int) and isinstance(last, int):
            found.append((size, last))
    return found
