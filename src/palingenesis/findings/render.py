"""How findings and their explanations are shown: on a terminal, in a pipe, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from palingenesis.events import Severity
from palingenesis.findings.finding import SEVERITIES, Finding, Report
from palingenesis.record.format import encodable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from palingenesis.findings.entry import Entry

#: Version of the JSON document; docs/findings.schema.json describes it.
JSON_VERSION = 1

_STYLES: dict[Severity, str] = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
#: Of a list in the evidence, how many items are shown.
SHOWN_ITEMS = 3
_INDENT = 2


def to_json(report: Report) -> dict[str, Any]:
    """The report as strict JSON can hold it; ``docs/findings.schema.json`` describes it."""
    return {
        "version": JSON_VERSION,
        "command": report.command,
        "exit_code": report.code,
        "findings": [
            {
                "check": finding.check,
                "severity": finding.severity,
                "message": finding.message,
                "evidence": encodable(finding.evidence),
                "fix": finding.fix,
                "since": finding.since,
                "confidence": finding.confidence,
                "otherwise": list(finding.otherwise),
                "next": finding.next,
            }
            for finding in report.ordered
        ],
        "facts": encodable(report.facts),
    }


def print_findings(report: Report, console: Console, why: Mapping[str, str] | None = None) -> None:
    """Every finding, worst first, then how many there are.

    Args:
        report: what was found.
        console: where to.
        why: why a finding matters, by its id, where that is to be told too.
    """
    from rich.text import Text

    for finding in report.ordered:
        head = Text.assemble(
            (finding.severity.upper(), _STYLES[finding.severity]), " ", (visible(finding.check), "bold")
        )
        _print(console, head)
        for line in _body(finding, (why or {}).get(finding.check, "")):
            _print(console, line, _INDENT)
    _print(console, _summary(report))


def print_lines(lines: Iterable[str], console: Console) -> None:
    """Lines of plain text, each in one piece where nothing needs it wrapped."""
    from rich.text import Text

    for line in lines:
        _print(console, Text(visible(line)))


def _body(finding: Finding, why: str) -> list[Text]:
    from rich.text import Text

    lines = [Text(visible(finding.message))]
    evidence = evidence_in_words(finding.evidence)
    if evidence:
        lines.append(Text(evidence, "dim"))
    if why:
        lines.append(Text.assemble(("why: ", "dim"), why))
    if finding.confidence is not None:
        # A bare percentage would pass for a measurement of its own.
        lines.append(Text.assemble(("confidence: ", "dim"), f"{finding.confidence:.0%}"))
    if finding.otherwise:
        lines.append(Text.assemble(("or else: ", "dim"), visible("; ".join(finding.otherwise))))
    if finding.next:
        lines.append(Text.assemble(("to tell: ", "cyan"), visible(finding.next)))
    if finding.fix:
        lines.append(Text.assemble(("fix: ", "green"), visible(finding.fix)))
    return lines


def _summary(report: Report) -> Text:
    from rich.text import Text

    if not report.findings:
        return Text(f"{report.command}: nothing found", "green")
    counts = {
        severity: sum(finding.severity == severity for finding in report.findings) for severity in SEVERITIES
    }
    told = ", ".join(
        f"{count} warnings" if severity == "warning" and count > 1 else f"{count} {severity}"
        for severity, count in counts.items()
        if count
    )
    return Text(f"{report.command}: {told}; pgs explain ID says more about one")


def _print(console: Console, text: Text, indent: int = 0) -> None:
    if not console.is_terminal:
        # Whatever reads a pipe does its own wrapping; a path or an option must stay in one piece.
        console.print(" " * indent + text.plain, soft_wrap=True, markup=False, highlight=False, emoji=False)
        return
    from rich.padding import Padding

    console.print(Padding(text, (0, 0, 0, indent), expand=False), highlight=False)


# -- evidence ------------------------------------------------------------------------------------------------


def evidence_in_words(evidence: Mapping[str, Any]) -> str:
    """Evidence on one line: ``lines 3, 17, 21 and 140 more; share 0.12``. What is empty is left out."""
    values = {name: encodable(value) for name, value in evidence.items()}
    return "; ".join(
        visible(f"{name.replace('_', ' ')} {_in_words(value)}")
        for name, value in values.items()
        if value is not None and value not in ([], {}, "")
    )


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return shortened(f"{key} {_in_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return shortened(map(_in_words, value))
    return "none" if value is None else str(value)


def shortened(items: Iterable[str]) -> str:
    """A list in words, of which only the first items are named: ``3, 17, 21 and 140 more``."""
    named = list(items)
    left = len(named) - SHOWN_ITEMS
    if left <= 1:  # "and 1 more" would be no shorter than the item
        return ", ".join(named)
    return f"{', '.join(named[:SHOWN_ITEMS])} and {left} more"


def visible(text: str) -> str:
    """A text on one line: what no terminal shows, or a terminal would obey, is spelled out."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


# -- explanations --------------------------------------------------------------------------------------------


def print_entry(entry: Entry, more: Mapping[str, str], console: Console) -> None:
    """What the catalog says about a finding, and what else is known, by heading."""
    from rich.text import Text

    _print(console, Text.assemble((entry.check, "bold"), f": {entry.title}"))
    parts = {
        "What was seen": entry.meaning,
        "Why it matters": entry.why,
        **more,
        "How to confirm it": entry.confirm,
        "How to fix it": entry.fix,
        "Source": entry.source,
    }
    for heading, text in parts.items():
        _print(console, Text())
        _print(console, Text(heading, "bold"))
        _print(console, Text(text), _INDENT)


def print_titles(entries: Iterable[Entry], console: Console) -> None:
    """Every id with its title, in two columns where there is room for them."""
    from rich.text import Text

    listed = list(entries)
    width = max((len(entry.check) for entry in listed), default=0)
    beside = not console.is_terminal or width + 2 + max(len(e.title) for e in listed) <= console.width
    for entry in listed:
        if beside:
            _print(
                console,
                Text.assemble((entry.check, "bold"), " " * (width + 2 - len(entry.check)), entry.title),
            )
        else:
            _print(console, Text(entry.check, "bold"))
            _print(console, Text(entry.title), _INDENT)
