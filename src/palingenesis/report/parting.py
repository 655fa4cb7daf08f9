"""Where two runs part: the first step at which anything differs, and that from which their losses stay apart.

The two are not the same. Runs with another seed differ from the first step on and may stay together to the
end; runs of one seed are the same bit for bit until something changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from palingenesis.findings.trends import spread
from palingenesis.record.columns import Bools, Floats
from palingenesis.record.format import STEP_KEY
from palingenesis.report.subject import Subject
from palingenesis.runlogs.table import Column

#: Numbers that differ between any two runs, and say nothing of what they did.
_CLOCKS = (
    "time",
    "tokens_per_sec",
    "step_time_s",
    "eval_s",
    "checkpoint_s",
    "mfu",
    "_gb",
    "cuda_",
    "samples_per",
)
_BATCH = "train/batch"
#: What a spread from a median of deviations is worth, as a share of the values it is made of.
_SPREAD_WORTH = 0.37


@dataclass(frozen=True)
class PartingLimits:
    """What counts as a difference between two runs."""

    same: float = 1e-6
    """Share by which two numbers may differ and be called the same: what float32 keeps of a number."""
    least_steps: int = 20
    """Steps that both runs must have for their losses to be compared: fewer make no spread to judge by."""
    blocks: int = 40
    """Parts into which common steps are cut; the step of parting is known to one part."""
    least_block: int = 5
    """Values a part has at least: a median of fewer is one of them."""
    near: int = 21
    """Neighbouring parts whose noise a part is judged by: losses that fall are noisier at the start."""
    chance: float = 1e-3
    """Chance that two equal runs are called apart, all parts together."""
    least_share: float = 0.005
    """Difference, as a share of the loss, that matters to anybody: half a per cent."""


@dataclass(frozen=True)
class FirstDifference:
    """The first step at which a number of two runs is not the same."""

    signal: str
    step: int
    first: float
    second: float


@dataclass(frozen=True)
class Apart:
    """How the losses of two runs lie to each other."""

    step: int | None
    """From which on they stay apart; None if they do not, as far as they go."""
    lower: bool
    """Whether the second run's loss is the lower one at the end."""
    difference: float
    """Second less first, over the last part."""
    low: float
    high: float
    """Interval of 95% of the difference."""
    common: int
    """Steps that both have."""


@dataclass(frozen=True)
class Parting:
    """Where one run parts from the first."""

    differences: tuple[FirstDifference, ...]
    """Of every number that both have and that differs, the earliest first."""
    same: tuple[str, ...]
    """Numbers that are the same at every common step."""
    batches: int | None
    """First step that was trained on another batch, where batches carry a fingerprint."""
    batches_compared: int
    """Steps at which both have one."""
    loss: Apart | None
    """None where there are too few common steps."""
    evaluation: Apart | None
    limits: PartingLimits = field(default_factory=PartingLimits)

    @property
    def first_step(self) -> int | None:
        """The first step at which anything differs."""
        steps = [one.step for one in self.differences[:1]]
        if self.batches is not None:
            steps.append(self.batches)
        return min(steps, default=None)


def parting_of(first: Subject, second: Subject, limits: PartingLimits | None = None) -> Parting:
    """Where the second run parts from the first."""
    limits = limits or PartingLimits()
    share = max(limits.same, 0.0)
    grain = max(first.source.resolution, second.source.resolution)
    differences, same = [], []
    for name in first.signals:
        if name == STEP_KEY or name not in second.signals or any(clock in name for clock in _CLOCKS):
            continue
        step, left, right = common(first.signals[name], second.signals[name])
        if np.isnan(left).all() and np.isnan(right).all():  # no common step, or a text
            continue
        where = _differs(left, right, share, grain)
        if where.any():
            at = int(where.argmax())
            differences.append(FirstDifference(name, int(step[at]), float(left[at]), float(right[at])))
        else:
            same.append(name)
    loss = _loss_name(first, second)
    batches, compared = _batches(first, second)
    return Parting(
        differences=tuple(sorted(differences, key=lambda one: one.step)),
        same=tuple(same),
        batches=batches,
        batches_compared=compared,
        loss=apart(first.signals[loss], second.signals[loss], limits),
        evaluation=apart(first.signals["eval/loss"], second.signals["eval/loss"], limits),
        limits=limits,
    )


