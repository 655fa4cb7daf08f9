"""The entries of a JSON array, one after the other: as much of a file is in memory as its longest entry."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

#: Characters that are read at a time. An entry that is longer doubles it until it is whole.
WINDOW = 2**20
_BLANK = re.compile(r"[ \t\n\r]*")
#: What numbers are written with.
_DIGITS = re.compile(r"[-+.0-9eE]*")
#: How far before the end of what was read a decoder may complain about an entry that only goes on: the
#: longest thing that it takes in one piece is an escape, or a word such as ``-Infinity``.
_LONGEST_PIECE = 12
#: A decoder says where such a text begins, which may be far before the end.
_OPEN_TEXT = "Unterminated string"


def begins_array(path: Path) -> bool:
    """Whether the first character of a file, blanks and a byte order mark aside, opens an array."""
    with path.open("rb") as file:
        begins = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    return begins[:1] == b"["


def entries(path: Path) -> Iterator[Any]:
    """The entries of the array that a file holds.

    Raises:
        ValueError: the file holds no array, or one that is broken; the entries before that were given.
        RecursionError: an entry is nested too deeply.
    """
    # New lines as they are: a place in the text is told as one.
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from _Window(file).entries()


@dataclass
class _Window:
    """A part of the text. ``text[at:]`` is what was not taken yet; ``before`` characters were given up."""

    file: TextIO
    text: str = ""
    at: int = 0
    before: int = 0
    ended: bool = False
    decoder: json.JSONDecoder = field(default_factory=json.JSONDecoder)

    def entries(self) -> Iterator[Any]:
        if self._next() != "[":
            raise ValueError("an array of objects is needed")
        self.at += 1
        number, more = 0, self._next() != "]"
        if not more:
            self.at += 1
        while more:
            number += 1
            yield self._entry(number)
            follows = self._next()
            if follows not in (",", "]"):
                raise self._broken(
                    number, "a comma or the end of the array is needed" if follows else "it ends"
                )
            self.at += 1
            more = follows == ","
        if self._next():
            raise ValueError(f"something follows the array, at character {self.before + self.at + 1}")

    def _entry(self, number: int) -> Any:
        self._next()
        wanted = WINDOW
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                goes_on = error.msg.startswith(_OPEN_TEXT) or error.pos > len(self.text) - _LONGEST_PIECE
                if self.ended or not goes_on:
                    raise self._broken(number, error.msg, error.pos) from None
            else:
                if self.ended or not self._may_go_on(end):
                    self.at = end
                    return value
            self._read(wanted)
            wanted *= 2

    def _may_go_on(self, end: int) -> bool:
        """Whether what was decoded up to ``end`` may be the beginning of a longer number."""
        digits = _DIGITS.match(self.text, end)
        return digits is None or digits.end() == len(self.text)

    def _next(self) -> str:
        """Go to the next character that is not blank, and say which; nothing at the end."""
        while True:
            found = _BLANK.match(self.text, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self._read(WINDOW)

    def _read(self, count: int) -> None:
        """Put more behind what was not taken yet, and give up what was."""
        more = self.file.read(count)
        self.ended = not more
        self.before += self.at
        self.text = self.text[self.at :] + more
        self.at = 0

    def _broken(self, number: int, why: str, place: int | None = None) -> ValueError:
        at = self.before + (self.at if place is None else place) + 1
        return ValueError(f"entry {number} is broken, at character {at}: {why[:1].lower() + why[1:]}")
