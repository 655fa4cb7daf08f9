"""Symptoms that evaluations show: a loss that rises while training goes well, overall or of one source."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from palingenesis.findings.case import Case, Series
from palingenesis.findings.finding import Finding
from palingenesis.findings.trends import Trend, trend

_EVAL, _LOSS = "eval/", "/loss"


class _Rise(NamedTuple):
    """An evaluation loss that goes up for good after its lowest."""

    best_step: int
    best: float
    last: float

    @property
    def share(self) -> float:
        return (self.last - self.best) / abs(self.best)


def overfitting(case: Case) -> Finding | None:
    evaluated = case.series("eval/loss")
    rise = _rise(evaluated, case)
    if rise is None or not _falls(case, rise.best_step):
        return None
    gap = case.series("eval/gap").value
    evidence = {"best_step": rise.best_step, "best": rise.best, "last": rise.last, "rise": rise.share}
    if len(gap):
        evidence |= {"gap_first": float(gap[0]), "gap_last": float(gap[-1])}
    return Finding(
        "run.overfitting",
        "warning",
        f"the evaluation loss rose from {rise.best:.4g} (step {rise.best_step}) to {rise.last:.4g} while the "
        "training loss kept falling",
        evidence,
        f"train.max_steps: {rise.best_step}, or fewer train.epochs; use the best checkpoint, which is kept",
    )


def source_overfitting(case: Case) -> Finding | None:
    """One source's evaluation loss rises while another's does not."""
    sources = {
        name.removesuffix(_LOSS): series
        for name, series in case.named(_EVAL).items()
        if name.endswith(_LOSS) and series
    }
    if len(sources) < 2:
        return None
    rising = {name: rise for name, series in sources.items() if (rise := _rise(series, case)) is not None}
    if not rising or len(rising) == len(sources):
        return None
    worst = max(rising, key=lambda name: rising[name].share)
    rise = rising[worst]
    return Finding(
        "run.source_overfitting",
        "warning",
        f"the evaluation loss of {worst} rose from {rise.best:.4g} (step {rise.best_step}) to "
        f"{rise.last:.4g} while {len(sources) - len(rising)} of {len(sources)} sources did not get worse",
        {
            "sources": {name: each.share for name, each in rising.items()},
            "best_steps": {name: each.best_step for name, each in rising.items()},
            "not_worse": sorted(set(sources) - set(rising)),
        },
        f"data.sources: a lower weight for {worst} if it is trained on too often, a higher one if it is "
        "being forgotten",
    )


def _rise(evaluated: Series, case: Case) -> _Rise | None:
    limits = case.limits
    if not evaluated:
        return None
    lowest = int(np.argmin(evaluated.value))
    after = Series(evaluated.step[lowest + 1 :], evaluated.value[lowest + 1 :])
    if len(after.value) < limits.eval_after:
        return None
    best, last = float(evaluated.value[lowest]), float(np.median(after.value[-3:]))
    # Without the lowest one, which noise may have made low.
    upwards = trend(after.step, after.value, limits.alpha).low > 0
    return (
        _Rise(int(evaluated.step[lowest]), best, last)
        if upwards and last - best > limits.eval_rise * abs(best)
        else None
    )


def _falls(case: Case, since: int) -> bool:
    """Whether the training loss surely fell since a step."""
    part = case.loss.part(since)
    line: Trend = trend(part.step, part.value, case.limits.alpha)
    return line.high < 0
