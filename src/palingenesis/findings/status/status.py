"""Status, and how it is made of a log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from palingenesis.findings.finding import SEVERITIES, Finding
from palingenesis.findings.status.causes import likely, not_said
from palingenesis.findings.status.events import (
    Message,
    NonFinite,
    Skipped,
    errors,
    nonfinite,
    remarks,
    skipped,
    warnings,
)
from palingenesis.findings.status.limits import StatusLimits
from palingenesis.findings.status.loss import (
    Evaluations,
    LossNow,
    evaluations,
    loss_now,
    setback,
    zero_loss,
)
from palingenesis.findings.status.pace import Left, Silence, Speed, left_of, pace_of, silence_of, speed_of
from palingenesis.findings.status.troubles import Seen, findings_of
from palingenesis.record.reader import Run
from palingenesis.record.verdict import CRITICAL, HEALTHY, UNKNOWN, WARNING
from palingenesis.runlogs.table import Column, RunLog

#: ``ended``: as it should, or at its last step. ``unknown``: a pipe, of which nothing is known but its lines.
State = Literal["running", "stalled", "ended", "unknown"]


@dataclass(frozen=True)
class Status:
    """How a run is going. What the log does not tell is ``None``."""

    source: str
    format: str
    state: State
    verdict: str
    """CRITICAL, WARNING, UNKNOWN (too little was seen) or HEALTHY."""
    sentence: str
    """The fact that decided."""
    now: float
    """Unix seconds at which this holds."""
    step: float | None
    total_steps: int | None
    step_inferred: bool
    epoch: float | None
    lr: float | None
    grad_norm: float | None
    memory_gb: float | None
    loss: LossNow | None
    evaluations: Evaluations | None
    speed: Speed | None
    left: Left | None
    silence: Silence | None
    skipped: Skipped
    nonfinite: tuple[NonFinite, ...]
    restarts: int
    messages: tuple[Message, ...]
    """Errors and warnings about the run."""
    cannot_show: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def share_done(self) -> float | None:
        """Steps done, of all."""
        if self.step is None or not self.total_steps:
            return None
        return min(self.step / self.total_steps, 1.0)

    @property
    def over(self) -> bool:
        return self.state == "ended"


def status_of(
    log: RunLog,
    now: float,
    *,
    record: Run | None = None,
    pathologies: Sequence[Finding] | None = None,
    limits: StatusLimits | None = None,
    watched: Column | None = None,
    held_back: float = 0.0,
) -> Status:
    """The status of a run.

    Args:
        log: what its log holds so far.
        now: unix seconds.
        record: the record, if the log is that of a run folder: its verdict counts too.
        pathologies: what :func:`~palingenesis.findings.pathologies.pathologies_of` finds; what the status
            does not say itself becomes a part of it.
        limits: what is judged by.
        held_back: share of the log that its writer may hold back until a block is full.
        watched: steps, and the unix seconds at which they were seen to arrive, for a log without times.
    """
    limits = limits or StatusLimits()
    pace = pace_of(log, limits, watched)
    silence = silence_of(log, pace, now, limits, held_back)
    loss = loss_now(log, limits)
    over = _over(log, record)
    causes = likely(pathologies or (), limits)
    warned = warnings(log)
    seen = Seen(
        log=log,
        limits=limits,
        over=over,
        loss=loss,
        setback=setback(log, limits),
        zero_from=zero_loss(log, limits),
        nonfinite=nonfinite(log),
        skipped=skipped(log, limits),
        speed=speed_of(log, pace, limits),
        silence=silence,
        errors=errors(log),
        # Of a record, pathologies tell every event, with its cause.
        warnings=() if record is not None and pathologies is not None else warned,
        remarks=remarks(log),
        record=record,
    )
    found = findings_of(seen)
    found += not_said(found, causes)
    verdict, sentence = _verdict(found, seen)
    return Status(
        source=log.source,
        format=log.format,
        state=_state(over, silence),
        verdict=verdict,
        sentence=sentence,
        now=now,
        step=log.last_step,
        total_steps=log.total_steps,
        step_inferred=log.step_inferred,
        epoch=_last(log, "train/epoch"),
        lr=_last(log, "train/lr"),
        grad_norm=_last(log, "train/grad_norm_raw", "train/grad_norm"),
        memory_gb=_last(log, "health/cuda_peak_gb_max", "health/cuda_peak_gb"),
        loss=loss,
        evaluations=evaluations(log, loss, limits),
        speed=seen.speed,
        left=None if over else left_of(log, pace, silence, limits),
        silence=silence,
        skipped=seen.skipped,
        nonfinite=seen.nonfinite,
        restarts=len(log.restarts),
        messages=(*seen.errors, *warned),
        cannot_show=log.cannot_show,
        findings=found,
    )


def _over(log: RunLog, record: Run | None) -> bool:
    closed = record is not None and isinstance(record.info.get("end"), dict)  # an error may have ended it
    reached = log.total_steps is not None and log.last_step is not None and log.last_step >= log.total_steps
    return bool(log.finished) or reached or closed


def _state(over: bool, silence: Silence | None) -> State:
    if over:
        return "ended"
    if silence is None:
        return "unknown"
    return "stalled" if silence.stale else "running"


def _last(log: RunLog, *names: str) -> float | None:
    column = next((column for name in names if (column := log.live(name))), None)
    return None if column is None else float(column.value[-1])


def _verdict(found: tuple[Finding, ...], seen: Seen) -> tuple[str, str]:
    worst = min(found, key=lambda finding: SEVERITIES.index(finding.severity), default=None)
    if seen.record is not None and seen.record.verdict == CRITICAL:
        critical = worst is not None and worst.severity == "critical"
        return CRITICAL, worst.message if worst is not None and critical else seen.record.verdict_sentence
    if worst is not None and worst.severity != "info":
        return (CRITICAL if worst.severity == "critical" else WARNING), worst.message
    losses = len(seen.log.live(seen.log.loss_name).value)
    if losses < seen.limits.least_losses:
        return UNKNOWN, f"nothing is wrong in {losses} losses, which are too few to judge by"
    if seen.record is not None and seen.record.alarms_possible_from is None:
        return UNKNOWN, "nothing is wrong so far, but no layer was checked often enough for an alarm"
    return HEALTHY, "nothing is wrong in what the log shows"
