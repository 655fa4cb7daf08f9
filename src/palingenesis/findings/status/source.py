"""A status of whatever was given: looked at once, or watched while it grows."""

from __future__ import annotations

import dataclasses
import select
import sys
import time
from pathlib import Path

import numpy as np

from palingenesis.errors import RunLogError
from palingenesis.findings.curve import analyse, findings_of
from palingenesis.findings.curve.told import not_said
from palingenesis.findings.finding import Finding, Report
from palingenesis.findings.pathologies import pathologies_of
from palingenesis.findings.status.status import Status, status_of
from palingenesis.findings.status.words import number, step_in_words
from palingenesis.record.folder import holds_run
from palingenesis.record.reader import Run, load_run
from palingenesis.runlogs.table import Column, RunLog

STDIN = "-"
#: What ``pgs train`` calls its log (``sft/telling.py``, which needs torch).
_OWN_LOG = "train.log"

#: Losses of a curve.
_LEAST_OF_CURVE = 2

#: Bytes of a block of Python (io.DEFAULT_BUFFER_SIZE), and of the C library, which is smaller.
_BLOCK, _PAGE = 8192, 4096


def look(source: str | Path) -> Status:
    """The status by a log as it is now.

    Raises:
        RunLogError: there is no log, or only one loss in it.
    """
    from palingenesis.runlogs.read import read_log

    log = read_log(source)
    if (problem := too_short(log)) is not None:
        raise RunLogError(problem)
    return _judged(log, source, time.time())


def _judged(log: RunLog, source: str | Path, now: float, watched: Column | None = None) -> Status:
    record = record_of(source)
    # The folder's record knows more than the log that lies in it.
    found = pathologies_of(log if record is None else record)
    found += not_said(_stalls(log), found)
    return status_of(
        log, now, record=record, pathologies=found, watched=watched, held_back=_held_back(source)
    )


def _stalls(log: RunLog) -> list[Finding]:
    """Plateaus that last: a loss that has stood still is no trend, and not healthy."""
    if len(log.live(log.loss_name).value) < _LEAST_OF_CURVE:
        return []
    return [
        one
        for one in findings_of(analyse(log))
        if one.check == "curve.plateau" and one.evidence["kind"] == "stall"
    ]


def _held_back(source: str | Path) -> float:
    """Share of a file that is one block more, if it is written in blocks: its size then is that of some.

    Python and the C library buffer what goes to a file, so that rows come in heaps minutes apart.
    """
    path = Path(source).expanduser()
    size = path.stat().st_size if path.is_file() else 0
    return _BLOCK / size if size and size % _PAGE == 0 else 0.0


def report_of(status: Status) -> Report:
    """The status as every command reports: its findings, and all else as facts."""
    facts = dataclasses.asdict(dataclasses.replace(status, findings=()))
    del facts["findings"]
    return Report("monitor", status.findings, {**facts, "share_done": status.share_done})


def record_of(source: str | Path) -> Run | None:
    """The record, if a run folder was given, or the log that ``pgs train`` keeps in one."""
    given = Path(source).expanduser()
    folder = given.parent if given.name == _OWN_LOG and given.is_file() else given
    return load_run(folder) if folder.is_dir() and holds_run(folder) else None


def too_short(log: RunLog) -> str | None:
    """Why nothing can be said of a log yet: a single loss has no trend and no speed."""
    loss = log.live(log.loss_name)
    if len(loss.value) != 1:
        return None
    at = step_in_words(float(loss.step[0]))
    return (
        f"{log.source} holds one loss only ({number(float(loss.value[0]))} at step {at}): expected two at "
        "least; wait for the next row, or give --follow"
    )


class Watch:
    """Looks at a log again and again.

    Remembers when steps were seen to arrive: the time left by that, where the log has no times.
    """

    def __init__(self, source: str | Path) -> None:
        from palingenesis.runlogs.follow import Follower

        self._source = str(source)
        self._follower = Follower(source)
        self._seen: list[tuple[float, float]] = []

    def look(self) -> Status | None:
        """The status now; ``None`` as long as too little is in the log.

        Raises:
            RunLogError: there is no log.
        """
        log = self._follower.read()
        if log is None or too_short(log) is not None:
            return None
        now = time.time()
        self._note(log, now)
        return _judged(log, self._source, now, self._watched())

    def close(self) -> None:
        """Look no more: the log's file is let go of."""
        self._follower.close()

    @property
    def closed(self) -> bool:
        """Nothing can come any more: what wrote into the pipe has ended, and all of it was read."""
        if self._source != STDIN:
            return False
        pipe = select.poll()
        pipe.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
        return any(flags & select.POLLHUP and not flags & select.POLLIN for _, flags in pipe.poll(0))

    def _note(self, log: RunLog, now: float) -> None:
        step = log.last_step
        if step is None or (self._seen and step == self._seen[-1][0]):
            return
        if self._seen and step < self._seen[-1][0]:
            self._seen.clear()  # it was started again
        self._seen.append((step, now))

    def _watched(self) -> Column | None:
        # The first time is that of looking, not of arriving.
        seen = np.array(self._seen[1:], dtype=np.float64).reshape(-1, 2)
        return Column(np.arange(len(seen)), seen[:, 0], seen[:, 1]) if len(seen) > 1 else None
