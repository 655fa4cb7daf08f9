"""Is the record as it was written?

The events form a chain: each line carries the hash of its own bytes and of the line before it. A byte
changed, a line taken out, put in or moved breaks the chain at that place. Lines taken off the end are found
through ``run.json``, which holds the number of events and the last hash once the run has ended.

What this does not prove: somebody who computes the whole chain anew, run.json included, leaves no trace; and
in a run without an end the last lines can be taken off unseen. Metrics and layer norms are not in the chain.

Half a last line is what a kill leaves, and no sign of tampering. The record is then not whole, so ``ok`` is
false and the problem says that the line is torn; readers leave it out, and resuming cuts it off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from palingenesis.errors import RecordError
from palingenesis.record.folder import open_run_folder
from palingenesis.record.format import CHAIN_START, EVENTS_FILE, RUN_FILE, decode, sha256
from palingenesis.record.lines import Line, Lines, read_lines

_HASH_START = b',"hash":"'
_HASH_LENGTH = 64
_TAIL_LENGTH = len(_HASH_START) + _HASH_LENGTH + len(b'"}')


class Verification(NamedTuple):
    """What was found: the first problem, the line of events.jsonl it is in, and how many events are whole."""

    ok: bool
    problem: str | None
    line: int | None
    events: int


class _Link(NamedTuple):
    seq: Any
    prev: Any
    hash: str


def verify(folder: str | os.PathLike[str]) -> Verification:
    """Check the chain of events of a run folder.

    Raises:
        RecordError: there is no run in it, or one that only a newer version can read.
    """
    path, info, problem = open_run_folder(folder)
    try:
        lines = read_lines(path / EVENTS_FILE)
    except OSError as error:
        raise RecordError(f"{path / EVENTS_FILE} cannot be read: {error.strerror or error}") from None
    if not (path / EVENTS_FILE).exists():
        return Verification(False, f"{EVENTS_FILE} is missing", None, 0)
    return (
        _broken_chain(lines)
        or _broken_end(lines, info.get("end"))
        or Verification(problem is None, problem, None, len(lines.whole))
    )


def _broken_chain(lines: Lines) -> Verification | None:
    links = [_link(line) for line in lines.whole]
    before = _Link(0, None, CHAIN_START)
    for index, link in enumerate(links):
        number = index + 1
        if isinstance(link, str):
            return Verification(False, f"line {number} {link}", number, index)
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
            return Verification(False, "line 1 was altered: it does not begin a chain", 1, 0)
        problem = f"line {number - 1} was altered: line {number} follows on a line with another hash"
        return Verification(False, problem, number - 1, index - 1)
    if not isinstance(link.seq, int) or link.seq < expected:
        problem = f"line {number} was put in: event {expected} belongs here, event {link.seq} stands here"
    elif moved:
        problem = f"line {number} was reordered: event {expected} belongs here, event {link.seq} stands here"
    else:
        last = link.seq - 1
        gone = f"event {expected} is" if last == expected else f"events {expected} to {last} are"
        problem = f"line {number}: {gone} missing before it"
    return Verification(False, problem, number, index)


def _broken_end(lines: Lines, end: Any) -> Verification | None:
    count = len(lines.whole)
    recorded = end.get("events") if isinstance(end, Mapping) else None
    if isinstance(recorded, int) and recorded > count:
        torn = "torn" if lines.torn else "missing"
        problem = f"line {count + 1} is {torn}: {RUN_FILE} counts {recorded} events, {count} are whole"
        return Verification(False, problem, count + 1, count)
    if isinstance(recorded, int) and (recorded < count or lines.torn):
        problem = (
            f"line {recorded + 1} was added after the end of the run: {RUN_FILE} counts {recorded} events"
        )
        return Verification(False, problem, recorded + 1, recorded)
    if lines.torn:
        problem = (
            f"line {count + 1} is torn: the writing was interrupted there; readers leave it out, resuming "
            f"cuts it off, and the {count} events before it are whole"
        )
        return Verification(False, problem, count + 1, count)
    if isinstance(end, Mapping) and count and _last_hash(lines) != end.get("last_hash"):
        problem = f"line {count} was altered: its hash is not the last one of {RUN_FILE}"
        return Verification(False, problem, count, count - 1)
    return None


def _last_hash(lines: Lines) -> str | None:
    link = _link(lines.whole[-1])
    return link.hash if isinstance(link, _Link) else None
