"""Options that several commands have: what they look at, on which card, and how they answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

#: More than any card has: a number beyond it is in other units.
LARGEST_CARD_GB = 10_000

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The configuration, a YAML file.")
]
ModelFolder = Annotated[
    str | None, typer.Option("--model", metavar="DIR", help="The model, instead of a configuration.")
]
DataFile = Annotated[str | None, typer.Option("--data", metavar="FILE", help="Data for --model.")]
GpuMemory = Annotated[
    float | None,
    typer.Option(metavar="GB", help="Memory of the card, in 10^9 bytes.", min=0.1, max=LARGEST_CARD_GB),
]
Gpu = Annotated[str | None, typer.Option(metavar="NAME", help="A card by name, such as a100-80gb.")]
WorldSize = Annotated[int, typer.Option(metavar="N", help="Cards that train together.", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
