"""CurveAnalysis: everything that one loss curve shows, and the order in which it is looked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from palingenesis.errors import RunLogError
from palingenesis.findings.curve.blocks import BLOCKS, Blocks, blocks_of
from palingenesis.findings.curve.convergence import Convergence, convergence_of
from palingenesis.findings.curve.evaluation import Evaluation, evaluations_of
from palingenesis.findings.curve.first import Chance, at_chance
from palingenesis.findings.curve.flat import Plateau, likeliest, plateaus_of, residual_of, smooth_falls
from palingenesis.findings.curve.limits import CurveLimits
from palingenesis.findings.curve.periods import Period, period_of
from palingenesis.findings.curve.spikes import CurveSpike, spikes_of
from palingenesis.findings.curve.tail import Level, Rise, levelled, rise_of
from palingenesis.record.columns import Bools, Floats
from palingenesis.runlogs.table import EMPTY, Column, Restart, RunLog

_RATE = "train/lr"
#: No loss of anything that trains is as large; it counts as not finite.
_OVERFLOWN = 1e60


@dataclass(frozen=True)
class NonFinite:
    """Losses that are no numbers."""

    count: int
    first_step: float
    last_step: float
    to_end: bool
    """No finite loss came after them."""


@dataclass(frozen=True)
class CurveAnalysis:
    """What a loss curve shows. Steps are those of the log; where it has none, they are counted."""

    log: RunLog
    loss_name: str
    """The metric: ``train/ce_loss`` if the log has it, else ``train/loss``, else ``eval/loss``."""
    step: Floats
    loss: Floats
    """The finite losses that count, in order: none that a restart has run again."""
    first_loss: float
    last_loss: float
    """The median of the last twentieth."""
    lowest: float
    lowest_step: float
    spikes: tuple[CurveSpike, ...] = ()
    plateaus: tuple[Plateau, ...] = ()
    level: Level | None = None
    rise: Rise | None = None
    nonfinite: NonFinite | None = None
    period: Period | None = None
    convergence: Convergence | None = None
    course: Column = EMPTY
    """The curve without its noise: what the law says, and medians where there is none."""
    chance: Chance | None = None
    restarts: tuple[Restart, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    not_judged: tuple[str, ...] = ()
    """What could not be looked for, and why, a sentence each."""

    @property
    def rows(self) -> int:
        return len(self.loss)


def analyse(log: RunLog, limits: CurveLimits | None = None) -> CurveAnalysis:
    """Look at the loss of a log.

    Args:
        log: what was read.
        limits: what it is judged by.

    Raises:
        RunLogError: the log has fewer than two losses: there is no curve.
    """
    limits = limits or CurveLimits()
    name = log.loss_name if log.column(log.loss_name) else _evaluation(log)
    everything = log.live(name)
    loss = everything.where(np.isfinite(everything.step) & _is_number(everything.value))
    nonfinite = _nonfinite(everything)
    if len(everything.value) < 2:
        count = len(everything.value)
        raise RunLogError(
            f"{log.source} has {count} value{'s' if count != 1 else ''} of the loss, and a curve needs at "
            "least 2; give a longer log"
        )
    about = _about(log, name, loss)
    if len(loss.value) < limits.least_rows:
        short = (
            f"{len(loss.value)} finite losses are too few to judge a curve by ({limits.least_rows} at least)"
        )
        return CurveAnalysis(**about, nonfinite=nonfinite, not_judged=(short,))
    step, value = loss.step, loss.value
    spikes = spikes_of(step, value, log.resolution, limits)
    use = _without(spikes, len(value), limits.spike_trace)
    blocks = blocks_of(step, value, use)
    rate = _rate_at(log, blocks)
    rise = rise_of(blocks, rate, limits)
    if rise is not None:
        spikes = _apart_from(spikes, step, rise, limits)
    until = _before(blocks, rise)
    before_rise = blocks.part(until)
    rate = None if rate is None else rate[:until]
    level, law = None, None
    plateaus: list[Plateau] = []
    course = blocks.value
    if len(before_rise.value) >= limits.plateau_blocks:
        falls = smooth_falls(before_rise, rate)
        smooth = likeliest(before_rise, falls, limits)
        plateaus = plateaus_of(before_rise, falls, limits)
        if rise is not None:  # where a rise begins a loss stands still
            plateaus = [one for one in plateaus if one.kind != "stall"]
        else:
            level = None if any(one.kind == "stall" for one in plateaus) else levelled(blocks, smooth, limits)
            law = None if plateaus else convergence_of(blocks, smooth, float(np.ptp(step)) or 1.0, limits)
            if law is not None:
                course = (
                    blocks.value
                    - residual_of(blocks, smooth.progress, smooth.rate, smooth.fitted) * blocks.error
                )
    return CurveAnalysis(
        **about,
        spikes=tuple(spikes),
        plateaus=tuple(plateaus),
        level=level,
        rise=rise,
        nonfinite=nonfinite,
        period=period_of(step, value, use, limits),
        convergence=law,
        course=Column(np.arange(len(course)), blocks.step, course),
        chance=at_chance(float(value[0]), limits.chance_within) if name != "eval/loss" else None,
        not_judged=tuple(_not_judged(log, before_rise, rise, plateaus, law, limits)),
    )


def _evaluation(log: RunLog) -> str:
    """Where only evaluations are logged, they are the curve."""
    names = [name for name in log.columns if name.endswith("/loss")]
    return "eval/loss" if log.column("eval/loss") else names[0] if names else log.loss_name


def _about(log: RunLog, name: str, loss: Column) -> dict[str, Any]:
    value = loss.value if len(loss.value) else np.array([np.nan])
    step = loss.step if len(loss.value) else np.array([np.nan])
    lowest = int(np.argmin(value)) if len(loss.value) else 0
    return {
        "log": log,
        "loss_name": name,
        "step": loss.step,
        "loss": loss.value,
        "first_loss": float(value[0]),
        "last_loss": float(np.median(value[-max(1, len(value) // 20) :])),
        "lowest": float(value[lowest]),
        "lowest_step": float(step[lowest]),
        "restarts": tuple(log.restarts),
        "evaluations": tuple(evaluations_of(log)),
    }


def _nonfinite(column: Column) -> NonFinite | None:
    bad = ~_is_number(column.value)
    if not bad.any():
        return None
    where = np.flatnonzero(bad)
    return NonFinite(
        int(bad.sum()), float(column.step[where[0]]), float(column.step[where[-1]]), bool(bad[-1])
    )


def _is_number(value: Floats) -> Bools:
    return np.asarray(np.abs(value) < _OVERFLOWN)  # False for NaN


def _without(spikes: list[CurveSpike], count: int, trace: float) -> Bools:
    use = np.ones(count, dtype=np.bool_)
    for spike in spikes:
        use[spike.row : spike.row + int(trace * (spike.over_row - spike.row))] = False
    return use if use.any() else np.ones(count, dtype=np.bool_)


def _rate_at(log: RunLog, blocks: Blocks) -> Floats | None:
    """The learning rate at each block, where the log has one all along."""
    rate = log.live(_RATE).finite
    if len(rate.value) < len(blocks.value) / 4 or not (rate.value >= 0).all() or not rate.value.max() > 0:
        return None
    return np.asarray(np.interp(blocks.step, rate.step, rate.value))


def _apart_from(spikes: list[CurveSpike], step: Floats, rise: Rise, limits: CurveLimits) -> list[CurveSpike]:
    """The spikes that are not the beginning of a rise."""
    begin = int(np.searchsorted(step, rise.since_step))
    near = max(limits.spike_apart, len(step) // BLOCKS)
    return [one for one in spikes if abs(one.row - begin) > near]


def _before(blocks: Blocks, rise: Rise | None) -> int:
    return len(blocks.value) if rise is None else int(np.searchsorted(blocks.start, rise.since_step))


def _not_judged(
    log: RunLog,
    blocks: Blocks,
    rise: Rise | None,
    plateaus: list[Plateau],
    law: Convergence | None,
    limits: CurveLimits,
) -> list[str]:
    told = []
    if len(blocks.value) < limits.plateau_blocks:
        told.append(
            f"plateaus and convergence: {len(blocks.value)} medians are too few ({limits.plateau_blocks} at "
            "least)"
        )
    elif law is None:
        why = (
            "the loss rose" if rise else "it stood still on the way" if plateaus else "no smooth law fits it"
        )
        told.append(f"convergence: {why}")
    if log.loss_kind in ("interval_mean", "moving_average"):
        what = "means over several steps" if log.loss_kind == "interval_mean" else "moving averages"
        told.append(f"spikes of single steps: the losses of this log are {what}, which flatten them")
    return told
