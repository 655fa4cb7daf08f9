"""``pgs report RUN [RUN ...]``: what happened in a run, or how runs compare, as a page, a text or JSON."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from palingenesis.cli.codes import FOUND
from palingenesis.cli.output import as_json, say
from palingenesis.errors import RecordError

if TYPE_CHECKING:
    from palingenesis.record.reader import Run
    from palingenesis.runlogs.table import RunLog

Format = Literal["html", "text", "json"]

#: Where a page goes that belongs to no run folder.
_COMPARISON_FILE = "comparison.html"
_LOG_FILE = "report.html"


class _Shown(NamedTuple):
    """What goes to the terminal, and the exit code."""

    text: str
    code: int


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="A run folder, or any trainer's log; several to compare them."),
    ],
    format: Annotated[Format, typer.Option(help="What to make of it.")] = "html",
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write to; otherwise RUN/report.html, ./report.html for a log, ./comparison.html "
            "for several, or the terminal."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> int:
    """Show a run: what is wrong with it, its verdict, its events and all its curves. Or compare several.

    Exit code 0: HEALTHY and nothing found, 1: it is anything else, 2: there is no run to show. A log is never
    called healthy: 0 says that nothing was found in it.
    """
    wanted: Format = "json" if json else format
    try:
        shown = _one(runs[0], wanted, out) if len(runs) == 1 else _several(runs, wanted, out)
    except OSError as error:
        where = error.filename or out or runs[0]
        raise RecordError(
            f"the report cannot be written to {where}: {error.strerror or error}; give another --out"
        ) from None
    say(shown.text)
    return shown.code


def _one(place: str, format: Format, out: Path | None) -> _Shown:
    from palingenesis.record.reader import Run
    from palingenesis.report.subject import open_subject

    given = open_subject(place)
    return _run(given, format, out) if isinstance(given, Run) else _log(given, place, format, out)


def _run(run: Run, format: Format, out: Path | None) -> _Shown:
    from palingenesis.findings.finding import Report
    from palingenesis.findings.pathologies import pathologies_of
    from palingenesis.record.format import REPORT_FILE
    from palingenesis.record.verdict import HEALTHY
    from palingenesis.report import render_text, to_json, write_html
    from palingenesis.report.verdicts import overall

    findings = tuple(pathologies_of(run))
    code = Report("report", findings).code if run.verdict == HEALTHY else FOUND
    verdict = ": ".join(overall(run.verdict, run.verdict_sentence, findings))
    if format == "html":
        return _Shown(f"{verdict}\nreport: {write_html(run, out or run.folder / REPORT_FILE)}", code)
    told = to_json(run) if format == "json" else render_text(run, _width())
    return _Shown(_given(told, out, verdict), code)


def _log(log: RunLog, place: str, format: Format, out: Path | None) -> _Shown:
    from palingenesis.findings.finding import Report
    from palingenesis.report.brief import log_text
    from palingenesis.report.log_page import log_document, write_log_page
    from palingenesis.report.subject import subject_of

    subject = subject_of(log, place)
    code = Report("report", subject.findings).code
    if format == "html":
        page = write_log_page(log, subject, out or Path(_LOG_FILE))
        return _Shown(f"{place}: {subject.sentence}\nreport: {page}", code)
    told = log_document(log, subject) if format == "json" else log_text(subject, _width())
    return _Shown(_given(told, out, subject.sentence), code)


def _several(places: list[str], format: Format, out: Path | None) -> _Shown:
    from palingenesis.findings.finding import Report
    from palingenesis.record.verdict import HEALTHY
    from palingenesis.report.brief import comparison_text
    from palingenesis.report.compare import MOST_RUNS, compare, comparison_document
    from palingenesis.report.compare_page import write_comparison
    from palingenesis.report.subject import open_subject, subject_of

    if len(places) > MOST_RUNS:
        raise typer.BadParameter(
            f"{len(places)} runs given: at most {MOST_RUNS} can be told apart in one chart; give fewer"
        )
    comparison = compare([subject_of(open_subject(place), place) for place in places])
    well = all(subject.verdict in (None, HEALTHY) for subject in comparison.subjects)
    code = Report("report", comparison.findings).code if well else FOUND
    if format == "html":
        page = write_comparison(comparison, out or Path(_COMPARISON_FILE))
        return _Shown(f"{comparison_text(comparison, _width())}\nreport: {page}", code)
    told = comparison_document(comparison) if format == "json" else comparison_text(comparison, _width())
    return _Shown(_given(told, out, f"{len(places)} runs compared"), code)


def _given(told: dict[str, Any] | str, out: Path | None, summary: str) -> str:
    """A text or a document, for the terminal; into a file where one was asked for."""
    text = told.rstrip("\n") if isinstance(told, str) else as_json(told)
    if out is None:
        return text
    out.write_text(text + "\n", encoding="utf-8")
    return f"{summary}\nreport: {out}"


def _width() -> int:
    return shutil.get_terminal_size().columns  # 80 where there is no terminal
