"""RecordWriter: what a monitor writes a run through.

Lines are gathered in memory and written at every check, at every event of severity warning or critical
(these also to the platter), and at the end. Only the constructor raises: a disk that fills up later costs a
warning, not the training run, and everything is written in order as soon as it can be.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from palingenesis.errors import RecordBusyError, RecordError
from palingenesis.events import Event
from palingenesis.record.folder import read_info
from palingenesis.record.format import (
    EVENTS_FILE,
    LAYERS_FILE,
    METRICS_FILE,
    RUN_FILE,
    RUN_TEMPORARY,
    canonical,
    pretty,
    sha256,
    utc_now,
)
from palingenesis.record.lines import LineFile
from palingenesis.record.lock import FolderLock
from palingenesis.record.seal import seal_of
from palingenesis.record.start import Start, take_over

_log = logging.getLogger("palingenesis")

_MIB = 1 << 20
#: Bytes of lines that wait, a file, while the disk takes none. What comes after is dropped.
QUEUE_LIMIT = 16 * _MIB
#: Bytes of metric rows that wait at most for the next check.
FLUSH_BYTES = 1 << 16

_SYNCED_SEVERITIES = frozenset({"warning", "critical"})
#: Fields of a line that are the record's; an event's own field of such a name would be lost in it.
_RECORD_FIELDS = frozenset({"seq", "time", "step", "event", "severity", "message", "prev", "hash"})
#: Digits of a gradient norm in layers.jsonl: far below its error of 1e-5, and half the size of all 17.
_NORM_FORMAT = ".7g"
_NON_FINITE_NORM = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}


class RecordWriter:
    """Writes one run into one folder, alone.

    Raises (from the constructor only):
        RecordExistsError: the folder holds a run, and neither ``resume`` nor ``overwrite`` was given.
        RecordBusyError: another writer, of this process or another, holds the folder.
        RecordError: the folder cannot be made or written, or the run in it cannot be resumed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        info: Mapping[str, Any],
        *,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.folder = Path(folder)
        if resume and overwrite:
            raise RecordError(
                f"resume=True and overwrite=True for {folder} exclude each other: give one of them"
            )
        self._guard = threading.RLock()
        self._failure: str | None = None
        self._dropped = {"events": 0, "metrics": 0, "checks": 0}
        self._closed = False
        self._info_is_due = False
        self._header: list[str] | None = None  # names in the last header of layers.jsonl
        self._flush_at = FLUSH_BYTES
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as undo:
                self._lock = FolderLock(self.folder)
                undo.callback(self._lock.release)
                self._begin(take_over(self.folder, dict(info), resume=resume, overwrite=overwrite), undo)
                undo.pop_all()
        except OSError as error:
            raise RecordError(
                f"run folder {self.folder} cannot be written: {_reason(error)}; "
                "give a folder you may write to"
            ) from None

    def _begin(self, start: Start, undo: contextlib.ExitStack) -> None:
        self.resumed, self.last_step = start.resumed, start.last_step
        self._info, self._seq, self._last_hash = start.info, start.seq, start.last_hash
        self._write_info()
        self._events, self._metrics, self._layers = self._files = (
            LineFile(self.folder / EVENTS_FILE),
            LineFile(self.folder / METRICS_FILE),
            LineFile(self.folder / LAYERS_FILE),
        )
        for file in self._files:
            undo.callback(file.close)
        # Where the rows written before this start end; readers need it once it is known which step the
        # run went on from.
        self._sizes_at_start = (self._metrics.size, self._layers.size)

    @property
    def failure(self) -> str | None:
        """Why lines are waiting in memory, ``None`` while everything is on disk."""
        return self._failure

    @property
    def run_id(self) -> str:
        return str(self._info["run_id"])

    # ------------------------------------------------------------------ what a monitor says

    def event(self, event: Event) -> Event:
        """Write an event; the one returned also has ``seq``, ``time``, ``prev`` and ``hash``.

        Where the queue is full the event is dropped before it becomes part of the chain, and comes back as
        it was.
        """
        return self.events([event])[0]

    def events(self, events: Iterable[Event]) -> list[Event]:
        """Write the events of one moment, with one trip to the disk for all of them."""
        with self._guard:
            self._require_open()
            given = list(events)
            stamped = [self._stamp(event) for event in given]
            for event in given:
                if event.event == "run_resumed" and self.resumed:
                    self._note_resume(event)
            if any(event.severity in _SYNCED_SEVERITIES for event in given):
                self._flush(sync=[self._events])
            return stamped

    def _stamp(self, event: Event) -> Event:
        own = {key: value for key, value in event.fields.items() if key not in _RECORD_FIELDS}
        seq, when = self._seq + 1, utc_now()
        content = {
            "seq": seq,
            "time": when,
            "step": event.step,
            "event": event.event,
            "severity": event.severity,
            "message": event.message,
            **own,
            "prev": self._last_hash,
        }
        body = canonical(content)
        digest = sha256(body)
        line = body[:-1] + b',"hash":"' + digest.encode() + b'"}'
        if not self._add(self._events, line, "events"):
            return event
        stamps = {"seq": seq, "time": when, "prev": self._last_hash, "hash": digest}
        self._seq, self._last_hash = seq, digest
        self.last_step = max(self.last_step, event.step)
        return Event(event.event, event.step, event.severity, event.message, {**own, **stamps})

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Write one row; ``time`` (seconds since the epoch) is added where it is missing."""
        with self._guard:
            self._require_open()
            line = canonical(row if "time" in row else {**row, "time": time.time()})
            self._add(self._metrics, line, "metrics")
            if self._metrics.waiting_bytes >= self._flush_at:
                self._flush()
                self._flush_at = self._metrics.waiting_bytes + FLUSH_BYTES

    def check(self, step: int, judged: int, layers: Sequence[str], norms: Sequence[float | None]) -> None:
        """Write the gradient norms of one check, one a layer: ``None`` where there was no gradient at all."""
        if len(layers) != len(norms):
            raise RecordError(
                f"a check of {len(layers)} layers came with {len(norms)} norms: expected one a layer"
            )
        with self._guard:
            self._require_open()
            names = list(layers)
            row = f'{{"step":{step},"judged":{judged},"norm":[{",".join(map(_norm_text, norms))}]}}'.encode()
            if names != self._header:
                row = canonical({"layers": names}) + b"\n" + row
            # Header and row are dropped together, so that no row ever stands under names of another.
            if self._add(self._layers, row, "checks"):
                self._header = names
            self.last_step = max(self.last_step, step)
            self._flush()

    def update_info(self, **changes: Any) -> None:
        """Change what run.json says."""
        with self._guard:
            self._require_open()
            self._info.update(changes)
            self._info_is_due = True
            self._flush()

    def flush(self) -> None:
        """Write everything that waits, now."""
        with self._guard:
            self._require_open()
            self._flush()

    def seal(self) -> dict[str, Any]:
        """Length and digest of metrics.jsonl and layers.jsonl, for the event that ends the run.

        To be taken when no more rows come. Empty where lines still wait for the disk or a file cannot be read
        back: an end without a seal says that the rows are not covered, a wrong one would call them altered.
        """
        with self._guard:
            self._require_open()
            self._flush()
            if self._metrics.waiting_bytes or self._layers.waiting_bytes:
                return {}
            sizes = {METRICS_FILE: self._metrics.size, LAYERS_FILE: self._layers.size}
            try:
                return seal_of(self.folder, sizes)
            except OSError as error:
                _log.warning("the end of the record in %s is not sealed: %s", self.folder, _reason(error))
                return {}

    def close(self, end: Mapping[str, Any]) -> None:
        """Write what waits and the end of the run, and free the folder. A second call does nothing.

        If the disk still refuses lines, the run is left without an end: a record that lacks something does
        not call itself whole.
        """
        with self._guard:
            if self._closed:
                return
            self._flush(sync=self._files)
            if not any(file.waiting_bytes for file in self._files):
                written = {"time": utc_now(), **end, "events": self._seq, "last_hash": self._last_hash}
                self._info["end"] = written
                self._info_is_due = True
                self._flush(sync=self._files)
            self._closed = True
            for file in self._files:
                file.close()
            self._lock.release()

    # ------------------------------------------------------------------ how it gets to the disk

    def _require_open(self) -> None:
        if self._closed:
            raise RecordError(
                f"the record in {self.folder} is closed: make a new writer with resume=True to add to it"
            )

    def _add(self, file: LineFile, line: bytes, kind: str) -> bool:
        if file.waiting_bytes + len(line) > QUEUE_LIMIT and self._failure is not None:
            self._dropped[kind] += 1
            return False
        file.add(line)
        return True

    def _note_resume(self, event: Event) -> None:
        from_step = event.fields.get("from_step", event.step)
        metrics_bytes, layers_bytes = self._sizes_at_start
        self._info["resumed_from"] = [*self._info["resumed_from"], from_step]
        self._info["resumes"] = [
            *self._info["resumes"],
            {"from_step": from_step, "metrics_bytes": metrics_bytes, "layers_bytes": layers_bytes},
        ]
        self._info_is_due = True
        self._flush()

    def _flush(self, *, sync: Iterable[LineFile] = ()) -> None:
        try:
            if self._failure is not None:
                self._find_files_again()
            for file in self._files:
                file.write()
            if self._info_is_due:
                self._write_info()
            for file in sync:
                file.sync()
        except OSError as error:
            self._fail(error)
        else:
            if self._failure is not None:
                self._recover()

    def _write_info(self) -> None:
        temporary = self.folder / RUN_TEMPORARY
        try:
            with temporary.open("wb") as file:
                file.write(pretty(self._info))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / RUN_FILE)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._info_is_due = False

    def _find_files_again(self) -> None:
        """After a failure: is the folder still ours, and do open files still lead into it?"""
        if all(file.is_in_place() for file in self._files):
            return
        info, problem = read_info(self.folder)
        if problem is not None or info.get("run_id") != self._info["run_id"]:
            raise FileNotFoundError(errno.ENOENT, "the run folder was moved or removed", str(self.folder))
        if not self._lock.is_in_place():
            try:
                lock = FolderLock(self.folder)
            except RecordBusyError:
                raise OSError(errno.EBUSY, "another run took the folder", str(self.folder)) from None
            self._lock.release()
            self._lock = lock
        for file in self._files:
            if not file.is_in_place():
                file.reopen()

    def _fail(self, error: OSError) -> None:
        first = self._failure is None
        self._failure = (
            f"the record in {self.folder} cannot be written ({_reason(error)}): training goes on, up to "
            f"{QUEUE_LIMIT // _MIB} MiB a file wait in memory and are written when it can be"
        )
        if first:
            _log.warning("%s", self._failure)

    def _recover(self) -> None:
        self._failure = None
        lost = ", ".join(f"{count} {kind}" for kind, count in self._dropped.items() if count)
        if not lost:
            _log.info("the record in %s can be written again; nothing was lost", self.folder)
            return
        self._dropped = dict.fromkeys(self._dropped, 0)
        message = f"the disk refused the record for so long that {lost} were dropped"
        _log.warning("%s: %s", self.folder, message)
        # Part of the chain: the record itself says what it lacks.
        self.event(
            Event("monitor_error", self.last_step, "warning", message, {"error": message, "where": "record"})
        )


def _norm_text(norm: float | None) -> str:
    if norm is None:
        return "null"
    text = format(norm, _NORM_FORMAT)
    return _NON_FINITE_NORM.get(text, text)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
