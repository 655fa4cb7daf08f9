"""Whole lines in a file: appended by one writer, read by anyone.

A line counts once its newline is on disk. Writers therefore never leave half a line behind if they can help
it, and readers leave out what follows the last newline.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

#: Bytes read at a time when looking for the last newline from the end.
_BLOCK = 1 << 16


class LineFile:
    """Appends lines to one file, and holds what the disk would not take until it does.

    Unbuffered below the list of waiting lines: a forked child that exits writes nothing twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = FileIO(path, "ab")
        #: Bytes on disk that are whole lines.
        self.size = os.fstat(self._file.fileno()).st_size
        self.waiting_bytes = 0
        self._waiting: list[bytes] = []
        # The file may be longer than `size`: half a line is there, or an interrupted call left it unknown.
        self._uncertain = False

    def add(self, line: bytes) -> None:
        """Put a line (without its newline) behind the waiting ones."""
        self._waiting.append(line + b"\n")
        self.waiting_bytes += len(line) + 1

    def write(self) -> None:
        """Write every waiting line; what could not be written keeps waiting.

        Raises:
            OSError: the disk is full, the file is gone, …
        """
        if not self._waiting and not self._uncertain:
            return
        if not self.is_in_place():
            raise FileNotFoundError(errno.ENOENT, "the file was moved or removed", str(self.path))
        self._cut_back()
        data = b"".join(self._waiting)
        written = 0
        # Set first: an interrupt in the middle leaves it on, and the next call starts over from `size`.
        self._uncertain = True
        try:
            while written < len(data):
                written += self._file.write(memoryview(data)[written:])
        except OSError:
            self._settle(data, written)
            self._uncertain = True
            with contextlib.suppress(OSError):  # tried again before the next write
                self._cut_back()
            raise
        self._settle(data, written)

    def _settle(self, data: bytes, written: int) -> None:
        whole = data.rfind(b"\n", 0, written) + 1
        waiting = [data[whole:]] if whole < len(data) else []
        size = self.size + whole
        self.size, self._waiting = size, waiting
        self.waiting_bytes = len(data) - whole
        self._uncertain = written > whole

    def _cut_back(self) -> None:
        if self._uncertain:
            self._file.truncate(self.size)
            self._uncertain = False

    def is_in_place(self) -> bool:
        """Whether the path still leads to the file being written."""
        try:
            there = os.stat(self.path)
            return os.path.samestat(there, os.fstat(self._file.fileno()))
        except OSError:
            return False

    def reopen(self) -> None:
        """Take up a file that is back in its place, if all that was written is in it.

        Raises:
            OSError: it is not there, or is shorter than what was written.
        """
        # Without O_CREAT: a folder that someone removed stays removed.
        flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        file = FileIO(os.open(self.path, flags), "ab")
        if os.fstat(file.fileno()).st_size < self.size:
            file.close()
            raise OSError(errno.EIO, "the file is shorter than what was written", str(self.path))
        self._file.close()
        self._file, self._uncertain = file, True

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Line(NamedTuple):
    number: int  # from 1
    offset: int  # of its first byte in the file
    text: bytes  # without the newline


class Lines(NamedTuple):
    whole: list[Line]
    torn: bytes  # what follows the last newline


def read_lines(path: Path) -> Lines:
    """Every whole line of a file, and the torn rest. A file that does not exist has none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Lines([], b"")
    return Lines(list(_split(data)), data[data.rfind(b"\n") + 1 :])


def _split(data: bytes) -> Iterator[Line]:
    start = 0
    for number, text in enumerate(data.split(b"\n")[:-1], 1):
        yield Line(number, start, text)
        start += len(text) + 1


def cut_torn_line(path: Path) -> None:
    """Remove what follows the last newline. A file that does not exist is left so."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        whole = _after_last_newline(file, end)
        if whole < end:
            file.truncate(whole)


def _after_last_newline(file: BinaryIO, end: int) -> int:
    position = end
    while position > 0:
        start = max(0, position - _BLOCK)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0
