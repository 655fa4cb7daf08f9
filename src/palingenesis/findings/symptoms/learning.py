"""Symptoms of a learning rate that does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np

from palingenesis.findings.case import COSINE, RATE, Case
from palingenesis.findings.finding import Finding
from palingenesis.findings.trends import median, spread, trend


def lr_too_high(case: Case) -> Finding | None:
    """Steps that undo each other, or a loss that diverges.

    A rising loss alone may have other reasons: the gradient has to grow with it, or all has to be lost.
    """
    seen: list[str] = []
    evidence: dict[str, Any] = {}
    against = _steps_undo(case, seen, evidence)
    grows = _norm_grows(case, seen, evidence)
    rises = _loss_rises(case, seen, evidence)
    climbs = _loss_climbs(case, seen, evidence)
    spikes, lost = _loss_jumps(case, seen, evidence)
    if not (against or climbs or (grows and (rises or spikes or lost)) or (rises and lost)):
        return None
    evidence["learning_rate"] = case.peak_rate
    return Finding(
        "run.lr_too_high",
        "critical" if rises or climbs or lost else "warning",
        f"the learning rate is too high: {', '.join(seen)}",
        evidence,
        f"train.learning_rate: {case.rate(1 / 3, 'a third')}",
    )


def _steps_undo(case: Case, seen: list[str], evidence: dict[str, Any]) -> bool:
    cosine = case.series(COSINE)
    middle = median(cosine.value, case.limits.alpha)
    if not middle.high < case.limits.cosine_low:
        return False
    seen.append(f"consecutive gradients point against each other (median cosine {middle.value:.2f})")
    evidence |= {"cosine": middle.value, "cosine_high": middle.high}
    return True


def _norm_grows(case: Case, seen: list[str], evidence: dict[str, Any]) -> bool:
    half = case.norm.second_half
    if case.clipped_only or not half or not (half.value > 0).all():
        return False
    growth = trend(half.step, np.log(half.value), case.limits.alpha)
    if not (growth.low > 0 and growth.change > np.log(case.limits.norm_growth)):
        return False
    seen.append(f"the gradient norm grew {np.exp(growth.change):.3g}-fold over the second half")
    evidence["norm_growth"] = float(np.exp(growth.change))
    return True


def _loss_rises(case: Case, seen: list[str], evidence: dict[str, Any]) -> bool:
    half = case.loss.second_half
    line = trend(half.step, half.value, case.limits.alpha)
    if not (line.low > 0 and line.change > case.limits.loss_rise * abs(line.middle)):
        return False
    seen.append(f"the loss rose by {line.change:.3g} over the second half")
    evidence["loss_rise"] = line.change
    return True


def _loss_climbs(case: Case, seen: list[str], evidence: dict[str, Any]) -> bool:
    """Whether the loss went far above where it began, and the gradient with it."""
    limits, loss = case.limits, case.loss
    if len(loss.value) < limits.climb_first + limits.climb_window or not (loss.value > 0).all():
        return False
    log = np.log(loss.value)
    levels = np.median(np.lib.stride_tricks.sliding_window_view(log, limits.climb_window), axis=1)
    top = int(np.argmax(levels))
    rise = float(levels[top] - np.median(log[: limits.climb_first]))
    noise = spread(np.diff(log)) / np.sqrt(2 * limits.climb_first)
    if rise <= max(np.log(limits.climb), limits.climb_noise * noise):
        return False
    first, last = loss.step[top], loss.step[top + limits.climb_window - 1]
    before, then = case.norm.value[: limits.climb_first], case.norm.part(first, last).value
    known = len(before) and len(then) and not case.clipped_only
    if known and np.median(then) < limits.climb * np.median(before):
        return False
    seen.append(f"the loss was {np.exp(rise):.3g} times its first value around step {first:.0f}")
    evidence |= {"loss_over_first": float(np.exp(rise)), "highest_around": int(first)}
    return True


def _loss_jumps(case: Case, seen: list[str], evidence: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the loss spiked again and again, and whether it was lost."""
    spikes, lost = case.events("loss_spike"), case.events("nonfinite")
    many = len(spikes) >= case.limits.spikes_many
    if many:
        seen.append(f"the loss spiked {len(spikes)} times")
        evidence["spikes"] = [event.step for event in spikes]
    if lost:
        seen.append(f"loss or gradients were not finite at step {lost[0].step}")
        evidence["nonfinite"] = lost[0].step
    return many, bool(lost)


def lr_too_low(case: Case) -> Finding | None:
    """A loss that is flat from the warm-up on, and surely so."""
    limits = case.limits
    rates = case.series(RATE)
    warm = float(rates.step[np.argmax(rates.value)]) if rates else 0.0
    loss = case.loss.part(warm)
    line = trend(loss.step, loss.value, limits.alpha)
    enough = limits.flat_change * abs(line.middle)
    flat = line.span >= limits.flat_steps and line.least > -enough and line.most < enough
    if not flat or line.middle < limits.learned_loss:
        return None
    evaluated = case.series("eval/loss").value
    if len(evaluated) and evaluated[0] - evaluated.min() > limits.flat_change * abs(evaluated[0]):
        return None
    drift = case.series("health/weight_drift_max").value
    moved = f"; the weights moved by at most {drift[-1]:.2g} of their norm" if len(drift) else ""
    return Finding(
        "run.lr_too_low",
        "warning",
        f"the loss stayed at {line.middle:.4g} for {line.span:.0f} steps (a change of more than "
        f"{limits.flat_change:.0%} is ruled out){moved}: the learning rate is too low, or nothing is left to "
        "learn",
        {
            "loss": line.middle,
            "steps": line.span,
            "change_between": [line.least, line.most],
            "learning_rate": case.peak_rate,
            "drift": float(drift[-1]) if len(drift) else None,
        },
        f"train.learning_rate: {case.rate(2, 'twice')}",
    )
