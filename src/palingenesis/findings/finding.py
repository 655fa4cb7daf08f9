"""Finding: a conclusion for a person. Report: all that one command found, and the one exit rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from palingenesis.events import Severity

#: Worst first: the order in which findings are shown.
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")

#: Key of the evidence that names what may have brought a finding about.
EXPLAINED_BY = "may_follow_from"


@dataclass(frozen=True)
class Finding:
    """One conclusion: what, how bad, on which evidence, and what to change."""

    check: str
    """Stable id, ``section.name``, such as ``masking.no_loss_tokens``; explained in the catalog."""

    severity: Severity
    """``info`` needs no action; ``warning`` and ``critical`` make a command exit with 1."""

    message: str
    """One sentence, with the numbers."""

    evidence: Mapping[str, Any]
    """Numbers, and ids or line numbers of samples: ``{"lines": [3, 17], "share": 0.12}``."""

    fix: str
    """The option to change and its value. Empty only where the severity is ``info``."""

    since: int | None = None
    """The step from which on it shows, where it belongs to a step."""

    confidence: float | None = None
    """Chance, from 0 to 1, that it is so rather than something else; ``None`` where it was just counted."""

    otherwise: tuple[str, ...] = ()
    """What else could look like this."""

    next: str = ""
    """The experiment that tells this from what else it could be."""

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity {self.severity!r} of {self.check}: expected one of {SEVERITIES}")
        if not self.fix and self.severity != "info":
            raise ValueError(f"{self.check} is a {self.severity} without a fix: say which option to change")
        if self.confidence is not None and not 0 <= self.confidence <= 1:
            raise ValueError(f"confidence {self.confidence} of {self.check}: expected 0 to 1")

    @property
    def explained_by(self) -> tuple[str, ...]:
        """Ids of findings of the same run that may have brought this one about."""
        return tuple(self.evidence.get(EXPLAINED_BY, ()))


@dataclass(frozen=True)
class Report:
    """What a command found."""

    command: str
    """Its name as typed after ``pgs``."""

    findings: tuple[Finding, ...]

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Numbers that are no finding: distributions, sizes. Anything that JSON can hold."""

    @property
    def ordered(self) -> tuple[Finding, ...]:
        """Worst first, and a cause as bad as what it explains; else as they were found."""
        ranks = {id(finding): SEVERITIES.index(finding.severity) for finding in self.findings}
        for finding in reversed(self.findings):  # what explains comes before what it explains
            for cause in self.findings:
                if cause.check in finding.explained_by:
                    ranks[id(cause)] = min(ranks[id(cause)], ranks[id(finding)])
        return tuple(sorted(self.findings, key=lambda finding: ranks[id(finding)]))

    @property
    def code(self) -> int:
        """The exit code: 0 if nothing was found that needs action, else 1. (2, bad input, is an error.)"""
        # Here, because the library must not load the command line to hold findings.
        from palingenesis.cli.codes import FOUND, OK

        return OK if all(finding.severity == "info" for finding in self.findings) else FOUND
