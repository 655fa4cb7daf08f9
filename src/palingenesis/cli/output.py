"""What every command prints with."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def say(text: str) -> None:
    """One piece of text to stdout."""
    sys.stdout.write(f"{text}\n")


def print_json(document: Mapping[str, Any]) -> None:
    """The one JSON document of a command run with ``--json``."""
    say(as_json(document))


def as_json(document: Mapping[str, Any]) -> str:
    from palingenesis.record.format import encodable

    return json.dumps(encodable(document), indent=2, allow_nan=False)
