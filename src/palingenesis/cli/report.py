"""``pgs report RUN``: what happened in a run, as a page, a text or JSON."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from palingenesis.cli.codes import FOUND, OK
from palingenesis.cli.output import as_json, say
from palingenesis.errors import RecordError

if TYPE_CHECKING:
    from palingenesis.record.reader import Run


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    format: Annotated[Literal["html", "text", "json"], typer.Option(help="What to make of it.")] = "html",
    out: Annotated[
        Path | None, typer.Option(help="File to write to; otherwise RUN/report.html, or the terminal.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> int:
    """Show a run: its verdict, its events, and which layers they were in.

    Exit code 0: the run is HEALTHY, 1: it is anything else, 2: there is no run to show.
    """
    from palingenesis.record.reader import load_run
    from palingenesis.record.verdict import HEALTHY

    found = load_run(run)
    try:
        shown = _rendered(found, "json" if json else format, out)
    except OSError as error:
        where = error.filename or out or run
        raise RecordError(
            f"the report cannot be written to {where}: {error.strerror or error}; give another --out"
        ) from None
    say(shown)
    return OK if found.verdict == HEALTHY else FOUND


def _rendered(run: Run, format: Literal["html", "text", "json"], out: Path | None) -> str:
    """What goes to the terminal."""
    from palingenesis.record.format import REPORT_FILE
    from palingenesis.report import render_text, to_json, write_html

    verdict = f"{run.verdict}: {run.verdict_sentence}"
    if format == "html":
        return f"{verdict}\nreport: {write_html(run, out or run.folder / REPORT_FILE)}"
    width = shutil.get_terminal_size().columns  # 80 where there is no terminal
    text = render_text(run, width) if format == "text" else as_json(to_json(run))
    if out is None:
        return text.rstrip("\n")
    out.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    return f"{verdict}\nreport: {out}"
