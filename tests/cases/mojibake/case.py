"""UTF-8 that was read as Windows-1252. Accents, other scripts and emoji are no fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows

EXPECTED = ("data.mojibake",)


def run(folder: Path, *, healthy: bool) -> Any:
    made: list[Any] = rows()
    made[1]["messages"][1]["content"] = "Ça va, señor? ÂME, Ñandú – “naïve” 東京 🙂 Ж"
    if not healthy:
        made[2]["messages"][1]["content"] = "Voilà, c’est l’été".encode().decode("cp1252")
    return checked(folder, made)
