"""``pgs explain ID | RUN``: what a finding means; or what a run's record or log shows, causes first."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palingenesis.cli.codes import OK
from palingenesis.cli.options import Json
from palingenesis.cli.output import print_json
from palingenesis.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from palingenesis.findings import Report

_STDIN = "-"


def explain(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID | RUN]",
            help="A finding's id; or a run folder, any trainer's log, or - for stdin. Without it all ids.",
        ),
    ] = None,
    unpacked: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="A run on the same data without packing, to compare RUN with."),
    ] = None,
    json: Json = False,
) -> int:
    """Say what a finding means and how to fix it; or what happened in a run, causes before consequences.

    Exit code 0: explained, and no finding that needs action; 1: the run has some; 2: neither a finding nor
    anything that can be read.
    """
    from palingenesis.findings.catalog import CATALOG

    if what is None:
        _list(json)
        return OK
    entry = CATALOG.get(what.replace("-", "_"))
    if entry is not None:
        _explain_id(entry.check, json)
        return OK
    if not what or (what != _STDIN and not Path(what).expanduser().exists()):
        raise ConfigError(_unknown(what))
    from palingenesis.findings.whole import report_on

    report = report_on("explain", what, unpacked=unpacked)
    if json:
        print_json(_document(report))
        return report.code
    from rich.console import Console

    _show(report, Console())
    return report.code


# -- one finding -------------------------------------------------------------------------------------------


def _list(json: bool) -> None:
    from palingenesis.findings.catalog import CATALOG

    listed = CATALOG.values()
    if json:
        print_json({"findings": [{"check": entry.check, "title": entry.title} for entry in listed]})
        return
    from rich.console import Console

    from palingenesis.findings.render import print_titles

    print_titles(listed, Console())


def _explain_id(check: str, json: bool) -> None:
    from palingenesis.findings.catalog import CATALOG

    entry, known = CATALOG[check], _known_of_runs(check)
    if json:
        print_json({**dataclasses.asdict(entry), **known})
        return
    from rich.console import Console

    from palingenesis.findings.render import print_entry

    print_entry(entry, _in_words(known), Console())


def _unknown(what: str) -> str:
    from palingenesis.findings.catalog import CATALOG, nearest

    near = nearest(what)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"no finding is called {what!r} and there is no such run or log: {hint}`pgs explain` lists the "
        f"{len(CATALOG)} findings that there are"
    )


def _known_of_runs(check: str) -> dict[str, Any]:
    """What is known of a pathology of runs beyond the catalog; nothing for other findings."""
    from palingenesis.findings.doubts import DOUBTS
    from palingenesis.findings.table import PATHOLOGIES

    for pathology in PATHOLOGIES:
        if pathology.check == check:
            return {
                "causes": list(pathology.causes),
                "follows_from": list(pathology.follows_from),
                "otherwise": list(DOUBTS[check].otherwise),
                "not_yet": list(pathology.not_yet),
            }
    return {}


def _in_words(known: dict[str, Any]) -> dict[str, str]:
    headings = {
        "causes": "Usual causes",
        "follows_from": "May follow from",
        "otherwise": "What else could look like it",
        "not_yet": "Remedies that are not options yet",
    }
    return {headings[name]: "; ".join(items) for name, items in known.items() if items}


# -- a run -------------------------------------------------------------------------------------------------


def _document(report: Report) -> dict[str, Any]:
    """The findings' one document, with the causal order beside it: that of the list is by severity."""
    from palingenesis.findings.render import to_json

    story = [
        {"check": one.check, "since": one.since, "explained_by": list(one.explained_by)}
        for one in report.findings
    ]
    document = to_json(report)
    return {**document, "facts": {**document["facts"], "story": story}}


def _show(report: Report, console: Console) -> None:
    """What was read, the story in the order of causes, then every finding with why it matters."""
    from palingenesis.findings.catalog import CATALOG
    from palingenesis.findings.render import print_findings, print_lines
    from palingenesis.findings.whole import facts_in_words, story

    print_lines([*facts_in_words(report.facts), *story(report.findings)], console)
    print_findings(report, console, why={one.check: CATALOG[one.check].why for one in report.findings})
