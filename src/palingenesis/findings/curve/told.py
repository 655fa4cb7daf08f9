"""Findings of a curve: what it shows, told with its numbers and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable

from palingenesis.findings.curve.analysis import CurveAnalysis
from palingenesis.findings.curve.limits import CurveLimits
from palingenesis.findings.finding import Finding

#: Findings about a whole run that say more than one of the curve: where they are told, it is not.
SAID_BY = {
    "curve.nonfinite": ("run.nonfinite",),
    "curve.spikes": ("run.loss_spike", "run.data_quality"),
    "curve.plateau": ("run.lr_too_low", "run.zero_loss_nan_norm"),
}


def findings_of(analysis: CurveAnalysis, limits: CurveLimits | None = None) -> list[Finding]:
    """The findings of a curve, by what began first."""
    limits = limits or CurveLimits()
    found = [
        _nonfinite(analysis),
        _diverged(analysis),
        _spikes(analysis, limits),
        *_plateaus(analysis),
        _levelled(analysis),
        _periodic(analysis),
        _restarted(analysis),
        _at_chance(analysis),
    ]
    return sorted((one for one in found if one is not None), key=lambda one: one.since or 0)


def not_said(of_curve: Iterable[Finding], of_run: Iterable[Finding]) -> list[Finding]:
    """The findings of the curve that none of the run's says better."""
    said = {finding.check for finding in of_run}
    return [finding for finding in of_curve if not said & set(SAID_BY.get(finding.check, ()))]


def _nonfinite(analysis: CurveAnalysis) -> Finding | None:
    bad = analysis.nonfinite
    if bad is None:
        return None
    until = "and to the end" if bad.to_end else f"the last at step {bad.last_step:.0f}"
    return Finding(
        "curve.nonfinite",
        "critical",
        f"{bad.count} losses are not finite, the first at step {bad.first_step:.0f}, {until}",
        {"count": bad.count, "first_step": bad.first_step, "last_step": bad.last_step, "to_end": bad.to_end},
        "train.resume_from: a checkpoint from before that step; train.learning_rate: a third; "
        "train.max_grad_norm: 1.0",
        since=int(bad.first_step),
    )


def _diverged(analysis: CurveAnalysis) -> Finding | None:
    rise = analysis.rise
    if rise is None:
        return None
    how = "jumped" if rise.kind == "jump" else "rose"
    return Finding(
        "curve.diverged",
        "critical",
        f"from step {rise.since_step:.0f} on the loss {how} from {rise.lowest:.4g} to {rise.last:.4g} and "
        "did not come back",
        {
            "kind": rise.kind,
            "since_step": rise.since_step,
            "before": rise.lowest,
            "last": rise.last,
            "standard_errors": rise.errors,
        },
        "train.resume_from: a checkpoint from before that step, with train.learning_rate: a third",
        since=int(rise.since_step),
        otherwise=("other data from that step on", "a schedule that raised the learning rate"),
        next="resume from before that step with a third of the learning rate: if the loss rises again at the "
        "same step, it is the data",
    )


def _spikes(analysis: CurveAnalysis, limits: CurveLimits) -> Finding | None:
    spikes = analysis.spikes
    if not spikes:
        return None
    worst = max(spikes, key=lambda spike: spike.peak - spike.base)
    took = [spike.recovery_steps for spike in spikes if spike.recovery_steps is not None]
    many = len(spikes) >= limits.spikes_many
    open_ones = len(took) < len(spikes)
    count = f"{len(spikes)} spikes" if len(spikes) > 1 else "one spike"
    back = f"; back to normal after {_span(took)} steps" if took else ""
    return Finding(
        "curve.spikes",
        "warning" if many or open_ones else "info",
        f"{count} of the loss, the highest at step {worst.step:.0f} from {worst.base:.4g} to "
        f"{worst.peak:.4g}{back}{'; the last one is not over' if open_ones else ''}",
        {
            "steps": [spike.step for spike in spikes],
            "peaks": [spike.peak for spike in spikes],
            "before": [spike.base for spike in spikes],
            "standard_deviations": [spike.sigmas for spike in spikes],
            "recovery_steps": [spike.recovery_steps for spike in spikes],
        },
        "train.max_grad_norm: 1.0 bounds what one batch can do; look at the batches of these steps "
        "(pgs loss RUN --spikes)",
        since=int(spikes[0].step),
        otherwise=("a batch unlike the rest", "a step that went too far"),
        next="train through these steps again with another train.seed: spikes that come at other steps are "
        "the learning rate's, those that stay with their batch the data's",
    )


