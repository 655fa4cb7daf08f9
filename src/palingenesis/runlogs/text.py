"""TextLog: bytes of a log in, in pieces of any size; cells out. Whole lines count, the last one with care.

Nothing here depends on where the bytes come from, so that a file can be read as it grows.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

import numpy as np

from palingenesis.runlogs import names
from palingenesis.runlogs.assemble import PART_BITS, Facts, assemble
from palingenesis.runlogs.cells import Cells
from palingenesis.runlogs.detect import Detector
from palingenesis.runlogs.fast import FastReader
from palingenesis.runlogs.formats.base import LineFormat, Parsed
from palingenesis.runlogs.happenings import ANSI, BAR, RANK, TOTAL, happened
from palingenesis.runlogs.table import RunLog
from palingenesis.runlogs.templates import Unfit
from palingenesis.runlogs.times import stamp

#: A line may be no longer; what follows is taken as another part of it.
_LONGEST_LINE = 1 << 20
#: Warnings and errors that are kept; skips and overflows are counted, so all of them are.
_MOST_TOLD = 2000
#: Lines that are read one by one before what was learnt from them is used.
_BATCH = 256
#: Characters in which the last number of a line stands.
_END = 64
_LAST_NUMBER = re.compile(r"\d+(?:\.(\d*))?(?:[eE][-+]?(\d*))?\s*\Z")
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


class TextLog:
    """A log of lines, as far as it was read.

    Args:
        source: what it is called.
        formats: what it may be.
    """

    def __init__(self, source: str, formats: tuple[LineFormat, ...] | None = None) -> None:
        self.facts = Facts(source)
        self.cells = Cells()
        self.first_line = ""
        self._detector = Detector(formats)
        self._format: LineFormat | None = None
        self._waiting: list[tuple[int, str]] = []
        self._rest = b""
        self._decoder: codecs.IncrementalDecoder | None = None
        self._line, self._part = 1, 0
        self._rows: list[tuple[int, str]] = []
        self._encoding = "utf-8"
        self._fast: FastReader | None = None
        self._told = 0
        self._bar_end: int | None = None
        self._unread_line = 0

    # -- bytes to lines --------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Take more of the log; what follows the last line break waits for its end."""
        if self._decoder is None:
            data = self._begin(data)
        data = self._rest + data
        cut = data.rfind(b"\n") + 1
        if not cut and len(data) > _LONGEST_LINE:
            cut = data.rfind(b"\r") + 1 or len(data)
        self._rest = data[cut:]
        if cut:
            self._take(data[:cut])

    def _begin(self, data: bytes) -> bytes:
        self._encoding = "utf-8"
        for mark, name in _BOMS:
            if data.startswith(mark):
                data, self._encoding = data[len(mark) :], name
        if self._encoding != "utf-8":
            self._fast = None
        self._decoder = codecs.getincrementaldecoder(self._encoding)("replace")
        return data

    def _take(self, data: bytes) -> None:
        assert self._decoder is not None
        if self._fast is not None and self._part == 0 and data.endswith(b"\n"):
            self._take_many(self._fast, data)
            return
        for key, text in self._parts(self._decoder.decode(data)):
            self._segment(key, text)

    def _take_many(self, fast: FastReader, data: bytes) -> None:
        """Lines that are like others together, the rest one by one."""
        first = self._line
        piece = fast.take_apart(data)
        left = np.flatnonzero(piece.end > piece.start)
        while len(left):
            taken = fast.take(piece, left, first, self.cells)
            self.facts.unread += taken.unread
            for line in taken.rows[-2:].tolist():
                self._note_row((first + line) << PART_BITS | 1, piece.text(line).decode("utf-8", "replace"))
            left, learnt = taken.left, fast.learnt
            while len(left) and fast.learnt == learnt:
                for line in left[:_BATCH].tolist():
                    self._line, self._part = first + line, 0
                    text = piece.text(line)
                    for key, part in self._parts_of(text.decode("utf-8", "replace")):
                        self._segment(key, part)
                    fast.see(piece, line)
                left = left[_BATCH:]
        self._line, self._part = first + len(piece.start), 0
        self.facts.lines = self._line - 1

    def _parts(self, text: str) -> Iterator[tuple[int, str]]:
        """Lines, and the parts between carriage returns, with their keys."""
        ends_line = text.endswith("\n")
        lines = text.split("\n")
        for number, line in enumerate(lines):
            if number == len(lines) - 1:
                if line:
                    yield from self._parts_of(line)
                break
            if line:
                yield from self._parts_of(line)
            self._line, self._part = self._line + 1, 0
        self.facts.lines = self._line - 1 if ends_line else self._line

    def _parts_of(self, line: str) -> Iterator[tuple[int, str]]:
        for part in line.split("\r") if "\r" in line else (line,):
            if part:
                if self._part < (1 << PART_BITS) - 1:
                    self._part += 1
                yield self._line << PART_BITS | self._part, part

    # -- lines to cells --------------------------------------------------------------------------------------

    def _segment(self, key: int, text: str) -> None:
        if "\x1b" in text:
            text = ANSI.sub("", text)
        if not self.first_line and text.strip():
            self.first_line = text.strip()
        if self._format is None:
            self._look(key, text)
        else:
            self._read(self._format, key, text)

    def _look(self, key: int, text: str) -> None:
        """Before the format is known."""
        self._detector.see(text)
        if self._detector.began:
            self._waiting.append((key, text))
            if self._detector.sure:
                self._settle()
        else:
            self._other(key, text)

    def _settle(self) -> None:
        self._format = self._detector.best()
        waiting, self._waiting = self._waiting, []
        if self._format is not None:
            self._know(self._format)
            for key, text in waiting:
                self._read(self._format, key, text)

    def _know(self, format: LineFormat) -> None:
        self.facts.format, self.facts.loss_kind = format.id, format.loss_kind
        self.facts.cannot_show = format.cannot_show
        if self._encoding == "utf-8":
            self._fast = FastReader(lambda text: self._probe(format, text), thousands=format.thousands)

    def _read(self, format: LineFormat, key: int, text: str) -> None:
        parsed = _row(format, text)
        if parsed is None:
            self._other(key, text)
            return
        if parsed.ended:
            self.facts.ended_key = key
        if parsed.goes_on:
            self.cells.add_continued(key, parsed.values)
        elif parsed.values:
            self.cells.add(key, parsed.values)
            self._note_row(key, text)

    def _note_row(self, key: int, text: str) -> None:
        """Keep the last rows, for the end of the log to be compared with."""
        self._rows = sorted([*self._rows, (key, text)])[-2:]

    @staticmethod
    def _probe(format: LineFormat, text: str) -> Parsed | Unfit | None:
        """What a line says that may stand for many others."""
        text = ANSI.sub("", text)
        parsed = _row(format, text)
        if parsed is None and (not text.strip() or BAR.match(text) or TOTAL.search(text) or happened(text)):
            return Unfit()
        return parsed

    def _other(self, key: int, text: str) -> None:
        """A line that is not of the format."""
        bar = BAR.match(text) if "%|" in text else None
        if bar is not None:
            self._bar(key, int(bar[1]), int(bar[2]))
            return
        if text.strip() and self._unread_line != key >> PART_BITS:
            # A line between whose carriage returns much stands is still one.
            self._unread_line = key >> PART_BITS
            self.facts.unread += 1
        if "steps" in text and (total := TOTAL.search(text)) is not None:
            self.facts.total_steps = int((total[1] or total[2]).replace(",", "")) or None
        event = happened(text)
        if event is not None:
            counted = event[0] in ("skipped", "overflow")
            self._told += not counted
            if counted or self._told <= _MOST_TOLD:
                self.facts.happened.append((event[0], key, event[1]))

    def _bar(self, key: int, at: int, end: int) -> None:
        """A progress bar; that of training is there first, others are of evaluations."""
        if self._bar_end is None:
            self._bar_end = end
        if end == self._bar_end and at <= end:
            self.cells.add(key, {names.BAR: float(at), names.BAR_END: float(end)})

    # -- the end ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Nothing more will come: what follows the last line break is all there is of the last line."""
        rest, self._rest = self._rest, b""
        if self._decoder is None or not rest.strip():
            return
        text = self._decoder.decode(rest, final=True)
        head, _, last = text.rpartition("\r")
        last = ANSI.sub("", last)
        for key, part in self._parts(head + "\r" if head else ""):
            self._segment(key, part)
        if self._format is None:
            self._settle_now()
        if self._format is None or _is_whole(last, self._rows, self._format):
            for key, part in self._parts(last):
                self._segment(key, part)
        self.facts.lines = self._line

    def _settle_now(self) -> None:
        if self._format is None and self._detector.began:
            self._settle()

    def begin_again(self) -> None:
        """What follows is another file, or the same one written anew: it goes on behind this one."""
        self.finish()
        self._decoder = None
        self._line, self._part = self._line + 1, 0

    @property
    def known(self) -> bool:
        """Whether the format is known; asking for it settles it, if anything speaks for one."""
        self._settle_now()
        return self._format is not None

    def table(self) -> RunLog:
        """The table so far."""
        self._settle_now()
        return assemble(self.cells, self.facts)


