"""A run or a log by its path, examined: the curve, all findings, what to do next."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from palingenesis.findings.curve.analysis import CurveAnalysis, analyse
from palingenesis.findings.curve.facts import facts_of, next_steps
from palingenesis.findings.curve.told import findings_of, not_said
from palingenesis.findings.finding import Report
from palingenesis.findings.pathologies import pathologies_of
from palingenesis.findings.sources import is_record
from palingenesis.record.reader import load_run
from palingenesis.runlogs.read import STDIN, read_log


class Examined(NamedTuple):
    """What ``pgs loss`` tells."""

    analysis: CurveAnalysis
    report: Report
    folder: Path | None
    """The run folder, if it is one."""


def examine(source: str) -> Examined:
    """Read and examine a log.

    Args:
        source: a file, a folder, or ``-`` for stdin.

    Raises:
        RunLogError: nothing that can be read as a log, or no curve in it.
        RecordError: a run folder that cannot be read.
    """
    log = read_log(source)
    folder = Path(source).expanduser() if source != STDIN else None
    folder = folder if folder is not None and is_record(folder) else None
    analysis = analyse(log)
    of_run = pathologies_of(log if folder is None else load_run(folder))
    findings = [*of_run, *not_said(findings_of(analysis), of_run)]
    steps = next_steps(analysis, Report("loss", tuple(findings)).ordered)
    return Examined(analysis, Report("loss", tuple(findings), facts_of(analysis, steps)), folder)
