"""Entry: what the catalog says about one finding."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """The explanation of one finding, in whole sentences, for somebody who meets it for the first time."""

    check: str
    """The id that findings carry."""

    title: str
    """A few words, without a full stop: a heading."""

    meaning: str
    """What was seen."""

    why: str
    """Why it matters: what happens to a run that has it."""

    confirm: str
    """How to see for oneself, independently of the check: a command, or what to look at."""

    fix: str
    """What to change. Options by their full name, ``section.key``."""

    source: str
    """Where this is known from: a paper, a page of documentation, or the reasoning."""
