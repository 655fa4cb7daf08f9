"""How a status is drawn: a table on a terminal, lines of text in a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from palingenesis.findings.finding import Report
from palingenesis.findings.render import print_findings, visible
from palingenesis.findings.status.status import Status
from palingenesis.findings.status.words import lines, verdict_and_state
from palingenesis.record.verdict import CRITICAL, HEALTHY, WARNING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_COLOURS = {CRITICAL: "bold red", WARNING: "bold yellow", HEALTHY: "bold green"}
#: Findings in the live view; all of them are in the last one.
_LIVE_FINDINGS = 5
#: Characters of the bar in it.
_BAR_WIDTH = 30


def print_status(status: Status, report: Report, console: Console) -> None:
    """All of it, then the findings."""
    if console.is_terminal:
        console.print(_table(status))
    else:
        for label, text in _lines(status):
            console.print(
                f"{label + ':' if label else '':<17}{text}",
                soft_wrap=True,
                markup=False,
                highlight=False,
                emoji=False,
            )
    print_findings(report, console)


def live(status: Status, report: Report) -> RenderableType:
    """What a view that is drawn again and again shows."""
    from rich.console import Group
    from rich.text import Text

    found = [finding for finding in report.ordered if finding.severity != "info"][:_LIVE_FINDINGS]
    told = [
        Text.assemble(
            (finding.severity.upper(), _COLOURS[finding.severity.upper()]), " ", visible(finding.message)
        )
        for finding in found
    ]
    return Group(_table(status, bar=True), *told)


def _lines(status: Status) -> list[tuple[str, str]]:
    log = f"{visible(status.source)} ({status.format})"
    return [
        ("log", log),
        ("verdict", f"{verdict_and_state(status)}: {visible(status.sentence)}"),
        *lines(status),
    ]


def _table(status: Status, *, bar: bool = False) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _lines(status):
        table.add_row(label, Text(text, _COLOURS.get(status.verdict, "bold") if label == "verdict" else ""))
        if bar and label == "step" and status.share_done is not None:
            table.add_row("", ProgressBar(total=1.0, completed=status.share_done, width=_BAR_WIDTH))
    return table
