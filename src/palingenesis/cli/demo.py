"""``pgs demo``: see a layer break, and being named, in under two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from palingenesis.cli.codes import FOUND, OK
from palingenesis.cli.output import print_json
from palingenesis.demo.options import DEFAULT_SEED, DEFAULT_STEPS, Fault


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the two runs.")] = Path("pgs_demo"),
    steps: Annotated[int, typer.Option(help="Training steps of each run.")] = DEFAULT_STEPS,
    seed: Annotated[int, typer.Option(help="Seed of data and weights.")] = DEFAULT_SEED,
    fault: Annotated[Fault, typer.Option(help="What happens to one layer half-way.")] = "no_gradient",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Train a small language model twice on the CPU, healthy and with a fault put into one layer.

    Exit code 0: the healthy run was HEALTHY and the alarm named the broken layer, 1: not so.
    """
    from dataclasses import asdict

    from rich.console import Console

    from palingenesis.demo import run_demo

    console = None if json else Console()
    result = run_demo(out, steps=steps, seed=seed, fault=fault, console=console)
    if json:
        print_json({**asdict(result), "alarmed_layer": result.alarmed_layer, "ok": result.ok})
    return OK if result.ok else FOUND
