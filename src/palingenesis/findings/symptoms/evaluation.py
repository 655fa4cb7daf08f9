"""Symptoms that evaluations show: a loss that rises while training goes well, overall or of one source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from palingenesis.findings.case import Case
from palingenesis.findings.finding import Finding
from palingenesis.findings.sources import Series
from palingenesis.findings.trends import Trend, trend

_EVAL, _LOSS = "eval/", "/loss"


class Rise(NamedTuple):
    """An evaluation loss that goes up for good after its lowest."""

    best_step: int
    best: float
    first: float
    """At the first evaluation."""
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
        since=rise.best_step,
    )


def source_overfitting(case: Case) -> Finding | None:
    """One source's evaluation loss falls and rises again while another's does not rise."""
    rises, still = sources_apart(case)
    # What only ever got worse was never learned here: that is forgetting.
    rising = {name: rise for name, rise in rises.items() if not only_worse(rise, case)}
    if not rising or not still:
        return None
    worst = max(rising, key=lambda name: rising[name].share)
    rise = rising[worst]
    return Finding(
        "run.source_overfitting",
        "warning",
        f"the evaluation loss of {worst} rose from {rise.best:.4g} (step {rise.best_step}) to "
        f"{rise.last:.4g} while {len(still)} of {len(rises) + len(still)} sources did not get worse",
        {
            "sources": {name: each.share for name, each in rising.items()},
            "best_steps": {name: each.best_step for name, each in rising.items()},
            "not_worse": still,
        },
        f"data.sources: a lower weight for {worst} if it is trained on too often, a higher one if it is "
        "being forgotten",
        since=min(each.best_step for each in rising.values()),
    )


def sources_apart(case: Case) -> tuple[Mapping[str, Rise], list[str]]:
    """Sources whose evaluation loss rises for good, and the names of those whose does not."""
    sources = {
        name.removesuffix(_LOSS): series
        for name, series in case.named(_EVAL).items()
        if name.endswith(_LOSS) and series
    }
    rises = {name: rise for name, series in sources.items() if (rise := _rise(series, case)) is not None}
    return rises, sorted(set(sources) - set(rises))


def only_worse(rise: Rise, case: Case) -> bool:
    """Whether an evaluation loss was never well below its first value."""
    return rise.first - rise.best <= case.limits.eval_rise * abs(rise.best)


def evaluation_lost(case: Case) -> Finding | None:
    """An evaluation loss that is not finite while the training loss is."""
    lost = [
        (name, step)
        for name in case.source.names
        if name.startswith(_EVAL) and name.endswith(_LOSS)
        for step in case.nonfinite(name)
        if case.lost_at is None or step < case.lost_at
    ]
    if not lost:
        return None
    name, since = min(lost, key=lambda one: one[1])
    return Finding(
        "run.evaluation_lost",
        "warning",
        f"{name} is not finite at step {since} while the training loss is: an evaluation row without a "
        "loss-bearing token is 0/0",
        {"metrics": sorted({name for name, _ in lost}), "steps": sorted({step for _, step in lost})},
        "data.max_seq_length: longer, or take rows without an answer out of data.eval_dataset (pgs validate "
        "names them)",
        since=since,
    )


def _rise(evaluated: Series, case: Case) -> Rise | None:
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
        Rise(int(evaluated.step[lowest]), best, float(evaluated.value[0]), last)
        if upwards and last - best > limits.eval_rise * abs(best)
        else None
    )


def _falls(case: Case, since: int) -> bool:
    """Whether the training loss surely fell since a step."""
    part = case.loss.part(since)
    line: Trend = trend(part.step, part.value, case.limits.alpha)
    return line.high < 0
