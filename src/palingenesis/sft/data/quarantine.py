"""Rows that cannot be used: counted by reason, kept in ``skipped_rows.jsonl``, told in one line."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from palingenesis.sft.data.rows import BadRow, Kind, Row

SKIPPED_FILE = "skipped_rows.jsonl"


class Quarantine:
    """Counts rows that were left out and writes each, with its reason, to ``folder/skipped_rows.jsonl``.

    The file is written anew by every run, since every run reads its data from the start; it does not
    exist when no row was skipped. With ``folder=None`` rows are counted and not written, which is what
    every process but the first wants.
    """

    def __init__(self, folder: Path | str | None) -> None:
        self.path = None if folder is None else Path(folder) / SKIPPED_FILE
        self.counts: Counter[tuple[str, Kind]] = Counter()
        self._first: dict[tuple[str, Kind], str] = {}
        self._file: IO[str] | None = None
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Quarantine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return self.counts.total()

    def put(self, row: Row, problem: BadRow) -> None:
        """Leave ``row`` out because of ``problem``."""
        group = (row.source, problem.kind)
        self.counts[group] += 1
        self._first.setdefault(group, f"{row.file} line {row.number}: {problem.reason}")
        if self.path is None:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8")
        entry = {
            "source": row.source,
            "file": row.file,
            "line": row.number,
            "kind": problem.kind,
            "reason": problem.reason,
            "row": row.raw if row.data is None else _writable(row.data),
        }
        self._file.write(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n")

    def summary(self) -> str:
        """One line: how many rows were skipped, why, and an example of the most frequent reason."""
        if not self.counts:
            return "no row was skipped"
        kinds: Counter[str] = Counter()
        for (_, kind), count in self.counts.items():
            kinds[kind] += count
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        where = f"; all are in {self.path}" if self.path is not None else ""
        rows = "row" if len(self) == 1 else "rows"
        return f"{len(self)} {rows} skipped ({told}), such as {self.example()}{where}"

    def example(self, source: str | None = None) -> str:
        """Where and what the first row with the most frequent reason was, of all sources or of one."""
        groups = [group for group, _ in self.counts.most_common() if source in (None, group[0])]
        return self._first[groups[0]]

    def close(self) -> None:
        """End the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _writable(value: Any) -> Any:
    """``value`` as strict JSON can hold it: rows of a Parquet file may carry dates, bytes or NaN."""
    if isinstance(value, Mapping):
        return {str(key): _writable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_writable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return repr(value)
