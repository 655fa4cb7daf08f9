"""Where a command that reads logs takes one from: ``--log_file LOG``, or the same without the option."""

from __future__ import annotations

from typing import Annotated

import typer

_WHAT = (
    "A trainer's log of any form, a run folder, a trainer_state.json, a folder of TensorBoard, trackio or "
    "offline "
    "wandb, CSV, JSONL; - for stdin."
)

LogFile = Annotated[str | None, typer.Option("--log_file", metavar="LOG", help=_WHAT)]
LogArgument = Annotated[str | None, typer.Argument(metavar="[LOG]", help="The same as --log_file.")]


def chosen(argument: str | None, option: str | None) -> str:
    """The one log that was given.

    Raises:
        RunLogError: none was, or two.
    """
    from palingenesis.errors import RunLogError

    if argument is not None and option is not None:
        raise RunLogError(f"two logs were given, {argument} and --log_file {option}: give one")
    given = argument if option is None else option
    if not given:
        raise RunLogError("no log was given: expected --log_file LOG, a file or a run folder, or - for stdin")
    return given
