"""``pgs monitor LOG``: how a run is going, from its log."""

from __future__ import annotations

from typing import Annotated

import typer

from palingenesis.cli.log_source import LogArgument, LogFile, chosen
from palingenesis.cli.options import Json
from palingenesis.cli.output import print_json, say

#: Seconds between two looks with --follow.
_EVERY_S = 2.0


def monitor(
    log: LogArgument = None,
    log_file: LogFile = None,
    brief: Annotated[bool, typer.Option("--brief", help="One line.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep looking, until the run has ended or Ctrl-C.")
    ] = False,
    every: Annotated[float, typer.Option(metavar="S", help="Seconds between two looks.", min=0.1)] = _EVERY_S,
    json: Json = False,
) -> int:
    """Tell how a run is going: step, loss and its trend, evaluations, speed, time left, what is wrong.

    Reads the log of any trainer. With --follow a terminal shows one picture that is drawn anew, a pipe gets a
    line whenever something changed, and --json prints its document at the end.

    Exit code 0: nothing is wrong, 1: something is, 2: there is no log to read.
    """
    source = chosen(log, log_file)
    from palingenesis.findings.status.source import look, report_of
    from palingenesis.findings.status.words import brief as one_line

    if follow:
        from palingenesis.cli.follow import followed

        status = followed(source, every=every, brief=brief, silent=json)
    else:
        status = look(source)
    report = report_of(status)
    if json:
        from palingenesis.findings.render import to_json

        print_json(to_json(report))
    elif brief:
        if not follow:  # the last of its lines has said it
            say(one_line(status))
    else:
        from rich.console import Console

        from palingenesis.findings.status.show import print_status

        print_status(status, report, Console())
    return report.code
