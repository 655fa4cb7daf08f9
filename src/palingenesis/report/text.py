"""The report for a terminal or a pipe: plain lines, no colour, no line longer than asked."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

from palingenesis.findings.finding import Finding, Report
from palingenesis.record.format import REPORT_FILE
from palingenesis.report.episodes import Episode
from palingenesis.report.facts import Facts, gather
from palingenesis.report.moments import diagnosis_in_words
from palingenesis.report.verdicts import advice, meaning, overall_of
from palingenesis.report.words import ELLIPSIS, count, plain, sentence, step_number, visible

if TYPE_CHECKING:
    from palingenesis.record.reader import Run

NARROWEST = 24
_TABLE_FROM = 64
_MOST_ALARMS = 40
_MOST_MOMENTS = 5
_MOST_FINDINGS = 8
_GAP = "  "


def render_text(run: Run, width: int = 80) -> str:
    """The verdict, what came first, the alarms, the counts and where the page is.

    Args:
        run: what ``load_run`` returned.
        width: characters a line may have; 24 at least. Names and sentences are wrapped or cut to fit.
    """
    width = max(NARROWEST, width)
    facts = gather(run)
    word, told = overall_of(facts)
    blocks = [
        wrapped(f"{word}: {visible(told)}", width),
        "" if word == facts.verdict else wrapped(meaning(facts), width),
        wrapped(f"Run {visible(facts.name)}, {count(facts.last_step, 'step')}", width),
        findings_text(facts.findings, width),
        _first(facts, width),
        _alarms(facts, width),
        _counts(facts, width),
        _where(facts, width),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def wrapped(text: str, width: int, first: str = "", rest: str = "") -> str:
    """Text in lines of a width, cut where characters are wider than one cell."""
    lines = textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    return "\n".join(part for line in lines for part in _fitted(line, width, rest))


def _fitted(line: str, width: int, indent: str) -> list[str]:
    """A line whose characters are wider than one cell each may still be too long."""
    parts = []
    while cell_len(line) > width:
        cut = next(n for n in range(len(line), 0, -1) if cell_len(line[:n]) <= width)
        parts.append(line[:cut])
        line = indent + line[cut:]
    return [*parts, line]


def _first(facts: Facts, width: int) -> str:
    if not facts.moments:
        return wrapped(advice(facts), width)
    lines = ["What happened first"]
    for index, moment in enumerate(facts.moments[:_MOST_MOMENTS]):
        start = f"  {index + 1}. "
        told = f"step {step_number(moment.onset)}: {plain(moment.sentence)}"
        lines.append(wrapped(told, width, start, " " * len(start)))
    left = len(facts.moments) - _MOST_MOMENTS
    if left > 0:
        lines.append(wrapped(f"and {left:,} more", width, "     ", "     "))
    return "\n".join(lines)


def findings_text(findings: Sequence[Finding], width: int) -> str:
    """Findings, the worst first, each with what to change; empty where there are none."""
    ordered = Report("report", tuple(findings)).ordered
    if not ordered:
        return ""
    lines = ["Findings"]
    for index, finding in enumerate(ordered[:_MOST_FINDINGS]):
        start = f"  {index + 1}. "
        rest = " " * len(start)
        told = f"{finding.severity.upper()} {visible(finding.check)}: {sentence(finding.message)}"
        lines.append(wrapped(told, width, start, rest))
        if finding.fix:
            lines.append(wrapped(f"fix: {visible(finding.fix)}", width, rest, rest))
    left = len(ordered) - _MOST_FINDINGS
    if left > 0:
        lines.append(wrapped(f"and {left:,} more", width, "     ", "     "))
    return "\n".join(lines)


def _alarms(facts: Facts, width: int) -> str:
    episodes = [episode for episode in facts.episodes if not episode.superseded]
    if not episodes:
        return ""
    shown = episodes[:_MOST_ALARMS]
    lines = ["Layer alarms", *(_table(shown, width) if width >= _TABLE_FROM else _list(shown, width))]
    if len(episodes) > len(shown):
        lines.append(f"  and {len(episodes) - len(shown):,} more")
    return "\n".join(lines)


def _cells(episode: Episode) -> tuple[str, str, str, str, str]:
    cleared = "not cleared" if episode.cleared_step is None else step_number(episode.cleared_step)
    if episode.accepted:
        cleared = f"accepted {cleared}"
    layer = visible(episode.layer if episode.parameter is None else f"{episode.layer} ({episode.parameter})")
    what = diagnosis_in_words(episode.diagnosis)
    return layer, visible(what), step_number(episode.since), step_number(episode.step), cleared


def _table(episodes: list[Episode], width: int) -> list[str]:
    rows = [("layer", "diagnosis", "since", "alarm", "cleared"), *(_cells(e) for e in episodes)]
    widths = [max(cell_len(row[column]) for row in rows) for column in range(5)]
    others = sum(widths[1:]) + len(_GAP) * 5
    widths[0] = min(widths[0], width - others)
    lines = []
    for row in rows:
        layer = set_cell_size(_cut(row[0], widths[0]), widths[0])
        diagnosis = set_cell_size(row[1], widths[1])
        numbers = (value.rjust(size) for value, size in zip(row[2:], widths[2:], strict=True))
        lines.append((_GAP + _GAP.join([layer, diagnosis, *numbers])).rstrip())
    return lines


def _list(episodes: list[Episode], width: int) -> list[str]:
    lines = []
    for episode in episodes:
        layer, diagnosis, since, step, cleared = _cells(episode)
        over = cleared if episode.cleared_step is None or episode.accepted else f"cleared {cleared}"
        lines.append(f"  {_cut(layer, width - 2)}")
        lines.append(wrapped(f"{diagnosis} since {since}, alarm {step}, {over}", width, "    ", "    "))
    return lines


def _cut(text: str, cells: int) -> str:
    """The text in at most so many cells, its middle left out."""
    length = min(len(text), cells)
    while cell_len(visible(text, length)) > cells and length > len(ELLIPSIS):
        length -= 1
    return visible(text, length)


def _counts(facts: Facts, width: int) -> str:
    counts = facts.counts
    parts = [
        count(counts["checks"], "check"),
        f"{count(len(facts.layers), 'layer')} watched",
        f"{count(counts['alarms'], 'alarm')} ({_how_ended(counts)})",
        count(counts["loss_spikes"], "loss spike"),
        f"{counts['nonfinite']:,} non-finite",
        count(counts["skipped_steps"], "skipped step"),
        f"{count(counts['checks_without_gradients'], 'check')} without gradients",
    ]
    return wrapped(", ".join(parts), width)


def _how_ended(counts: dict[str, int]) -> str:
    accepted = f", {counts['alarms_accepted']:,} accepted as a new level" if counts["alarms_accepted"] else ""
    return f"{counts['alarms_cleared']:,} cleared{accepted}"


def _where(facts: Facts, width: int) -> str:
    page = facts.folder / REPORT_FILE
    # A path is never broken: it is there to be copied.
    return f"Page: {visible(page)}" if page.exists() else wrapped("No page yet; pgs report writes it.", width)
