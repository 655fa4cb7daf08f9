"""``pgs validate``: data and masks of many samples, checked before a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from palingenesis.cli.options import ConfigFile, DataFile, Json, ModelFolder
from palingenesis.cli.output import print_json
from palingenesis.cli.overrides import overrides

if TYPE_CHECKING:
    from palingenesis.preflight.validate import Progress


def validate(
    context: typer.Context,
    config: ConfigFile = None,
    model: ModelFolder = None,
    data: DataFile = None,
    num_samples: Annotated[int, typer.Option(min=1, help="How many rows to check, from the first.")] = 200,
    all: Annotated[bool, typer.Option("--all", help="Check every row.")] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="How many work at a time; otherwise as many as is worth it.")
    ] = None,
    json: Json = False,
) -> int:
    """Check masks and data on the batches that training would see.

    Give --config FILE, with --section.key VALUE for any of its options, or --model DIR --data FILE.

    Exit code 0: nothing that needs action, 1: something, 2: there is nothing that can be checked.
    """
    from palingenesis.preflight.target import target_of

    settings = target_of(config, overrides(context), model, data)
    from palingenesis.findings.render import print_findings, to_json
    from palingenesis.preflight.validate import validate as check
    from palingenesis.sft.quiet import quiet_libraries
    from palingenesis.sft.stream import evaluation_sources

    wanted = None if all else num_samples
    rows = None if wanted is None else wanted * (2 if evaluation_sources(settings) else 1)
    with quiet_libraries(), _progress(rows, shown=not json) as progress:
        report = check(settings, num_samples=wanted, processes=processes, progress=progress)
    if json:
        print_json(to_json(report))
    else:
        from rich.console import Console

        from palingenesis.preflight.validate_facts import print_facts

        console = Console()
        print_facts(report, console)
        print_findings(report, console)
    return report.code


@contextmanager
def _progress(total: int | None, *, shown: bool) -> Iterator[Progress | None]:
    """A bar on a terminal, on stderr, and nothing anywhere else."""
    from rich.console import Console

    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("rows", total=total)
        yield lambda rows: bar.advance(task, rows)
