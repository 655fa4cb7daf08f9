"""What an analysis found, as data for scripts and as lines for people, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from palingenesis.findings.curve.analysis import CurveAnalysis
from palingenesis.findings.curve.convergence import Estimate
from palingenesis.findings.finding import Finding

#: Places of spikes that a line for people names; the data has all.
_NAMED = 5
#: A gain, of all of the fall, from which more steps are worth a sentence.
_WORTH = 0.005


def facts_of(analysis: CurveAnalysis, steps: Sequence[str]) -> dict[str, Any]:
    """Everything that JSON can hold. ``steps`` is what to do next."""
    log = analysis.log
    return {
        "source": log.source,
        "format": log.format,
        "loss_name": analysis.loss_name,
        "rows": analysis.rows,
        "first_step": _number(analysis.step[0]) if analysis.rows else None,
        "last_step": _number(analysis.step[-1]) if analysis.rows else None,
        "steps_inferred": log.step_inferred,
        "first_loss": analysis.first_loss,
        "last_loss": analysis.last_loss,
        "lowest_loss": analysis.lowest,
        "lowest_step": analysis.lowest_step,
        "convergence": _convergence(analysis),
        "spikes": [
            {
                "step": one.step,
                "peak": one.peak,
                "before": one.base,
                "ratio": one.ratio,
                "standard_deviations": one.sigmas,
                "recovery_steps": one.recovery_steps,
            }
            for one in analysis.spikes
        ],
        "plateaus": [one._asdict() for one in analysis.plateaus],
        "levelled_off": analysis.level and analysis.level._asdict(),
        "rise": analysis.rise and analysis.rise._asdict(),
        "nonfinite": analysis.nonfinite and vars(analysis.nonfinite),
        "period": analysis.period and analysis.period._asdict(),
        "restarts": [one._asdict() for one in analysis.restarts],
        "evaluations": [one._asdict() for one in analysis.evaluations],
        "starts_at_chance": analysis.chance and analysis.chance._asdict(),
        "not_judged": list(analysis.not_judged),
        "cannot_show": list(log.cannot_show),
        "next_steps": list(steps),
    }


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else float(value)


def _convergence(analysis: CurveAnalysis) -> dict[str, Any] | None:
    law = analysis.convergence
    if law is None:
        return None
    return {
        name: value._asdict() if isinstance(value, Estimate) else value
        for name, value in law._asdict().items()
    }


# -- for people ----------------------------------------------------------------------------------------------


def lines_of(analysis: CurveAnalysis) -> Iterator[tuple[str, str]]:
    """What to put before and after the colon, a line each."""
    log = analysis.log
    inferred = ", counted" if log.step_inferred else ""
    yield "log", f"{log.source}, read as {log.format}"
    if analysis.rows:
        yield (
            "loss",
            f"{analysis.rows:,} rows, steps {analysis.step[0]:.0f} to {analysis.step[-1]:.0f}{inferred}; "
            f"from {analysis.first_loss:.4g} to {analysis.last_loss:.4g}, lowest {analysis.lowest:.4g} at "
            f"step {analysis.lowest_step:.0f}",
        )
    yield "convergence", _law(analysis)
    if analysis.convergence is not None:
        law = analysis.convergence
        yield (
            "20% more steps",
            f"{law.more_steps:.0f} more steps at the mean learning rate would bring {_interval(law.gain)} of "
            f"loss; all so far brought {law.fall:.3g}",
        )
    yield "spikes", _spikes(analysis)
    yield "plateaus", _plateaus(analysis)
    rise, bad, period = analysis.rise, analysis.nonfinite, analysis.period
    if rise is not None:
        yield "divergence", f"since step {rise.since_step:.0f}, from {rise.lowest:.4g} to {rise.last:.4g}"
    if bad is not None:
        yield "not finite", f"{bad.count} losses, first at step {bad.first_step:.0f}"
    if period is not None:
        yield "pattern", f"every {period.steps:.0f} steps, {period.size:.2g} of the loss high"
    for one in analysis.evaluations:
        gap = "" if one.gap is None else f", {one.gap:+.3g} against training"
        yield (
            "evaluation" if one.name == "eval/loss" else f"evaluation {one.name}",
            f"{one.times} {'time' if one.times == 1 else 'times'}, best {one.best:.4g} at step "
            f"{one.best_step:.0f}, last {one.last:.4g} at step {one.last_step:.0f}{gap}",
        )
    for restart in analysis.restarts:
        yield "restart", f"at step {restart.to_step:.0f}, after step {restart.from_step:.0f}"
    for text in analysis.not_judged:
        yield "not judged", text
    for text in log.cannot_show:
        yield "not in the log", text


def _law(analysis: CurveAnalysis) -> str:
    law = analysis.convergence
    if law is None:
        return "no smooth law describes this curve"
    parts = [law.law]
    if law.exponent is not None:
        parts.append(f"exponent {_interval(law.exponent)}")
    if law.floor is not None:
        parts.append(f"floor {_interval(law.floor)}")
    if law.half_life is not None:
        half = law.half_life
        parts.append(
            f"what is left above it halves in {half.value:.0f} ({half.low:.0f} to {half.high:.0f}) steps"
        )
    elif law.floor is None and law.law != "straight line":
        parts.append("its floor cannot be told yet")
    return "; ".join(parts)


def _steps(count: float) -> str:
    return f"{count:.0f} {'step' if round(count) == 1 else 'steps'}"


def _interval(one: Estimate) -> str:
    return f"{one.value:.3g} ({one.low:.3g} to {one.high:.3g})"


def _spikes(analysis: CurveAnalysis) -> str:
    if not analysis.spikes:
        return "0 above what this curve's own noise reaches"
    named = [
        f"step {one.step:.0f} ({one.base:.3g} to {one.peak:.3g}, "
        + ("not over" if one.recovery_steps is None else f"over after {_steps(one.recovery_steps)}")
        + ")"
        for one in analysis.spikes[:_NAMED]
    ]
    more = len(analysis.spikes) - len(named)
    return f"{len(analysis.spikes)}: {', '.join(named)}{f' and {more} more' if more else ''}"


def _plateaus(analysis: CurveAnalysis) -> str:
    told = [
        f"steps {one.first_step:.0f} to {one.last_step:.0f} at {one.level:.4g}" for one in analysis.plateaus
    ]
    count = len(told)
    if analysis.level is not None:
        told.append(f"levelled off since step {analysis.level.since_step:.0f} at {analysis.level.loss:.4g}")
    return f"{count}{': ' if told else ''}{'; '.join(told)}"


# -- what to do next -----------------------------------------------------------------------------------------


def next_steps(analysis: CurveAnalysis, findings: Iterable[Finding]) -> list[str]:
    """What is recommended: each finding's fix and the experiment that tells, then what the curve says."""
    told: list[str] = []
    for finding in findings:
        if finding.severity != "info":
            told.append(f"{finding.check}: {finding.fix}")
            if finding.next:
                told.append(f"{finding.check}: to be sure, {finding.next}")
    sound = not told
    law, level = analysis.convergence, analysis.level
    if level is not None and sound:
        told.append(
            f"the loss is flat since step {level.since_step:.0f}: stop, or change something other than the "
            "number of steps"
        )
    elif law is not None and sound:
        if law.gain.low > _WORTH * law.fall:
            told.append(
                f"the loss still falls: {law.more_steps:.0f} more steps would bring {_interval(law.gain)}"
            )
        elif law.gain.high <= _WORTH * law.fall:
            told.append(f"more steps bring little: {law.more_steps:.0f} of them {_interval(law.gain)}")
    evaluated = next((one for one in analysis.evaluations if one.name == "eval/loss"), None)
    if evaluated is None and not analysis.evaluations:
        told.append("log an evaluation loss as well (data.eval_every): without one overfitting is not seen")
    elif (
        evaluated is not None and evaluated.best_step < evaluated.last_step and evaluated.above_best > _WORTH
    ):
        told.append(f"use the checkpoint nearest to step {evaluated.best_step:.0f}, the best evaluation")
    return told
