"""``pgs sync RUN --to TRACKER``: bring a recorded run to wandb, trackio, TensorBoard or MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from palingenesis.cli.codes import FOUND, OK
from palingenesis.cli.output import print_json, say


def sync(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    to: Annotated[Literal["wandb", "trackio", "tensorboard", "mlflow"], typer.Option(help="The tracker.")],
    project: Annotated[str | None, typer.Option(help="Project of a run that no tracker has had yet.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Send to a tracker what it lacks of a run: all of it, or what it missed.

    Exit code 0: it has every row, 1: it refuses some, or lines of the record cannot be read, 2: no run to
    send, or a tracker that fails.
    """
    from palingenesis.trackers.sync import sync as send

    done = send(run, to, project=project)
    if json:
        print_json({"run": str(run), **done._asdict()})
    else:
        say(f"{done.tracker}: {done.sent} rows sent, {done.already} were there already")
        if done.refused:
            say(f"refused: the rows of {len(done.refused)} steps, the first {done.refused[0]}")
        if done.unreadable:
            say(f"left out: {done.unreadable} lines of metrics.jsonl that cannot be read")
        say(f"run {done.run_id} ({done.name}) in {done.project}: {done.where}")
    return FOUND if done.refused or done.unreadable else OK
