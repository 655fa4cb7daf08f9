"""Symptoms of a learning rate that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from palingenesis.findings.case import COSINE, RATE, Case
from palingenesis.findings.finding import Finding
from palingenesis.findings.trends import median, spread, trend


@dataclass
class _Signs:
    """What speaks for a learning rate that is too high."""

    told: list[str] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)
    since: list[int] = field(default_factory=list)
    alone: bool = False
    """The loss climbed and the gradient did not, or nobody knows."""

    def add(self, told: str, since: int | None, **evidence: Any) -> None:
        self.told.append(told)
        self.evidence |= evidence
        if since is not None:
            self.since.append(since)


def lr_too_high(case: Case) -> Finding | None:
    """Steps that undo each other, or a loss that diverges.

    A rising loss alone may have other reasons; it is surer where the gradient grows with it, or all is lost.
    """
    signs = _Signs()
    looks: tuple[Callable[[Case, _Signs], bool], ...] = (
        _steps_undo,
        _norm_grows,
        _loss_rises,
        _loss_climbs,
        _spikes_often,
        _is_lost,
    )
    against, grows, rises, climbs, spikes, lost = (look(case, signs) for look in looks)
    if not (against or climbs or rises or (grows and (spikes or lost))):
        return None
    limits = case.limits
    both = climbs and not signs.alone  # the loss and its gradient
    sure = limits.agreeing if both or sum((against, grows, rises or climbs, lost)) > 1 else limits.single
    if (signs.alone or not climbs) and not (against or grows or lost):
        sure = limits.shared
    return Finding(
        "run.lr_too_high",
        "critical" if lost or (sure > limits.shared and (rises or climbs)) else "warning",
        f"the learning rate is too high: {', '.join(signs.told)}",
        {**signs.evidence, "learning_rate": case.peak_rate},
        f"train.learning_rate: {case.rate(1 / 3, 'a third')}",
        since=min(signs.since, default=None),
        confidence=sure,
    )


def _steps_undo(case: Case, signs: _Signs) -> bool:
    cosine = case.series(COSINE)
    middle = median(cosine.value, case.limits.alpha)
    low = case.limits.cosine_low
    if not middle.high < low:
        return False
    signs.add(
        f"consecutive gradients point against each other (median cosine {middle.value:.2f})",
        case.first_beyond(cosine, lambda one: one.value < low),
        cosine=middle.value,
        cosine_high=middle.high,
    )
    return True


def _norm_grows(case: Case, signs: _Signs) -> bool:
    half = case.norm.second_half
    if case.clipped_only or not half or not (half.value > 0).all():
        return False
    growth = trend(half.step, np.log(half.value), case.limits.alpha)
    if not (growth.low > 0 and growth.change > np.log(case.limits.norm_growth)):
        return False
    factor = float(np.exp(growth.change))
    start = float(np.median(half.value[: case.limits.onset_window]))
    signs.add(
        f"the gradient norm grew {factor:.3g}-fold over the second half",
        # Where it has grown by half of that, on a logarithmic scale.
        case.first_beyond(half, lambda one: one.value > start * factor**0.5),
        norm_growth=factor,
    )
    return True


def _loss_rises(case: Case, signs: _Signs) -> bool:
    """A trend of the second half, or a rise at the end that is beyond the curve's noise."""
    half, rise = case.loss.second_half, case.rise
    line = trend(half.step, half.value, case.limits.alpha)
    if not (line.low > 0 and line.change > case.limits.loss_rise * abs(line.middle)):
        if rise is None or rise.kind != "rise":
            return False
        signs.add(
            f"the loss rose from {rise.lowest:.4g} to {rise.last:.4g} and did not come back",
            int(rise.since_step),
            loss_rise=rise.size,
        )
        return True
    lowest = int(half.step[np.argmin(half.value)])
    signs.add(f"the loss rose by {line.change:.3g} over the second half", lowest, loss_rise=line.change)
    return True


def _loss_climbs(case: Case, signs: _Signs) -> bool:
    """Whether the loss went far above where it began, and the gradient with it."""
    limits, loss = case.limits, case.loss
    window = min(limits.climb_window, len(loss.value) - limits.climb_first)
    if window < limits.climb_least or not (loss.value > 0).all():
        return False
    log = np.log(loss.value)
    levels = np.median(np.lib.stride_tricks.sliding_window_view(log, window), axis=1)
    top = int(np.argmax(levels))
    start = float(np.min(log[: limits.climb_first]))
    rise = float(levels[top]) - start
    noise = spread(np.diff(log)) / np.sqrt(2 * limits.climb_first)
    if rise <= max(np.log(limits.climb), limits.climb_noise * noise):
        return False
    first, last = loss.step[top], loss.step[top + window - 1]
    at = int(loss.step[top + window // 2])
    before, then = case.norm.value[: limits.climb_first], case.norm.part(first, last).value
    known = len(before) and len(then) and not case.clipped_only
    with_gradient = bool(known and np.median(then) >= limits.climb_gradient * np.min(before))
    if not with_gradient and rise < np.log(limits.climb_alone):
        return False
    signs.alone = not with_gradient
    signs.add(
        f"the loss was {np.exp(rise):.3g} times its first value around step {at}",
        case.first_beyond(loss, lambda one: np.log(one.value) > start + rise / 2),
        loss_over_first=float(np.exp(rise)),
        highest_around=at,
    )
    return True


def _spikes_often(case: Case, signs: _Signs) -> bool:
    spikes = case.spikes
    if len(spikes) < case.limits.spikes_many:
        return False
    signs.add(f"the loss spiked {len(spikes)} times", spikes[0], spikes=spikes)
    return True


def _is_lost(case: Case, signs: _Signs) -> bool:
    if case.lost_at is None:
        return False
    signs.add(
        f"loss or gradients were not finite at step {case.lost_at}", case.lost_at, nonfinite=case.lost_at
    )
    return True


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
        since=int(loss.step[0]),
        # An evaluation that does not improve either is a second sign.
        confidence=limits.single if len(evaluated) else limits.shared,
    )
