"""Names of the files of a record, and the one way its JSON is written.

Strict JSON: a float that JSON has no word for is written as the string ``"NaN"``, ``"Infinity"`` or
``"-Infinity"``. One object a line, no blanks, UTF-8 as it is; so a line has exactly one spelling and can be
hashed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

RECORD_VERSION = 1

RUN_FILE = "run.json"
EVENTS_FILE = "events.jsonl"
METRICS_FILE = "metrics.jsonl"
LAYERS_FILE = "layers.jsonl"
REPORT_FILE = "report.html"
LOCK_FILE = ".lock"
RUN_TEMPORARY = "run.json.tmp"

#: Files that make a folder hold a run, and everything that overwriting a run removes.
RUN_FILES = (RUN_FILE, EVENTS_FILE, METRICS_FILE, LAYERS_FILE)
OWN_FILES = (*RUN_FILES, REPORT_FILE, RUN_TEMPORARY)

#: ``prev`` of the first event.
CHAIN_START = "0" * 64

STEP_KEY = "train/global_step"

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

#: Fields of an event that hold a number; elsewhere "NaN" is a text (a layer may be called that).
NUMBER_FIELDS = frozenset({"value", "baseline", "std", "sigma", "ratio", "share", "scale", "norm"})
#: Events whose ``value`` is a text for people.
TEXT_VALUE_EVENTS = frozenset({"nonfinite"})

_STRICT = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical(value: Mapping[str, Any]) -> bytes:
    """The one spelling of an object, without a newline."""
    try:
        text = _STRICT.encode(value)
    except (TypeError, ValueError):  # a non-finite number, a numpy value, a path …: rare, so tried second
        text = _STRICT.encode(encodable(value))
    # A lone surrogate (from an undecodable file name in an exception) cannot be UTF-8; written as \udcxx
    # it is a JSON escape and reads back as what it was.
    return text.encode("utf-8", "backslashreplace")


def pretty(value: Mapping[str, Any]) -> bytes:
    """The same JSON for people to read: run.json."""
    text = json.dumps(encodable(value), indent=2, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode("utf-8", "backslashreplace")


def encodable(value: Any) -> Any:
    """What strict JSON can hold of a value; what it has no form for becomes its text."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _finite_or_name(float(value))
    if isinstance(value, Mapping):
        return {str(key): encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encodable(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((encodable(item) for item in value), key=str)
    if hasattr(value, "tolist"):  # numpy scalars and arrays, without importing numpy
        return encodable(value.tolist())
    return str(value)


def _finite_or_name(value: float) -> float | str:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def decode(text: bytes) -> Any:
    """The value of one JSON text. Bare ``NaN`` and ``Infinity``, which strict JSON forbids, are understood.

    Raises:
        ValueError: it is no JSON text.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def number(value: Any) -> float:
    """A recorded value as a float; NaN where it is no number."""
    if isinstance(value, str):
        return NON_FINITE.get(value, math.nan)
    if not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def utc_now() -> str:
    """Now, in ISO 8601 with milliseconds, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
