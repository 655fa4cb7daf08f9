"""What was written in a sample: wrongly decoded text, characters nobody types, and which script it is in."""

from __future__ import annotations

import re

#: UTF-8 read as Latin-1 or Windows-1252: a lead byte as a letter, then continuation bytes as they come out.
#: The second alternative is punctuation (quotes, dashes), the third an emoji, the last what decoders put for
#: bytes that they could not read.
_MOJIBAKE = re.compile(
    "[\u00c2\u00c3\u00d0\u00d1][\u0080-\u00bf\u2018-\u201e\u2020-\u2026\u2030\u2039\u203a\u20ac\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc\u2122]"
    "|\u00e2(?:\u20ac|\u0080)[\u0080-\u00bf\u2018-\u201e\u2020-\u2026\u02dc\u0153\u2122\u009d]"
    "|\u00f0(?:\u0178|\u009f)"
    "|\ufffd"
)
#: Controls other than tab and line ends, marks that turn the direction of text, and a byte order mark inside.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\u202a-\u202e\u2066-\u2069\ufeff]")

#: Scripts that samples are told apart by, each with its letters.
SCRIPTS = (
    "Latin",
    "Cyrillic",
    "Greek",
    "Arabic",
    "Hebrew",
    "Devanagari",
    "Thai",
    "Hangul",
    "Kana",
    "Han",
    "none",
)
_LETTERS = {
    "Latin": re.compile("[\u00c0-\u024f]"),
    "Cyrillic": re.compile("[\u0400-\u052f]"),
    "Greek": re.compile("[\u0370-\u03ff]"),
    "Arabic": re.compile("[\u0600-\u06ff\u0750-\u077f]"),
    "Hebrew": re.compile("[\u0590-\u05ff]"),
    "Devanagari": re.compile("[\u0900-\u097f]"),
    "Thai": re.compile("[\u0e00-\u0e7f]"),
    "Hangul": re.compile("[\uac00-\ud7af\u1100-\u11ff]"),
    "Kana": re.compile("[\u3040-\u30ff]"),
    "Han": re.compile("[\u4e00-\u9fff\u3400-\u4dbf]"),
}
_ASCII = re.compile("[\x00-\x7f]+")
#: Characters from which a script is told.
_ENOUGH = 2000
#: Fewer letters than this are no language.
_FEWEST = 8
#: Letters either side of what is shown as an example.
_AROUND = 12


def mojibake(text: str) -> str:
    """A piece of text that was decoded wrongly, or nothing."""
    return "" if text.isascii() else _piece(_MOJIBAKE.search(text), text)


def control_characters(text: str) -> str:
    """A piece of text with a character that nobody types, or nothing."""
    return _piece(_CONTROL.search(text), text)


def script_of(text: str) -> int:
    """The number, in ``SCRIPTS``, of the script that most letters are in."""
    text = text[:_ENOUGH]
    if text.isascii():
        return 0 if sum(map(str.isalpha, text)) >= _FEWEST else len(SCRIPTS) - 1
    others = _ASCII.sub("", text)
    counts = [len(letters.findall(others)) for letters in _LETTERS.values()]
    counts[0] += sum(map(str.isalpha, text)) - sum(map(str.isalpha, others))
    # Japanese is written in both.
    kana, han = SCRIPTS.index("Kana"), SCRIPTS.index("Han")
    if counts[kana]:
        counts[kana] += counts[han]
    best = max(range(len(counts)), key=counts.__getitem__)
    # A letter of Han is a word.
    needed = 2 if best >= SCRIPTS.index("Hangul") else _FEWEST
    return best if counts[best] >= needed else len(SCRIPTS) - 1


def _piece(found: re.Match[str] | None, text: str) -> str:
    if found is None:
        return ""
    return repr(text[max(found.start() - _AROUND, 0) : found.end() + _AROUND])
