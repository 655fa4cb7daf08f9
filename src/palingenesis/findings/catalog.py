"""The catalog: every finding's id and what it means, gathered from ``findings/entries/``."""

from __future__ import annotations

import difflib
from importlib import import_module
from pkgutil import iter_modules

from palingenesis.findings import entries
from palingenesis.findings.entry import Entry

__all__ = ["CATALOG", "Entry", "nearest"]


def _gathered() -> dict[str, Entry]:
    """Every entry by id: sections by name, entries of one in the order in which they are written."""
    found: dict[str, Entry] = {}
    for name in sorted(module.name for module in iter_modules(entries.__path__)):
        for entry in import_module(f"{entries.__name__}.{name}").ENTRIES:
            if entry.check in found:
                raise ValueError(f"{entry.check} is in the catalog twice; the second is in entries/{name}.py")
            found[entry.check] = entry
    return found


CATALOG: dict[str, Entry] = _gathered()


def nearest(check: str, *, n: int = 3) -> list[str]:
    """Ids that look like one that is not in the catalog, likeliest first."""
    near = difflib.get_close_matches(check, CATALOG, n=n, cutoff=0.7)
    # A bare name, or a section alone, is a likelier slip than a letter.
    named = [known for known in CATALOG if check and check in known.split(".")]
    return list(dict.fromkeys([*named, *near]))[:n]
