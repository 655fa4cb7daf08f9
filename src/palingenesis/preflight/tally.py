"""What was counted over samples: small, so that any number of rows fits, and joined over processes."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest

#: How many places are named for each thing that was seen.
NAMED = 20


@dataclass
class Seen:
    """Something that was seen in samples: how often, where first, and one example in words."""

    count: int = 0
    places: list[tuple[str, int]] = field(default_factory=list)
    example: str = ""

    def add(self, source: str, line: int, example: str = "") -> None:
        """Count one sample."""
        self.count += 1
        self.example = self.example or example
        if len(self.places) < NAMED and (source, line) not in self.places:
            self.places.append((source, line))

    def join(self, other: Seen) -> None:
        """Count those of samples that come after."""
        self.count += other.count
        self.example = self.example or other.example
        self.places += other.places[: NAMED - len(self.places)]


@dataclass
class Tally:
    """Counts over rows, and a few numbers for each sample.

    Attributes:
        rows: read from each source.
        used: of those, how many gave a sample.
        seen: by the id of the finding that it makes.
        fields: of rows without messages, how often each name of a field occurred.
        proposals: what would give them messages, and to how many.
        lost: where the loss of rows that have none was lost.
        sources: titles; ``source`` are indices into them.
        line, length, whole, loss: of each sample its line, and its tokens: those it has, those it had before
            it was cut, those that bear loss.
        content, prompt: of each sample a hash of its tokens, and of what its last answer answers (or 0).
        script: of each sample the number of its script.
        by_turn: of the n-th answer, how many there were and how many tokens of theirs bear loss.
        answers_cut: samples that lose a part of an answer, or all of it, to the greatest length.
        cut_places, longest_cut: where the first of those are, and the tokens of the longest before it was
            cut.
        largest_id: the largest token id.
        cells: positions of the batches that were made, padding included.
    """

    rows: Counter[str] = field(default_factory=Counter)
    used: Counter[str] = field(default_factory=Counter)
    seen: dict[str, Seen] = field(default_factory=dict)
    fields: Counter[str] = field(default_factory=Counter)
    proposals: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    sources: list[str] = field(default_factory=list)
    source: array[int] = field(default_factory=lambda: array("H"))
    line: array[int] = field(default_factory=lambda: array("Q"))
    length: array[int] = field(default_factory=lambda: array("I"))
    whole: array[int] = field(default_factory=lambda: array("I"))
    loss: array[int] = field(default_factory=lambda: array("I"))
    content: array[int] = field(default_factory=lambda: array("Q"))
    prompt: array[int] = field(default_factory=lambda: array("Q"))
    script: array[int] = field(default_factory=lambda: array("B"))
    by_turn: list[tuple[int, int]] = field(default_factory=list)
    answers_cut: int = 0
    cut_places: list[tuple[str, int]] = field(default_factory=list)
    longest_cut: int = 0
    reasoning_dropped: int = 0
    largest_id: int = -1
    cells: int = 0

    def note(self, check: str, source: str, line: int, example: str = "") -> None:
        """Count one sample under a finding."""
        self.seen.setdefault(check, Seen()).add(source, line, example)

    def note_cut(self, source: str, line: int, whole: int) -> None:
        """Count a sample that loses a part of an answer, or all of it."""
        self.answers_cut += 1
        self.longest_cut = max(self.longest_cut, whole)
        if len(self.cut_places) < NAMED:
            self.cut_places.append((source, line))

    def index_of(self, source: str) -> int:
        """The number of a source."""
        if source not in self.sources:
            self.sources.append(source)
        return self.sources.index(source)

    def count_turn(self, number: int, tokens: int) -> None:
        """Count the loss-bearing tokens of the answer with that number, from 0."""
        while len(self.by_turn) <= number:
            self.by_turn.append((0, 0))
        count, total = self.by_turn[number]
        self.by_turn[number] = (count + 1, total + tokens)

    def join(self, other: Tally) -> None:
        """Add what was counted over the rows that come after."""
        for mine, theirs in (
            (self.rows, other.rows),
            (self.used, other.used),
            (self.fields, other.fields),
            (self.proposals, other.proposals),
            (self.lost, other.lost),
        ):
            mine.update(theirs)
        for check, seen in other.seen.items():
            self.seen.setdefault(check, Seen()).join(seen)
        numbers = [self.index_of(source) for source in other.sources]
        self.source.extend(numbers[index] for index in other.source)
        for name in ("line", "length", "whole", "loss", "content", "prompt", "script"):
            getattr(self, name).extend(getattr(other, name))
        pairs = zip_longest(self.by_turn, other.by_turn, fillvalue=(0, 0))
        self.by_turn = [(mine[0] + theirs[0], mine[1] + theirs[1]) for mine, theirs in pairs]
        self.answers_cut += other.answers_cut
        self.longest_cut = max(self.longest_cut, other.longest_cut)
        self.cut_places += other.cut_places[: NAMED - len(self.cut_places)]
        self.reasoning_dropped += other.reasoning_dropped
        self.largest_id = max(self.largest_id, other.largest_id)
        self.cells += other.cells
