"""Findings as the page shows them: what is wrong, on which evidence, what else it may be, what to change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from palingenesis.findings.catalog import CATALOG
from palingenesis.findings.finding import EXPLAINED_BY, Finding, Report
from palingenesis.findings.render import evidence_in_words
from palingenesis.report.words import sentence, step_number, visible

_LONG = 600
_PERCENT = 100

#: Places of the page that are no charts of signals.
SPIKES, CURVES, MONITORED = "spikes", "curves", "monitored"
PLACES = {
    SPIKES: "What was in the batch",
    CURVES: "Alarmed layers",
    MONITORED: "What was monitored",
}

#: What shows on which a finding rests, by key of the chart or by place, in the order in which to look.
_SHOWN_BY: dict[str, tuple[str, ...]] = {
    "run.lr_too_high": ("lr", "grad-norm", "loss-eval", "cosine"),
    "run.lr_too_low": ("lr", "loss-eval", "by-layer-update_ratio"),
    "run.lr_schedule": ("lr",),
    "run.overfitting": ("loss-eval", "gap"),
    "run.source_overfitting": ("loss-eval",),
    "run.forgetting": ("by-layer-weight_drift",),
    "run.layer_imbalance": ("by-layer-gw_ratio", "by-layer-weight_norm"),
    "run.representation_collapse": ("by-layer-stable_rank",),
    "run.entropy_collapse": ("entropy",),
    "run.data_quality": (SPIKES, "loss-eval"),
    "run.loss_spike": (SPIKES, "loss-eval", "grad-norm"),
    "run.nonfinite": (SPIKES, "loss-eval", "grad-norm"),
    "run.zero_loss_nan_norm": ("loss-eval", "grad-norm"),
    "run.nan_hidden": ("loss-eval",),
    "run.packing_leak": ("loss-eval",),
    "run.no_zero_grad": ("grad-norm",),
    "run.worse_after_resume": ("loss-eval",),
    "run.data_after_resume": ("loss-eval",),
    "run.updates_lost": ("rounding", "by-layer-update_ratio"),
    "run.memory_pressure": ("memory",),
    "run.slow_throughput": ("throughput", "step-time"),
    "run.memory_grows": ("memory",),
    "run.layer_stopped": (CURVES, "by-layer-update_ratio"),
    "run.layer_exploding": (CURVES, "by-layer-gw_ratio", "grad-norm"),
    "run.layer_vanishing": (CURVES, "by-layer-gw_ratio"),
    "run.never_trained": (CURVES, MONITORED),
    "run.not_optimized": (MONITORED,),
    "run.no_gradients": (MONITORED,),
    "run.evaluation_lost": ("loss-eval",),
}


@dataclass(frozen=True)
class Conclusion:
    """One finding, as words."""

    anchor: str
    check: str
    title: str
    severity: str
    message: str
    since: str | None
    evidence: str
    confidence: str
    otherwise: tuple[str, ...]
    next: str
    fix: str
    after: tuple[tuple[str, str], ...]
    """Anchor and title of findings that may have brought this one about."""
    charts: tuple[tuple[str, str], ...]
    """Anchor and title of charts that show it."""
    meaning: str
    confirm: str


def anchor_of(check: str) -> str:
    """The place of a finding on the page."""
    return "finding-" + check.replace(".", "-").replace("_", "-")


def title_of(check: str) -> str:
    """What the catalog calls it."""
    entry = CATALOG.get(check)
    return check if entry is None else entry.title


def conclusions(findings: Sequence[Finding], charts: Sequence[tuple[str, str]]) -> list[Conclusion]:
    """Findings in the order in which to read them.

    Args:
        findings: causes before what follows from them.
        charts: key, or place, and title of what is on the page.
    """
    ordered = Report("report", tuple(findings)).ordered
    found = {finding.check for finding in ordered}
    return [_conclusion(finding, found, dict(charts)) for finding in ordered]


def _conclusion(finding: Finding, found: Collection[str], charts: dict[str, str]) -> Conclusion:
    entry = CATALOG.get(finding.check)
    evidence = {name: value for name, value in finding.evidence.items() if name != EXPLAINED_BY}
    return Conclusion(
        anchor=anchor_of(finding.check),
        check=visible(finding.check),
        title=visible(title_of(finding.check)),
        severity=finding.severity,
        message=sentence(finding.message, _LONG),
        since=None if finding.since is None else step_number(finding.since),
        evidence=visible(evidence_in_words(evidence), _LONG),
        confidence="" if finding.confidence is None else f"{_PERCENT * finding.confidence:.0f}%",
        otherwise=tuple(visible(one, _LONG) for one in finding.otherwise),
        next=sentence(finding.next, _LONG),
        fix=visible(finding.fix, _LONG),
        after=tuple((anchor_of(check), title_of(check)) for check in finding.explained_by if check in found),
        charts=tuple(
            (key if key in PLACES else f"chart-{key}", charts[key])
            for key in _SHOWN_BY.get(finding.check, ())
            if key in charts
        ),
        meaning="" if entry is None else entry.meaning,
        confirm="" if entry is None else entry.confirm,
    )
