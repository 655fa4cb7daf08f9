"""Follower: a log that is read on as it grows.

A text is read from where the last look ended. A file that was rotated away, cut to nothing, or written anew
is read from its beginning, behind what was there before; so a run that starts again is a restart in the
table. Anything but text (folders, files of trackers, JSON documents) is read anew when it has changed.
"""

from __future__ import annotations

import dataclasses
import os
import select
import sys
from pathlib import Path
from typing import BinaryIO

from palingenesis.errors import RunLogError
from palingenesis.runlogs import names
from palingenesis.runlogs.read import PIECE, STDIN, is_text, missing, read_log
from palingenesis.runlogs.table import RunLog
from palingenesis.runlogs.text import TextLog

#: Bytes by which a file is known to be the same as at the last look.
_SAME = 256


class Follower:
    """Reads a log again and again.

    Args:
        source: a file, a folder, or ``-`` for stdin.
    """

    def __init__(self, source: str | Path) -> None:
        self._source = str(source)
        self._path = Path(source).expanduser()
        self._text: _GrowingText | None = None
        self._log: RunLog | None = None
        self._changed: object = None
        if self._source == STDIN:
            self._text = _GrowingText(STDIN, None)

    def read(self) -> RunLog | None:
        """The table now; ``None`` as long as there is no loss in the log.

        Raises:
            RunLogError: there was no such file from the first, or it cannot be read.
        """
        if self._text is None and not self._path.exists():
            if self._log is None and self._changed is None:
                raise missing(self._source)
            return self._log  # removed; it may come back
        try:
            if self._text is None and is_text(self._path):
                self._text = _GrowingText(self._source, self._path)
            return self._read_on(self._text) if self._text is not None else self._read_anew()
        except OSError as error:
            raise RunLogError(
                f"{self._source} cannot be read: {error.strerror or error}; give a file or folder you "
                f"may read"
            ) from None

    @property
    def closed(self) -> bool:
        """Nothing can come any more: stdin was read to its end."""
        return self._text is not None and self._text.ended

    def close(self) -> None:
        """Let go of the file."""
        if self._text is not None:
            self._text.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_on(self, text: _GrowingText) -> RunLog | None:
        if text.take() and text.log.known:
            table = text.log.table()
            if any(names.is_loss(name) for name in table.columns):
                self._log = dataclasses.replace(table, modified=text.modified)
        return self._log

    def _read_anew(self) -> RunLog | None:
        changed = _state(self._path)
        if changed != self._changed:
            self._changed = changed
            try:
                self._log = read_log(self._source)
            except RunLogError:
                if self._log is None and not self._path.is_dir() and self._path.stat().st_size:
                    raise
        return self._log


def _state(path: Path) -> object:
    """What changes when anything of a file or folder does."""
    paths = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [(str(one), one.stat()) for one in paths if one.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


class _GrowingText:
    """A file of lines, or stdin, and what was read of it."""

    def __init__(self, source: str, path: Path | None) -> None:
        self.log = TextLog(source)
        self.modified: float | None = None
        self._path = path
        self._file: BinaryIO | None = None if path is None else path.open("rb")
        self._head = b""
        self.ended = False
        """Of stdin: its writer is gone."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def take(self) -> bool:
        """Read what is new; whether there was anything."""
        if self._file is None:
            return self._take_stdin()
        new = False
        if self._was_rewritten():
            self._again(self._file)
            new = True
        new |= self._take_file(self._file)
        if self._was_replaced(self._file):
            assert self._path is not None
            self._take_file(self._file)
            self._file.close()
            self._file = self._path.open("rb")
            self._again(self._file)
            new |= self._take_file(self._file)
        return new

    def _take_file(self, file: BinaryIO) -> bool:
        new = False
        while piece := file.read(PIECE):
            if len(self._head) < _SAME:
                self._head += piece[: _SAME - len(self._head)]
            self.log.feed(piece)
            new = True
        if new:
            self.modified = os.fstat(file.fileno()).st_mtime
        return new

    def _was_rewritten(self) -> bool:
        """The file is shorter than what was read of it, or begins otherwise."""
        assert self._file is not None
        position = self._file.tell()
        if os.fstat(self._file.fileno()).st_size < position:
            return True
        self._file.seek(0)
        same = self._file.read(len(self._head)) == self._head
        self._file.seek(position)
        return not same

    def _was_replaced(self, file: BinaryIO) -> bool:
        """Another file has its name."""
        assert self._path is not None
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(file.fileno()))
        except FileNotFoundError:  # between two files
            return False

    def _again(self, file: BinaryIO) -> None:
        file.seek(0)
        self._head = b""
        self.log.begin_again()

    def _take_stdin(self) -> bool:
        """What waits in the pipe, without waiting for more."""
        new = False
        while not self.ended and select.select([sys.stdin.buffer], [], [], 0)[0]:
            piece = os.read(sys.stdin.fileno(), PIECE)
            if not piece:
                self.ended = True
                self.log.finish()
                return True
            self.log.feed(piece)
            new = True
        return new
