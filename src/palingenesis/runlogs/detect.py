"""Which format a log has, by its lines: the narrow one that takes most of them, else a broad one."""

from __future__ import annotations

import re

from palingenesis.runlogs import names
from palingenesis.runlogs.formats import HEADED, LINE_FORMATS
from palingenesis.runlogs.formats.base import LineFormat, Parsed

#: Lines with a loss in them after which the format is settled.
_ENOUGH = 40
#: Lines that are kept waiting for it at most.
_MOST_LINES = 20000
#: A broad format needs so many times the lines of the best narrow one.
_BROAD_FACTOR = 3
#: Only such lines are looked at: with a loss, an object, or made of numbers.
_LETTER = re.compile(r"[A-Za-z]{2}")
_WORTH = re.compile(r"loss|nll|ce\b|\{|step|iter|^[\s\"]*[-+]?[\d.]|nan|inf", re.IGNORECASE)


class Detector:
    """Votes of lines for formats."""

    def __init__(self, formats: tuple[LineFormat, ...] | None = None) -> None:
        self._formats = list(LINE_FORMATS if formats is None else formats)
        self._votes: dict[str, int] = {}
        self._seen = 0
        self._foreign = 0
        self.began = False
        """A line was seen that a format takes; all from it on have to be kept."""

    def see(self, text: str) -> None:
        """Let a line vote."""
        if self.began:
            self._seen += 1
        if _WORTH.search(text) is None:
            self._foreign += bool(_LETTER.search(text)) and not text.lstrip().startswith("#")
            return
        for make in HEADED:
            headed = make(text)
            if headed is not None and all(headed.id != known.id for known in self._formats):
                self._formats.append(headed)
                self.began = True
        taken = False
        for format in self._formats:
            parsed = format.read(text)
            if parsed is not None:
                self.began = taken = True
                self._votes[format.id] = self._votes.get(format.id, 0) + _has_loss(parsed)

        self._foreign += not taken and "loss" not in text.lower() and bool(_LETTER.search(text))

    @property
    def sure(self) -> bool:
        """Enough was seen."""
        return max(self._votes.values(), default=0) >= _ENOUGH or self._seen >= _MOST_LINES

    def best(self) -> LineFormat | None:
        """The format that fits, if any line with a loss is of one."""
        voted = [f for f in self._formats if self._votes.get(f.id) and not (f.whole and self._foreign)]
        narrow = max((f for f in voted if not f.broad), key=self._count, default=None)
        broad = max((f for f in voted if f.broad), key=self._count, default=None)
        if narrow is None or broad is None:
            return narrow or broad
        return broad if self._count(broad) > _BROAD_FACTOR * self._count(narrow) else narrow

    def _count(self, format: LineFormat) -> int:
        return self._votes.get(format.id, 0)


def _has_loss(parsed: Parsed) -> bool:
    return any(names.is_loss(name) for name in parsed.values)