def _loss_name(first: Subject, second: Subject) -> str:
    """Cross-entropy, where both have it: objectives of two kinds cannot be compared."""
    both = [
        name for name in ("train/ce_loss", "train/loss") if name in first.signals and name in second.signals
    ]
    return both[0] if both else "train/loss"


def common(first: Column, second: Column) -> tuple[Floats, Floats, Floats]:
    """Steps that both have, and the values there; of several values at a step the last."""
    left, right = (
        dict(zip(column.step.tolist(), column.value.tolist(), strict=True)) for column in (first, second)
    )
    steps = sorted(left.keys() & right.keys())
    return (
        np.array(steps),
        np.array([left[step] for step in steps]),
        np.array([right[step] for step in steps]),
    )


def _differs(left: Floats, right: Floats, share: float, grain: float) -> Bools:
    """Where two numbers are not the same; NaN is the same as NaN."""
    with np.errstate(invalid="ignore"):
        room = share * np.maximum(np.abs(left), np.abs(right)) + grain
        close = (np.abs(left - right) <= room) & np.isfinite(room)
    differs: Bools = ~(close | (left == right) | (np.isnan(left) & np.isnan(right)))
    return differs


def _batches(first: Subject, second: Subject) -> tuple[int | None, int]:
    """The first common step with another batch, and how many steps could be compared."""
    left, right = (
        {
            row.step: row.values[_BATCH]
            for row in subject.source.rows(f'"{_BATCH}"')
            if row.counts and _BATCH in row.values
        }
        for subject in (first, second)
    )
    both = left.keys() & right.keys()
    return min((step for step in both if left[step] != right[step]), default=None), len(both)


def apart(first: Column, second: Column, limits: PartingLimits) -> Apart | None:
    """Whether two losses stay apart at the end, and from which step on.

    Their difference is cut into parts; a part is apart if its median is beyond what noise within the parts
    explains, and large enough to matter.
    """
    step, left, right = common(first.finite, second.finite)
    if len(step) < limits.least_steps:
        return None
    difference = right - left
    size = max(limits.least_block, math.ceil(len(step) / limits.blocks))
    starts = np.arange(
        len(step) % size, len(step), size
    )  # the last part is whole; some first steps are left out
    parts = [difference[start : start + size] for start in starts]
    # The error of a median of normal values is sqrt(pi / 2) times that of their mean.
    error = _errors(parts, size, limits)
    middles = np.array([np.median(part) for part in parts])
    levels = np.array([np.median(np.abs(left[start : start + size])) for start in starts])
    far = NormalDist().inv_cdf(1 - limits.chance / len(parts) / 2)
    # Noise is known from few values: the bar is that of Student's t.
    known = _SPREAD_WORTH * limits.near * (size - 1)
    beyond = far * (1 + (far**2 + 1) / (4 * known)) * error
    off = np.abs(middles) > np.maximum(beyond, limits.least_share * levels)
    reach = NormalDist().inv_cdf(0.975) * float(error[-1])
    return Apart(
        step=_parted(off & (np.sign(middles) == np.sign(middles[-1])), step[starts]),
        lower=bool(middles[-1] < 0),
        difference=float(middles[-1]),
        low=float(middles[-1] - reach),
        high=float(middles[-1] + reach),
        common=len(step),
    )


def _errors(parts: list[Floats], size: int, limits: PartingLimits) -> Floats:
    """The error of each part's median, from the noise in the parts around it."""
    spreads = np.array([spread(part) for part in parts])
    # Runs that are the same to the bit up to some step have no noise there, and say nothing of that after it.
    noisy = np.flatnonzero([np.ptp(part) > 0 for part in parts])
    if not len(noisy):
        return np.zeros(len(parts))
    count = min(limits.near, len(noisy))
    first = np.clip(np.searchsorted(noisy, np.arange(len(parts))) - count // 2, 0, len(noisy) - count)
    near = np.array([np.median(spreads[noisy[at : at + count]]) for at in first])
    # The error of a median of normal values is sqrt(pi / 2) times that of their mean.
    return near * math.sqrt(math.pi / 2 / size)


def _parted(off: Bools, steps: Floats) -> int | None:
    """The first step of the parts that are apart up to the end; one part alone may be chance."""
    together = np.flatnonzero(~off)
    first = int(together[-1]) + 1 if len(together) else 0
    return int(steps[first]) if len(off) - first > 1 else None
