"""Entries of JSON and of Python dicts: numbers by name, as trainers log them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from palingenesis.runlogs import names
from palingenesis.runlogs.formats.base import Parsed
from palingenesis.runlogs.spelling import as_number, number
from palingenesis.runlogs.times import seconds

#: What only the last entry of a trainer of transformers has, and with it numbers that are of no step.
_AT_END = "train_runtime"
#: Levels of objects in objects whose numbers are taken.
_DEEPEST = 3
#: wandb's own count of its rows; the trainer's steps are another metric, where it logs them.
_OWN_COUNT = "_step"
#: Names of the time of a row; of seconds since the start as well, which are no time.
_TIMES = frozenset({"time", "timestamp", "_timestamp", "date", "datetime", "created_at"})
#: Of LLaMA-Factory (``0:01:10``) and ms-swift (``1m 10s``).
_ELAPSED = "elapsed_time"
_CLOCK = re.compile(r"(?:(\d{1,5}) days?, )?(\d{1,4}):(\d{2}):(\d{2})")
_UNITS = re.compile(r"(?:(\d{1,5})d\s?)?(?:(\d{1,4})h\s?)?(?:(\d{1,2})m\s?)?(?:(\d{1,2})s)?")
#: Not the names of anything in a log.
_TIME_FOUND, _ELAPSED_FOUND = "\0time", "\0elapsed"
_FIRST_TIME, _LAST_TIME = 1e9, 1e11
#: ms-swift: ``"global_step/max_steps": "8270/11043"``.
_OF_HOW_MANY = "/max_steps"


def entry(items: Iterable[tuple[str, Any]]) -> Parsed | None:
    """What one entry says; nothing where it has no number besides its place."""
    flat = dict(_numbers(items, "", 0))
    places = {names.TIME: flat.pop(_TIME_FOUND, None), names.ELAPSED: flat.pop(_ELAPSED_FOUND, None)}
    parsed = _columns(flat)
    if parsed is not None:
        parsed.values.update({name: value for name, value in places.items() if value is not None})
    return parsed


def _columns(flat: dict[str, float]) -> Parsed | None:
    if f"train/{_AT_END}" in flat:
        return Parsed(names.renamed(flat.items()), ended=True)
    if _AT_END in flat:
        places = {name: flat.pop(name) for name in ("epoch", "step") if name in flat}
        values = {f"other/{name}": value for name, value in flat.items()}
        return Parsed({**names.renamed(places.items()), **values}, ended=True)
    if _OWN_COUNT in flat and any(
        names.metric_name(name) == names.STEP for name in flat if name != _OWN_COUNT
    ):
        del flat[_OWN_COUNT]
    values = names.renamed(flat.items())
    return Parsed(values) if values.keys() - names.PLACES - {names.EPOCH} else None


def _numbers(items: Iterable[tuple[str, Any]], above: str, depth: int) -> Iterable[tuple[str, float]]:
    for key, value in items:
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            if depth < _DEEPEST:
                yield from _numbers(((str(k), v) for k, v in value.items()), f"{name}/", depth + 1)
            continue
        if key in _TIMES and (when := _time(value)) is not None:
            yield _TIME_FOUND, when
            continue
        found = as_number(value)
        if found is not None:
            yield name, found
        elif key == _ELAPSED and isinstance(value, str) and (passed := _duration(value)) is not None:
            yield _ELAPSED_FOUND, passed
        elif name.endswith(_OF_HOW_MANY) and isinstance(value, str):
            at, _, end = value.partition("/")
            for place, text in ((names.STEP, at), (names.TOTAL, end)):
                if (part := number(text)) is not None:
                    yield place, part


def _time(value: Any) -> float | None:
    """A time in seconds since 1970, if a value is one; JavaScript counts in milliseconds."""
    if isinstance(value, str) and number(value) is None:
        return seconds(value)
    found = as_number(value)
    if found is None:
        return None
    return next((t for t in (found, found / 1000) if _FIRST_TIME < t < _LAST_TIME), None)


def _duration(text: str) -> float | None:
    """Seconds."""
    found = _CLOCK.fullmatch(text) or (_UNITS.fullmatch(text) if text else None)
    if found is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
