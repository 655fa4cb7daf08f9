"""Pathologies in a status: those that it does not say itself."""

from __future__ import annotations

from collections.abc import Sequence

from palingenesis.findings.finding import Finding
from palingenesis.findings.status.limits import StatusLimits

#: Pathologies that say once more what a finding of a status says.
_SAID = {
    "run.failed": ("status.error",),
    "run.nonfinite": ("status.nonfinite", "status.loss_scale"),
    "run.other_warnings": ("status.warnings",),
    "run.slow_throughput": ("status.slower",),
    "run.steps_skipped": ("status.skipped",),
    "run.zero_loss_nan_norm": ("status.zero_loss",),
}


def likely(pathologies: Sequence[Finding], limits: StatusLimits) -> tuple[Finding, ...]:
    """Pathologies that ask for action and are likelier than not."""
    return tuple(
        finding
        for finding in pathologies
        if finding.severity != "info"
        and (finding.confidence is None or finding.confidence >= limits.confidence)
    )


def not_said(found: tuple[Finding, ...], causes: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Pathologies that are not told yet."""
    told = {finding.check for finding in found}
    return tuple(finding for finding in causes if told.isdisjoint(_SAID.get(finding.check, ())))
