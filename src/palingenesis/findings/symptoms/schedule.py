"""The symptom of a learning rate that does not follow its schedule."""

from __future__ import annotations

from typing import Any

import numpy as np

from palingenesis.findings.case import RATE, Case
from palingenesis.findings.finding import Finding
from palingenesis.findings.sources import Series

#: Schedules that fall from the end of the warm-up to the last step: which share is left after which share.
_FALLS = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + np.cos(np.pi * done)),
    "cosine_with_min_lr": lambda done: 0.5 * (1 + np.cos(np.pi * done)),
}
_FIX = (
    "step the scheduler once an optimizer step, on no micro-batch and once for all ranks (pgs train does), "
    "and give it the number of optimizer steps: train.max_steps"
)


def lr_schedule(case: Case) -> Finding | None:
    """Against the plan where one is known; otherwise an end long before the run's, or a return after it."""
    rates = case.series(RATE)
    if len(rates.value) < 2:
        return None
    planned = _plan(case)
    return _by_shape(case, rates) if planned is None else _against_plan(case, rates, planned)


def _plan(case: Case) -> Series | None:
    """The learning rate, of its peak, that the configuration has for every step."""
    shape = _FALLS.get(str(case.source.training.get("schedule")))
    total, warm = case.planned("total_steps"), case.planned("warmup_steps")
    if shape is None or not total or warm is None or warm >= total:
        return None
    steps = np.arange(int(warm), int(total) + 1, dtype=float)
    lowest = (case.planned("min_learning_rate") or 0.0) / (case.planned("learning_rate") or 1.0)
    left = np.asarray(shape((steps - warm) / (total - warm)))
    return Series(steps, lowest + (1 - lowest) * left)


def _against_plan(case: Case, rates: Series, planned: Series) -> Finding | None:
    """Where the learning rate first fell by a given share, and where the schedule does."""
    limits = case.limits
    peak = float(rates.value.max())
    top = int(np.argmax(rates.value))
    after = rates.value[top:] / peak
    # Rows are not written at every step, nor is a rate in every row.
    gap = max(case.row_distance, float(np.median(np.diff(rates.step))))
    for left in limits.schedule_marks:
        fallen = np.flatnonzero(after <= left)
        if not len(fallen):
            continue
        at = float(rates.step[top + fallen[0]])
        due = float(planned.step[np.argmax(planned.value <= left)])
        fast = due / max(at, 1.0)
        # The first steps say little.
        apart = abs(due - at) > limits.schedule_rows * gap
        if not apart or 1 / limits.schedule_off < fast < limits.schedule_off:
            continue
        way = f"{fast:.3g} times too fast" if fast > 1 else f"{1 / fast:.3g} times too slowly"
        return Finding(
            "run.lr_schedule",
            "warning",
            f"the learning rate was down to {left:.0%} of its peak at step {at:.0f}, where the "
            f"{case.source.training['schedule']} schedule of {planned.step[-1]:.0f} steps has step "
            f"{due:.0f}: it runs {way}{_which(case, fast)}",
            {"at": at, "due": due, "factor": fast, "peak": peak},
            _FIX,
            since=int(at),
            confidence=limits.certain,
        )
    return None


def _which(case: Case, fast: float) -> str:
    """What a factor is the number of."""
    micro, ranks = case.planned("accumulation") or 1, case.planned("processes") or 1
    counts = {
        "micro-batches in a step": micro,
        "ranks": ranks,
        "micro-batches over all ranks": micro * ranks,
    }
    near = [what for what, count in counts.items() if count > 1 and abs(fast / count - 1) < 1 / (2 * count)]
    return f", which is the number of {near[0]}" if near else ""


def _by_shape(case: Case, rates: Series) -> Finding | None:
    limits = case.limits
    peak = float(rates.value.max())
    top = int(np.argmax(rates.value >= (1 - limits.schedule_back) * peak))
    lowest = float(rates.value[top:].min())
    if lowest > (1 - 2 * limits.schedule_back) * peak:
        return None  # it is constant, or has hardly begun to fall
    ended = top + int(np.argmax(rates.value[top:] <= lowest + limits.schedule_end * peak))
    at, last = int(rates.step[ended]), int(rates.step[-1])
    if np.count_nonzero(np.diff(rates.value[top : ended + 1]) < 0) < limits.schedule_changes:
        return None
    tail = (last - at) / max(last - int(rates.step[0]), 1)
    back = float(rates.value[ended:].max())
    returned = back > lowest + limits.schedule_back * peak
    # A restart that is planned comes back in one jump; a resume may have another plan.
    if returned and (case.events("run_resumed") or np.diff(rates.value[ended:]).max() > (back - lowest) / 2):
        return None
    if tail < limits.schedule_tail and not returned:
        return None
    how = (
        f"and then came back to {back:.3g}"
        if returned
        else f"and stayed there for {tail:.0%} of the {last} steps"
    )
    evidence: dict[str, Any] = {"ended_at": at, "last_step": last, "peak": peak, "lowest": lowest}
    return Finding(
        "run.lr_schedule",
        "warning",
        f"the learning rate was at its end ({lowest:.3g}) at step {at} {how}: the schedule runs about "
        f"{last / max(at, 1):.2g} times too fast",
        {**evidence, "came_back_to": back},
        _FIX,
        since=at,
        # Some plan a low rate for the rest of the run; nobody plans to train at none.
        confidence=limits.single if lowest <= limits.schedule_end * peak else limits.shared,
    )
