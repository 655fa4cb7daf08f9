"""Finding: a conclusion for a person. Report: all that one command found, and the one exit rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from palingenesis.events import Severity

#: Worst first: the order in which findings are shown.
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


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

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity {self.severity!r} of {self.check}: expected one of {SEVERITIES}")
        if not self.fix and self.severity != "info":
            raise ValueError(f"{self.check} is a {self.severity} without a fix: say which option to change")


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
        """Worst first; within a severity as they were found."""
        return tuple(sorted(self.findings, key=lambda finding: SEVERITIES.index(finding.severity)))

    @property
    def code(self) -> int:
        """The exit code: 0 if nothing was found that needs action, else 1. (2, bad input, is an error.)"""
        # Here, because the library must not load the command line to hold findings.
        from palingenesis.cli.codes import FOUND, OK

        return OK if all(finding.severity == "info" for finding in self.findings) else FOUND
