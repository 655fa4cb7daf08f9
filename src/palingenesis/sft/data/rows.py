"""A row of a data set as it was read, and what is said of one that cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from palingenesis.errors import PalingenesisError

#: Why a row is left out; the sentence that goes with it says what exactly.
Kind = Literal[
    "broken_json",
    "missing_field",
    "bad_value",
    "role_order",
    "empty_answer",
    "control_token",
    "template",
    "nothing_to_train",
]


class BadRow(PalingenesisError, ValueError):
    """This one row cannot be used. Raised and caught within the data code, which counts it and goes on."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind: Kind = kind
        self.reason = " ".join(reason.split())

    def __reduce__(self) -> tuple[type[BadRow], tuple[Kind, str]]:
        # Exceptions are sent to another process by their message alone, which is not enough here.
        return type(self), (self.kind, self.reason)


@dataclass(frozen=True)
class Row:
    """One row of a source.

    ``number`` counts from 1: the line of a ``.jsonl`` file, the entry of everything else. ``data`` is
    ``None`` for a row that could not be read; ``problem`` then says why and ``raw`` is what was there.
    """

    source: str
    file: str
    number: int
    data: Mapping[str, Any] | None
    problem: BadRow | None = None
    raw: str = ""
