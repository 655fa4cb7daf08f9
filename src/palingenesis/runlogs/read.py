"""read_log: whatever holds a run's numbers in, the table out.

A file is known by its first bytes, a folder by what is in it (``folders.py``), text by its lines
(``detect.py``). Text is read in pieces; nothing but the numbers is kept.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, BinaryIO, cast

from palingenesis.errors import RunLogError
from palingenesis.record.format import RUN_FILE
from palingenesis.runlogs import names, sqlite, wandb
from palingenesis.runlogs.documents import is_document, read_document
from palingenesis.runlogs.folders import find_in_folder
from palingenesis.runlogs.formats import ours
from palingenesis.runlogs.record import read_record, with_plan
from palingenesis.runlogs.table import RunLog
from palingenesis.runlogs.tensorboard import is_events, read_events
from palingenesis.runlogs.text import TextLog

STDIN = "-"
#: Bytes read at a time.
PIECE = 1 << 20
#: Bytes by which a file is known.
_HEAD = 1 << 16
_GZIP = b"\x1f\x8b"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
#: A text has fewer control characters than this share.
_MOST_CONTROL = 0.05
_CONTROL = bytes(set(range(32)) - {9, 10, 11, 12, 13, 27, 8})
#: Characters shown of a line that could not be read.
_SHOWN = 80

LOOKED_FOR = (
    "a run folder, the output of transformers, TRL, LLaMA-Factory, ms-swift, torchtune, torchtitan, "
    "nanotron, "
    "Megatron-LM, DeepSpeed, Lightning, OLMo-core, llm.c, nanoGPT or nanochat, trainer_state.json, "
    "TensorBoard, "
    "trackio or wandb files, CSV, JSONL, or one number a line"
)


#: Files of trackers: how they begin, and who reads them.
_FILES: tuple[tuple[Callable[[bytes], bool], Callable[[str, Path], RunLog]], ...] = (
    (is_events, read_events),
    (lambda head: head.startswith(sqlite.MAGIC), sqlite.read_trackio),
    (lambda head: head.startswith(wandb.MAGIC), wandb.read_wandb),
)


def read_log(source: str | Path) -> RunLog:
    """Read a log.

    Args:
        source: a file, a folder, or ``-`` for stdin.

    Returns:
        The table. It holds a loss, of training or of an evaluation.

    Raises:
        RunLogError: there is nothing, or nothing that can be read, or no loss in it.
        RecordError: a run folder that cannot be read.
    """
    if str(source) == STDIN:
        log = _read_stream(STDIN, cast(BinaryIO, sys.stdin.buffer))
    else:
        path = Path(source).expanduser()
        try:
            log = _read_path(path, str(source))
        except OSError as error:
            raise RunLogError(
                f"{source} cannot be read: {error.strerror or error}; give a file or folder you may read"
            ) from None
    return with_loss(log)


def with_loss(log: RunLog) -> RunLog:
    """The log, if it has a loss.

    Raises:
        RunLogError: it has none.
    """
    if any(names.is_loss(name) for name in log.columns):
        return log
    there = ", ".join(list(log.columns)[:8]) or "no number"
    raise RunLogError(
        f"{log.source} is read as {log.format} and holds no loss (found: {there}); give the log in which the "
        "trainer writes its loss"
    )


def missing(source: str) -> RunLogError:
    """There is nothing at a path."""
    return RunLogError(f"there is no {source}; give a run folder, a trainer's log, or - for stdin")


def is_text(path: Path) -> bool:
    """Whether a file is one of lines, and can be read on as it grows."""
    if path.is_dir():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD)
    other = any(known(head) for known, _ in _FILES) or head.startswith(_GZIP)
    return bool(head.strip()) and not (other or is_binary(head) or is_document(head))


def _read_path(path: Path, source: str) -> RunLog:
    if not path.exists():
        raise missing(source)
    if path.is_dir():
        found = find_in_folder(path, source)
        return read_record(path, source) if found == path else _read_path(found, source)
    if path.stat().st_size == 0 and path.is_file():
        raise RunLogError(f"{source} is empty: expected {LOOKED_FOR}")
    with path.open("rb") as file:
        log = _read_stream(source, file, path)
    return _beside_record(log, path)


def _beside_record(log: RunLog, path: Path) -> RunLog:
    """The log that ``pgs train`` keeps in a run folder: what it leaves out is in ``run.json`` beside it."""
    if log.format != ours.FORMAT.id or not (path.parent / RUN_FILE).is_file():
        return log
    return with_plan(log, path.parent)


def _read_stream(source: str, file: IO[bytes], path: Path | None = None) -> RunLog:
    head = file.read(_HEAD)
    if path is not None:
        for known, read in _FILES:
            if known(head):
                return _dated(read(source, path), path)
    if head.startswith(_GZIP) and path is not None:
        with gzip.open(path, "rb") as unpacked:
            return _read_unpacked(source, cast(IO[bytes], unpacked), path)
    return _read_bytes(source, head, file, path)


def _read_unpacked(source: str, file: IO[bytes], path: Path) -> RunLog:
    try:
        return _read_bytes(source, file.read(_HEAD), file, path)
    except (EOFError, gzip.BadGzipFile) as error:
        raise RunLogError(f"{source} is a damaged gzip file ({error}): unpack it as far as it goes") from None


def _read_bytes(source: str, head: bytes, file: IO[bytes], path: Path | None) -> RunLog:
    if not head.strip():
        head += file.read(_HEAD)
        if not head.strip():
            raise RunLogError(f"{source} is empty: expected {LOOKED_FOR}")
    if is_binary(head):
        raise RunLogError(f"{source} is a binary file of no known kind: expected {LOOKED_FOR}")
    if is_document(head):
        text = (head + file.read()).decode("utf-8-sig", "replace")
        return _dated(read_document(source, text), path)
    log = TextLog(source)
    log.feed(head)
    for piece in _pieces(file):
        log.feed(piece)
    log.finish()
    return text_table(log, path)


def text_table(log: TextLog, path: Path | None) -> RunLog:
    """The table of a text that was read.

    Raises:
        RunLogError: it is of no known format.
    """
    if not log.known:
        line = log.first_line if len(log.first_line) <= _SHOWN else log.first_line[:_SHOWN] + "…"
        raise RunLogError(
            f"{log.facts.source} is a log of no known format, or has no loss in it: looked for "
            f"{LOOKED_FOR}; its "
            f"first line is {line!r}"
        )
    return _dated(log.table(), path)


def _dated(log: RunLog, path: Path | None) -> RunLog:
    import dataclasses

    return log if path is None else dataclasses.replace(log, modified=path.stat().st_mtime)


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece


def is_binary(head: bytes) -> bool:
    """Whether this is the beginning of no text."""
    if head.startswith(_UTF16):
        return False
    return len(head) - len(head.translate(None, _CONTROL)) > _MOST_CONTROL * len(head)