def _span(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def _plateaus(analysis: CurveAnalysis) -> list[Finding]:
    told = []
    for one in analysis.plateaus:
        until = "to the end" if one.kind == "stall" else f"to step {one.last_step:.0f}, then it fell again"
        told.append(
            Finding(
                "curve.plateau",
                "warning",
                f"the loss stood still at {one.level:.4g} from step {one.first_step:.0f} {until}; by its "
                f"course it would have fallen by {one.missed:.2g} meanwhile",
                {
                    "kind": one.kind,
                    "first_step": one.first_step,
                    "last_step": one.last_step,
                    "level": one.level,
                    "missed": one.missed,
                    "evidence": one.evidence,
                },
                "train.learning_rate: look at its course over these steps first; twice if it was as planned",
                since=int(one.first_step),
                otherwise=(
                    "a learning rate near zero",
                    "gradients that were clipped or skipped",
                    "data that is harder there",
                ),
                next="plot train/lr and train/grad_norm over these steps: a learning rate or a norm that "
                "changes with the loss is the cause",
            )
        )
    return told


def _levelled(analysis: CurveAnalysis) -> Finding | None:
    level = analysis.level
    if level is None:
        return None
    return Finding(
        "curve.levelled_off",
        "info",
        f"the loss has levelled off at {level.loss:.4g}: it is flat since step {level.since_step:.0f}, the "
        f"last {level.share:.0%} of the steps",
        {"since_step": level.since_step, "share": level.share, "loss": level.loss, "change": level.change},
        "",
        since=int(level.since_step),
        otherwise=("nothing left to learn at this size", "a learning rate that is too low to go on"),
    )


def _periodic(analysis: CurveAnalysis) -> Finding | None:
    period = analysis.period
    if period is None:
        return None
    return Finding(
        "curve.periodic",
        "info",
        f"a pattern of the loss comes back every {period.steps:.0f} steps, {period.size:.2g} of the loss "
        f"high ({period.noise:.2g} standard deviations of its noise)",
        {
            "steps": period.steps,
            "rows": period.rows,
            "size": period.size,
            "standard_deviations": period.noise,
        },
        "",
    )


def _restarted(analysis: CurveAnalysis) -> Finding | None:
    if not analysis.restarts:
        return None
    twice = sum(max(one.from_step - one.to_step + 1, 0) for one in analysis.restarts)
    first = analysis.restarts[0]
    times = "once" if len(analysis.restarts) == 1 else f"{len(analysis.restarts)} times"
    return Finding(
        "curve.restarted",
        "info",
        f"the run began again {times}, first at step {first.to_step:.0f} after step {first.from_step:.0f}; "
        f"{twice:.0f} steps were run again, and only their last run counts here",
        {
            "from_steps": [one.from_step for one in analysis.restarts],
            "to_steps": [one.to_step for one in analysis.restarts],
            "steps_again": twice,
        },
        "",
        since=int(first.to_step),
    )


def _at_chance(analysis: CurveAnalysis) -> Finding | None:
    chance = analysis.chance
    if chance is None:
        return None
    return Finding(
        "curve.starts_at_chance",
        "info",
        f"the first loss, {chance.loss:.4g}, is that of a guess among {chance.vocabulary:,} tokens (the "
        f"vocabulary of {chance.family}): the model began with nothing learned",
        {"loss": chance.loss, "vocabulary": chance.vocabulary},
        "",
        otherwise=("training from scratch, as meant", "pretrained weights that were not loaded"),
        next="pgs diagnose --mode full compares the first loss with that of the model's files",
    )
