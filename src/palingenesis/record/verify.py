"""Is the record as it was written?

The events form a chain: each line carries the hash of its own bytes and of the line before it. A byte
changed, a line taken out, put in or moved breaks the chain at that place. Lines taken off the end are found
through ``run.json``, which holds the number of events and the last hash once the run has ended. Metrics and
layer norms are held against the digests in the event that ended the run (see ``seal``).

What this does not prove: somebody who computes the whole chain anew, run.json included, leaves no trace; and
in a run without an end the last lines can be taken off unseen, and its metrics and layers are not covered.

Half a last line is what a kill leaves, and no sign of tampering. The record is then not whole, so ``ok`` is
false and the problem says that the line is torn; readers leave it out, and resuming cuts it off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from palingenesis.errors import RecordError
from palingenesis.record.folder import open_run_folder
from palingenesis.record.format import CHAIN_START, EVENTS_FILE, METRICS_FILE, RUN_FILE, decode, sha256
from palingenesis.record.lines import Line, Lines, read_lines
from palingenesis.record.seal import Seal, broken, seals_in

_HASH_START = b',"hash":"'
_HASH_LENGTH = 64
_TAIL_LENGTH = len(_HASH_START) + _HASH_LENGTH + len(b'"}')
#: What the lines of these two events hold; others need not be read for them.
_END, _RESUME = b'"run_ended"', b'"run_resumed"'


class Verification(NamedTuple):
    """What was found: the first problem, and how far the record was looked at."""

    ok: bool
    problem: str | None
    line: int | None
    """The line of events.jsonl that the problem is in; ``None`` where it is in none of them."""
    events: int
    """How many events are whole before the problem, or in all."""
    sealed_step: int | None = None
    """The step up to which metrics and layers are covered; ``None`` where they are not."""
    rows: str | None = None
    """What is known of metrics and layers, in words; ``None`` where there is a problem."""


class _Link(NamedTuple):
    seq: Any
    prev: Any
    hash: str


class _Ends(NamedTuple):
    """What the ends of a run hold; it has several if it was resumed."""

    seals: list[dict[str, Seal]]  # of all ends that hold any
    ended: bool  # the record stops at an end
    sealed: bool  # that one holds seals


def verify(folder: str | os.PathLike[str]) -> Verification:
    """Check the events of a run folder, and what the run's end says of metrics and layers.

    Raises:
        RecordError: there is no run in it, or one that only a newer version can read.
    """
    path, info, problem = open_run_folder(folder)
    try:
        lines = read_lines(path / EVENTS_FILE)
        if not (path / EVENTS_FILE).exists():
            return _problem(f"{EVENTS_FILE} is missing", None, 0)
        found = _broken_chain(lines) or _broken_end(lines, info.get("end"))
        if found is not None:
            return found
        if problem is not None:
            return _problem(problem, None, len(lines.whole))
        return _against_seals(path, lines, has_end=isinstance(info.get("end"), Mapping))
    except OSError as error:
        where = error.filename or path
        raise RecordError(
            f"{where} cannot be read: {error.strerror or error}; expected files you may read"
        ) from None


def in_words(found: Verification) -> str:
    """What was found, in one sentence."""
    if not found.ok:
        return f"not intact: {found.problem}"
    intact = f"intact: {found.events} event{'' if found.events == 1 else 's'}, each as it was written"
    return f"{intact} ({found.rows})" if found.sealed_step is None else f"{intact}; {found.rows}"


def _problem(problem: str, line: int | None, events: int) -> Verification:
    return Verification(False, problem, line, events)


def _against_seals(path: Path, lines: Lines, *, has_end: bool) -> Verification:
    ends = _ends(lines)
    problem = broken(path, ends.seals, nothing_after=has_end and ends.sealed)
    if problem is not None:
        return _problem(problem, None, len(lines.whole))
    step = ends.seals[-1][METRICS_FILE].step if ends.seals else None
    if ends.sealed:
        rows = "metrics and layers as they were at the end"
    elif step is not None:
        rows = f"metrics and layers as they were at step {step}, and what came after is not covered"
    elif ends.ended:
        rows = "metrics and layers are not covered: the end of the run holds no digest of them"
    else:
        rows = "metrics and layers are not covered: the run has no end"
    return Verification(True, None, None, len(lines.whole), step, rows)


def _ends(lines: Lines) -> _Ends:
    seals: list[dict[str, Seal]] = []
    ended = sealed = False
    for line in lines.whole:
        if _END not in line.text and _RESUME not in line.text:
            continue
        event = decode(line.text)
        if event.get("event") == "run_resumed":
            ended = sealed = False
        elif event.get("event") == "run_ended":
            found = seals_in(event)
            ended, sealed = True, found is not None
            seals += [] if found is None else [found]
    return _Ends(seals, ended, sealed)


def _broken_chain(lines: Lines) -> Verification | None:
    links = [_link(line) for line in lines.whole]
    before = _Link(0, None, CHAIN_START)
    for index, link in enumerate(links):
        number = index + 1
        if isinstance(link, str):
            return _problem(f"line {number} {link}", number, index)
        if link.prev != before.hash or link.seq != before.seq + 1:
            return _out_of_place(links, index, link, before)
        before = link
    return None


def _link(line: Line) -> _Link | str:
    """The link that a line forms, or what is wrong with it."""
    body, tail = line.text[:-_TAIL_LENGTH] + b"}", line.text[-_TAIL_LENGTH:]
    digest = tail[len(_HASH_START) : -2].decode("ascii", "replace")
    try:
        content = decode(body)
    except ValueError:
        content = None
    if not isinstance(content, dict) or not tail.startswith(_HASH_START) or not tail.endswith(b'"}'):
        return "was altered: it is no whole event any more"
    if sha256(body) != digest:
        return "was altered: its content does not match its hash"
    return _Link(content.get("seq"), content.get("prev"), digest)


def _out_of_place(links: list[_Link | str], index: int, link: _Link, before: _Link) -> Verification:
    number, expected = index + 1, before.seq + 1
    moved = any(isinstance(later, _Link) and later.seq == expected for later in links[index + 1 :])
    if link.seq == expected:
        if index == 0:
            return _problem("line 1 was altered: it does not begin a chain", 1, 0)
        problem = f"line {number - 1} was altered: line {number} follows on a line with another hash"
        return _problem(problem, number - 1, index - 1)
    if not isinstance(link.seq, int) or link.seq < expected:
        problem = f"line {number} was put in: event {expected} belongs here, event {link.seq} stands here"
    elif moved:
        problem = f"line {number} was reordered: event {expected} belongs here, event {link.seq} stands here"
    else:
        last = link.seq - 1
        gone = f"event {expected} is" if last == expected else f"events {expected} to {last} are"
        problem = f"line {number}: {gone} missing before it"
    return _problem(problem, number, index)


def _broken_end(lines: Lines, end: Any) -> Verification | None:
    count = len(lines.whole)
    recorded = end.get("events") if isinstance(end, Mapping) else None
    if isinstance(recorded, int) and recorded > count:
        torn = "torn" if lines.torn else "missing"
        problem = f"line {count + 1} is {torn}: {RUN_FILE} counts {recorded} events, {count} are whole"
        return _problem(problem, count + 1, count)
    if isinstance(recorded, int) and (recorded < count or lines.torn):
        problem = (
            f"line {recorded + 1} was added after the end of the run: {RUN_FILE} counts {recorded} events"
        )
        return _problem(problem, recorded + 1, recorded)
    if lines.torn:
        problem = (
            f"line {count + 1} is torn: the writing was interrupted there; readers leave it out, resuming "
            f"cuts it off, and the {count} events before it are whole"
        )
        return _problem(problem, count + 1, count)
    if isinstance(end, Mapping) and count and _last_hash(lines) != end.get("last_hash"):
        problem = f"line {count} was altered: its hash is not the last one of {RUN_FILE}"
        return _problem(problem, count, count - 1)
    return None


def _last_hash(lines: Lines) -> str | None:
    link = _link(lines.whole[-1])
    return link.hash if isinstance(link, _Link) else None
