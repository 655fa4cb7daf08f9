"""``pgs inspect``: a few samples, token by token, as the model will be trained on them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from palingenesis.cli.options import ConfigFile, DataFile, Json, ModelFolder
from palingenesis.cli.output import print_json, say
from palingenesis.cli.overrides import overrides


def inspect(
    context: typer.Context,
    config: ConfigFile = None,
    model: ModelFolder = None,
    data: DataFile = None,
    num_samples: Annotated[int, typer.Option(min=1, help="How many samples, or packed rows.")] = 5,
    index: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Number of the row to show, from 1: its line. Can be given again."),
    ] = None,
    split: Annotated[
        Literal["train", "eval"], typer.Option(help="Which data of the configuration.")
    ] = "train",
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page instead.")] = None,
    table: Annotated[bool, typer.Option(help="Show every token in a table as well.")] = True,
    ascii: Annotated[bool, typer.Option("--ascii", help="Mark with plain characters: [[ and ]].")] = False,
    json: Json = False,
) -> int:
    """Show what the model will be trained on: which tokens bear loss, and which are masked.

    Give --config FILE, with --section.key VALUE for any of its options, or --model DIR --data FILE.

    Exit code 0: every row is trained on, 1: one of them is left out, 2: there is nothing to show.
    """
    from palingenesis.preflight.target import target_of

    settings = target_of(config, overrides(context), model, data)
    from palingenesis.preflight.inspect import as_report
    from palingenesis.preflight.inspect import inspect as look
    from palingenesis.sft.quiet import quiet_libraries

    with quiet_libraries():
        found = look(settings, num_samples=num_samples, indices=index or (), split=split)
    report = as_report(found)
    if html is not None:
        from palingenesis.preflight.inspect_page import write_page

        write_page(found, html)
    if json:
        from palingenesis.findings.render import to_json

        print_json(to_json(report))
    elif html is not None:
        from palingenesis.preflight.words import counted

        say(f"{counted(len(found.shown), 'sample')}, {counted(len(found.refused), 'row')} left out: {html}")
    else:
        from rich.console import Console

        from palingenesis.preflight.inspect_text import print_inspection

        print_inspection(found, Console(), ascii=ascii, table=table)
    return report.code
