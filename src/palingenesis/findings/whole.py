"""A whole run explained: any source by its path, its findings and facts, and the story that they tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from palingenesis.errors import RunLogError
from palingenesis.findings.catalog import CATALOG
from palingenesis.findings.finding import Finding, Report
from palingenesis.findings.pathologies import pathologies_of
from palingenesis.findings.sources import is_record
from palingenesis.record.reader import Run, load_run
from palingenesis.runlogs.table import RunLog


def open_source(path: str | Path) -> Run | RunLog:
    """A run folder as its record, everything else as a log; ``-`` is stdin.

    Raises:
        RecordError: a run folder that cannot be read.
        RunLogError: nothing that can be read as a log.
    """
    expanded = Path(path).expanduser()
    if is_record(expanded):
        return load_run(expanded)
    from palingenesis.runlogs.read import read_log  # its formats are many, and a record needs none

    return read_log(str(path))


def report_on(command: str, path: str | Path, *, unpacked: str | Path | None = None) -> Report:
    """Everything that a record or a log shows.

    Args:
        command: which one asks.
        path: run folder, file, or ``-``.
        unpacked: a run on the same data without packing.

    Raises:
        RecordError: a run folder that cannot be read.
        RunLogError: nothing that can be read as a log, or one of a single loss.
    """
    source = open_source(path)
    other = None if unpacked is None else open_source(unpacked)
    of_run = pathologies_of(source, unpacked=other)
    findings = _by_time(of_run, _of_curve(source, path, of_run))
    return Report(command, tuple(findings), _facts(source, str(path)))


def _of_curve(source: Run | RunLog, path: str | Path, of_run: Sequence[Finding]) -> list[Finding]:
    """What the curve of the loss shows that needs action, and no pathology tells: a plateau, a rise.

    Raises:
        RunLogError: a log of a single loss, in which nothing is wrong: it cannot be told that all is well.
    """
    from palingenesis.findings.curve import analyse, findings_of
    from palingenesis.findings.curve.told import not_said
    from palingenesis.runlogs.read import read_log

    try:
        analysis = analyse(read_log(str(path)) if isinstance(source, Run) else source)
    except RunLogError:
        if isinstance(source, Run) or of_run:
            return []  # a record shows more than losses
        raise
    return [one for one in not_said(findings_of(analysis), of_run) if one.severity != "info"]


def _by_time(of_run: Sequence[Finding], of_curve: Iterable[Finding]) -> list[Finding]:
    """Those of the curve stand where they began, behind the causes that lead and what these explain."""
    causes = {check for one in of_run for check in one.explained_by}
    told = list(of_run)
    for finding in of_curve:
        later = (
            place
            for place, one in enumerate(told)
            if not one.explained_by and one.check not in causes and (one.since or 0) > (finding.since or 0)
        )
        told.insert(next(later, len(told)), finding)
    return told


def _facts(source: Run | RunLog, path: str) -> dict[str, Any]:
    if isinstance(source, Run):
        step = source.metrics.step
        return {
            "source": path,
            "format": "palingenesis",
            "rows": len(step),
            "last_step": int(step[-1]) if len(step) else None,
            "verdict": source.verdict,
            "verdict_sentence": source.verdict_sentence,
            "problems": source.problems,
        }
    return {
        "source": path,
        "format": source.format,
        "rows": source.rows,
        "last_step": source.last_step,
        "steps_inferred": source.step_inferred,
        "cannot_show": source.cannot_show,
    }


def facts_in_words(facts: Mapping[str, Any]) -> list[str]:
    """What was read, and what it cannot show, a line each."""
    last = facts["last_step"]
    until = "without a step" if last is None else f"to step {last:.0f}"
    lines = [f"{facts['source']}: {facts['format']}, {facts['rows']} rows, {until}"]
    if "verdict" in facts:
        lines.append(f"the monitor's verdict: {facts['verdict']}: {facts['verdict_sentence']}")
    if facts.get("steps_inferred"):
        lines.append("the log has no steps: they are worked out, only their order is sure")
    lines += [f"not shown by this format: {text}" for text in facts.get("cannot_show", ())]
    lines += [f"problem: {text}" for text in facts.get("problems", ())]
    return lines


def story(findings: Sequence[Finding]) -> Iterator[str]:
    """What led to what, a line a finding, consequences below their cause."""
    if len(findings) < 2:
        return
    yield "in the order of causes:"
    depth: dict[str, int] = {}
    for one in findings:
        depth[one.check] = 1 + max((depth[cause] for cause in one.explained_by if cause in depth), default=-1)
        when = "" if one.since is None else f"step {one.since}: "
        yield f"{'  ' * (depth[one.check] + 1)}{when}{CATALOG[one.check].title} ({one.check})"
