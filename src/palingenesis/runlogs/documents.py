"""Logs that are one JSON document: ``trainer_state.json`` of transformers, a list of objects, lists by name.

``trainer_state.json`` has steps and full precision; its losses are means over the logging steps. A document
that was cut off is read up to where it ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from palingenesis.errors import RunLogError
from palingenesis.runlogs import names
from palingenesis.runlogs.assemble import Facts, assemble
from palingenesis.runlogs.cells import Cells
from palingenesis.runlogs.formats.entries import entry
from palingenesis.runlogs.formats.transformers import CANNOT_SHOW
from palingenesis.runlogs.spelling import as_number
from palingenesis.runlogs.table import RunLog

_HISTORY = "log_history"
#: How documents begin that are no lines of objects.
_BEGINS = re.compile(
    rb"\s*(?:\[\s*\{|\[(?:\s*(?:[-\d.eE+]{1,40}|NaN|\"[^\"]{0,40}\")\s*,){2}|\{[^\S\r\n]{0,99}[\r\n]\s*\"|\{\s*\"[^\"]{1,200}\"\s*:\s*\[|\{[^\r\n]{0,4000}\"log_history\")"
)
_UNKNOWN_MEAN = "The document does not say whether a loss is of one step or a mean."


def is_document(head: bytes) -> bool:
    """Whether a file that begins so is one JSON document."""
    return _BEGINS.match(head) is not None


def read_document(source: str, text: str) -> RunLog:
    """The table of a document.

    Raises:
        RunLogError: it is no JSON, or holds no list of entries.
    """
    facts = Facts(source, "json", cannot_show=(_UNKNOWN_MEAN,), has_lines=False)
    cells = Cells()
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        document = _salvaged(text)
    if isinstance(document, dict) and isinstance(document.get(_HISTORY), list):
        _know_trainer(facts, document)
        document = document[_HISTORY]
    if isinstance(document, dict):
        _add_lists(cells, document)
    elif isinstance(document, list) and document and all(as_number(item) is not None for item in document):
        facts.format = "numbers"
        _add_lists(cells, {"loss": document})
    elif isinstance(document, list):
        _add_entries(cells, facts, document)
    else:
        raise RunLogError(
            f"{source} is no whole JSON document: expected a trainer_state.json with {_HISTORY!r}, a list of "
            "objects, or lists of numbers by name; give the file as the trainer wrote it"
        )
    return assemble(cells, facts)


def _know_trainer(facts: Facts, document: Mapping[str, Any]) -> None:
    facts.format, facts.loss_kind, facts.cannot_show = "trainer_state", "interval_mean", CANNOT_SHOW
    most = as_number(document.get("max_steps"))
    facts.total_steps = int(most) if most is not None and 0 < most < 1e15 else None


def _add_entries(cells: Cells, facts: Facts, entries: list[Any]) -> None:
    for key, item in enumerate(entries):
        parsed = entry(item.items()) if isinstance(item, dict) else None
        if parsed is None:
            facts.unread += 1
            continue
        if parsed.ended:
            facts.ended = True
        cells.add(key, parsed.values)


def _add_lists(cells: Cells, lists: Mapping[str, Any]) -> None:
    """``{"loss": [4.6, 4.4], "val_loss": [4.5, 4.4]}``: one list a metric."""
    for raw, values in lists.items():
        if isinstance(values, list):
            name = names.metric_name(raw)
            for key, value in enumerate(values):
                if (found := as_number(value)) is not None:
                    cells.add(key, {name: found})


def _salvaged(text: str) -> Any:
    """What is whole of a document that was cut off."""
    start = text.find(f'"{_HISTORY}"')
    opening = text.find("[", max(start, 0))
    if opening < 0 or (start < 0 and text.lstrip()[:1] != "["):
        return None
    entries = list(_whole_objects(text, opening + 1))
    if not entries:
        return None
    if start < 0:
        return entries
    most = re.search(r'"max_steps"\s*:\s*(\d{1,15})', text)
    return {_HISTORY: entries, "max_steps": int(most[1]) if most else None}


def _whole_objects(text: str, position: int) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    blank = re.compile(r"[\s,]*")
    while True:
        found = blank.match(text, position)
        position = found.end() if found else position
        if text[position : position + 1] != "{":
            return
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):  # the cut
            return
        yield value
