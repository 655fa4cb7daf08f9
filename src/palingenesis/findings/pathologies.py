"""Pathologies of a run: what its record, or any trainer's log, shows; causes before what follows from them.

The table of what is looked for is :data:`~palingenesis.findings.table.PATHOLOGIES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from palingenesis.findings.case import Case
from palingenesis.findings.doubts import DOUBTS
from palingenesis.findings.finding import EXPLAINED_BY, Finding
from palingenesis.findings.limits import Limits
from palingenesis.findings.sources import source_of
from palingenesis.findings.table import PATHOLOGIES, Pathology
from palingenesis.record.reader import Run
from palingenesis.runlogs.table import RunLog

__all__ = ["PATHOLOGIES", "Pathology", "pathologies_of"]

_PLACES = {pathology.check: place for place, pathology in enumerate(PATHOLOGIES)}


def pathologies_of(
    source: Run | RunLog, *, unpacked: Run | RunLog | None = None, limits: Limits | None = None
) -> list[Finding]:
    """What a run shows, causes before consequences.

    Args:
        source: the record, or a log; whatever it lacks, nothing is said of.
        unpacked: a run on the same data without packing, for a run with packing to be compared with.
        limits: what it is judged by.

    Returns:
        Findings. The first is the one that began first among those that can explain others. One that another
        explains names it in its evidence, under ``may_follow_from``, and stands behind it.
    """
    case = Case(source_of(source), limits or Limits(), None if unpacked is None else source_of(unpacked))
    found: dict[str, Finding] = {}
    for pathology in PATHOLOGIES:
        finding = pathology.sees(case)
        if finding is not None:
            found[pathology.check] = finding
    causes = _causes(found, case)
    told = {check: _told(finding, causes[check], case) for check, finding in found.items()}
    return [told[check] for check in _in_order(found, causes)]


# -- causes ------------------------------------------------------------------------------------------------


def _causes(found: Mapping[str, Finding], case: Case) -> dict[str, list[str]]:
    """For every finding: which others can explain it and began no later."""
    slack = case.limits.onset_slack * float(case.loss.step[-1] if case.loss else 0)
    possible = {
        pathology.check: [
            check
            for check in pathology.follows_from
            if check in found and _since(found[check]) <= _since(found[pathology.check]) + slack
        ]
        for pathology in PATHOLOGIES
        if pathology.check in found
    }

    def first(check: str) -> tuple[float, int]:
        return _since(found[check]), _PLACES[check]

    return {
        check: [cause for cause in causes if check not in possible[cause] or first(cause) < first(check)]
        for check, causes in possible.items()
    }


def _since(finding: Finding) -> float:
    """Where it began; what has no beginning was there from the start."""
    return 0.0 if finding.since is None else float(finding.since)


def _in_order(found: Mapping[str, Finding], causes: Mapping[str, Sequence[str]]) -> list[str]:
    """Causes before consequences; of what nothing explains, first what explains others, by when it began."""
    explains = {cause for each in causes.values() for cause in each}

    def key(check: str) -> tuple[bool, float, int]:
        return check not in explains, _since(found[check]), _PLACES[check]

    order: list[str] = []
    waiting = sorted(found, key=key)
    while waiting:
        # What has just been told is followed by what it explains, as soon as all its causes are told.
        ready = [check for check in waiting if all(cause in order for cause in causes[check])] or waiting
        following = [check for check in ready if order and order[-1] in causes[check]]
        chosen = (following or ready)[0]
        order.append(chosen)
        waiting.remove(chosen)
    return order


# -- doubts ------------------------------------------------------------------------------------------------


def _told(finding: Finding, causes: Sequence[str], case: Case) -> Finding:
    """A finding with how sure it is, what else it could be, and how to tell."""
    limits, doubt = case.limits, DOUBTS[finding.check]
    sure: float = getattr(limits, doubt.sure) if finding.confidence is None else finding.confidence
    if sure < limits.certain:
        sure *= (limits.explained if causes else 1.0) * (limits.blurred if case.source.blurred else 1.0)
    rates = {
        "third": case.rate(1 / 3, "a third"),
        "half": case.rate(1 / 2, "half"),
        "twice": case.rate(2, "twice"),
    }
    since = "where it begins" if finding.since is None else finding.since
    return dataclasses.replace(
        finding,
        message=finding.message + (_UNSURE_STEPS if case.source.steps_inferred else ""),
        evidence={**finding.evidence, EXPLAINED_BY: list(causes)} if causes else finding.evidence,
        confidence=round(sure, 2),
        otherwise=finding.otherwise or doubt.otherwise,
        next=finding.next or doubt.next.format(since=since, **rates),
    )


#: Where a log has no steps.
_UNSURE_STEPS = " (steps are worked out: the log has none)"
