"""What a report can be of: a run folder of ours, or any trainer's log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palingenesis.config import MonitorConfig
from palingenesis.findings.finding import Finding
from palingenesis.findings.pathologies import pathologies_of
from palingenesis.findings.sources import Source, is_record, source_of
from palingenesis.record.reader import Run, load_run
from palingenesis.report.history import config_of
from palingenesis.report.series import Signals
from palingenesis.report.verdicts import overall
from palingenesis.runlogs.table import RunLog

#: Parts of run.json that say how a run was set up, in the order in which they are shown.
_SETTINGS = ("training", "config", "model", "optimizer", "parallelism", "gradients", "versions")
_OWN = {"config": "monitor"}


@dataclass(frozen=True)
class Subject:
    """One run, however it was recorded."""

    name: str
    place: str
    """The path as it was given."""
    format: str
    verdict: str | None
    """One word; None for a log, which cannot tell what was not looked at."""
    sentence: str
    signals: Signals
    source: Source
    findings: tuple[Finding, ...]
    info: Mapping[str, Any]

    @property
    def config(self) -> MonitorConfig:
        """What the monitor was told; of a log, the defaults."""
        return config_of(dict(self.info))

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that is known of how the run was set up."""
        return {_OWN.get(part, part): self.info[part] for part in _SETTINGS if self.info.get(part)}


def open_subject(place: str) -> Run | RunLog:
    """Read a run folder or a log.

    Raises:
        RecordError, RunLogError: there is none that can be read.
    """
    path = Path(place).expanduser()
    if is_record(path):
        return load_run(path)
    # Late: it knows dozens of formats, and a record needs none of them.
    from palingenesis.runlogs.read import read_log

    return read_log(place)


def subject_of(given: Run | RunLog, place: str) -> Subject:
    """A run or a log, with what is found in it."""
    source, findings = source_of(given), tuple(pathologies_of(given))
    if isinstance(given, RunLog):
        return Subject(
            name=Path(place).name or place,
            place=place,
            format=given.format,
            verdict=None,
            sentence=_told(findings),
            signals=Signals.of_log(given),
            source=source,
            findings=findings,
            info=source.info,
        )
    verdict, told = overall(given.verdict, given.verdict_sentence, findings)
    return Subject(
        name=str(given.info.get("name") or given.folder.resolve().name),
        place=place,
        format="palingenesis",
        verdict=verdict,
        sentence=told,
        signals=Signals.of_run(given),
        source=source,
        findings=findings,
        info=given.info,
    )


def _told(findings: tuple[Finding, ...]) -> str:
    serious = [finding for finding in findings if finding.severity != "info"]
    return serious[0].message if serious else "nothing of what this log can show is wrong"