def _row(format: LineFormat, text: str) -> Parsed | None:
    """What a line says, with who wrote it and when."""
    parsed = format.read(text)
    if parsed is None or parsed.goes_on or not parsed.values:
        return parsed
    rank, when = RANK.match(text), stamp(text)
    if rank is not None:
        parsed.values[names.RANK] = float(rank[1])
    if when is not None:
        parsed.values.setdefault(names.TIME, when)
    return parsed


def _is_whole(text: str, rows: list[tuple[int, str]], format: LineFormat) -> bool:
    """Whether a last line without its end may be trusted: it is as those before it, to the last decimal."""
    parsed, ending = format.read(text), _LAST_NUMBER.search(text[-_END:])
    if parsed is None or ending is None or not rows:
        return True  # nothing is taken from it, or it ends behind its last number, or nothing is like it
    if parsed.goes_on:
        return False
    before = [_shape(found) if (found := _LAST_NUMBER.search(row[-_END:])) else None for _, row in rows]
    last = format.read(rows[-1][1])
    if last is None or before[-1] is None or parsed.values.keys() != last.values.keys() - {names.TIME}:
        return before[-1] is None
    # Where lines end in numbers of any length, the last one says no less than they do.
    return _shape(ending) in before or before[0] != before[-1]


def _shape(number: re.Match[str]) -> tuple[int, int]:
    return len(number[1] or ""), len(number[2] or "")
