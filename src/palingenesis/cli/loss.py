"""``pgs loss LOG``: what a loss curve shows, from the log of any trainer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from palingenesis.cli.log_source import LogArgument, LogFile, chosen
from palingenesis.cli.options import Json
from palingenesis.cli.output import print_json, say

if TYPE_CHECKING:
    from rich.console import Console

    from palingenesis.findings.curve.examine import Examined
    from palingenesis.record.spikes import Spike


def loss(
    log: LogArgument = None,
    log_file: LogFile = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with the curve there.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a picture of the curve there (extra: plots).")
    ] = None,
    spikes: Annotated[
        bool, typer.Option("--spikes", help="Also what was in the batches of spikes; of a run folder.")
    ] = False,
    json: Json = False,
) -> int:
    """Analyse a loss curve: convergence, spikes, plateaus, divergence, what is wrong and what to do next.

    Reads the log of any trainer, of a run that is over or going on.

    Exit code 0: nothing that needs action, 1: something does, 2: there is no curve to read.
    """
    source = chosen(log, log_file)
    from palingenesis.findings.curve.examine import examine

    examined = examine(source)
    kept = _kept(examined, source) if spikes else []
    if html is not None:
        from palingenesis.report.curve_page import write_curve_page

        write_curve_page(examined.analysis, examined.report, html)
    if png is not None:
        from palingenesis.report.curve_picture import write_curve_picture

        write_curve_picture(examined.analysis, png)
    if json:
        from palingenesis.findings.render import to_json

        document = to_json(examined.report)
        if spikes:
            document["facts"]["batches"] = [dataclasses.asdict(spike) for spike in kept]
        print_json(document)
        return examined.report.code
    from rich.console import Console

    _print(examined, Console())
    if spikes:
        _print_batches(kept)
    for written, what in ((html, "page"), (png, "picture")):
        if written is not None:
            say(f"{what}: {written}")
    return examined.report.code


def _print(examined: Examined, console: Console) -> None:
    from palingenesis.cli.loss_plot import plot
    from palingenesis.findings.curve.facts import lines_of
    from palingenesis.findings.render import print_findings, visible

    for name, text in lines_of(examined.analysis):
        say(visible(f"{name}: {text}"))
    say("")
    for line in plot(examined.analysis, console.width, plain=not console.is_terminal):
        say(line)
    say("")
    print_findings(examined.report, console)
    steps = examined.report.facts["next_steps"]
    if steps:
        say("")
        say("recommended next steps:")
        for number, text in enumerate(steps, 1):
            say(visible(f"  {number}. {text}"))


def _kept(examined: Examined, source: str) -> list[Spike]:
    """The spikes whose batches the run folder keeps."""
    from palingenesis.errors import RunLogError
    from palingenesis.record.spikes import read_spikes

    if examined.folder is None:
        raise RunLogError(
            f"--spikes shows what a run folder keeps, and {source} is none: give the run's folder, or leave "
            "--spikes out"
        )
    return read_spikes(examined.folder)


def _print_batches(kept: list[Spike]) -> None:
    from palingenesis.report.batches import UNKNOWN, spikes_of

    say("")
    spikes = spikes_of(kept)
    if not spikes.shown:
        say(
            "batches of spikes: this run kept none: while it ran, no loss was called a spike (that is judged "
            "without knowing what comes after)"
        )
        return
    say("batches of spikes:")
    for one in spikes.shown:
        say(f"  step {one.step}: {one.message}{f' ({one.about})' if one.about else ''}")
        for when, samples in (("", one.samples), ("the step before: ", one.before)):
            for row in samples:
                known = [text for text in (row.tokens, row.text, row.others) if text not in ("", UNKNOWN)]
                say(f"    {when}{': '.join([row.name, *known])}")
        if one.left_out:
            say(f"    and {one.left_out} more samples")
        for note in one.notes:
            say(f"    {note}")
    if spikes.left_out:
        say(f"  and {spikes.left_out} more steps; --json has all")
    for name in spikes.repeated:
        say(f"  in more than one of them: {name}")
