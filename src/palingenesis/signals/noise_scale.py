"""``health/gns``: how noisy the gradient is, as the batch size at which noise and signal are equal.

The simple noise scale of McCandlish et al. 2018 (arXiv 1812.06162), ``B = tr(Σ)/|G|²``: ``G`` is the
gradient of the expected loss, ``Σ`` the covariance of the gradient of one token (or one sequence, where
tokens are not counted). Nothing here knows torch: numbers in, statistics out.

A part's own mean gradient ``g_j`` over ``n_j`` tokens has ``E‖g_j‖² = |G|² + tr(Σ)/n_j``; the whole gradient
``g = Σ w_j g_j`` has ``E‖g‖² = |G|² + tr(Σ) Σ w_j²/n_j``. So, with equal or unequal counts (the paper's
appendix A.1 is the case of equal ones),

    tr(Σ) = (Σ w_j‖g_j‖² − ‖g‖²) / (Σ w_j/n_j − Σ w_j²/n_j),    |G|² = ‖g‖² − tr(Σ) Σ w_j²/n_j

are unbiased. With ``w_j = n_j/N`` the numerator is ``Σ w_j‖g_j − g‖²``: an analysis of variance. Where the
weights add up to something else than 1, as those of means over micro-batches of which one has no token, they
and the gradients are divided by that first. Of two consecutive steps, ``⟨g_t, g_{t-1}⟩`` estimates ``|G|²``
while one step changes the gradient little, and the squared norms give ``tr(Σ)``.

Both are averaged over steps with exponentially falling weights and divided last: the mean of ratios would be
biased and may not even exist. The error is a jackknife over the window (leave one step out).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from palingenesis.signals.values import Values

Floats = NDArray[np.float64]

METRIC = "health/gns"
SOURCE = "health/gns_source"

# Best first. Parts of one step see the same weights; consecutive steps only nearly so.
SOURCES = ("microbatch", "rank", "consecutive")

# Steps remembered; the weight of a new one; and steps before anything is told.
WINDOW = 100
RATE = 0.03
LEAST = 8

_Z95 = 1.96


@dataclass(frozen=True)
class Observation:
    """What one step says, unbiased both.

    Args:
        step: the optimizer step.
        signal: an estimate of |G|².
        noise: an estimate of tr(Σ) of one item.
        items: tokens in the step's batch, or sequences where tokens are not counted.
        sequences: sequences in it; NaN if unknown.
    """

    step: int
    signal: float
    noise: float
    items: float
    sequences: float


class Batch(NamedTuple):
    """The size of a step's whole batch, over all micro-batches and ranks; both may be unknown.

    Where they are, the batch itself is the unit, and only the ratio to it can be told.
    """

    tokens: float | None = None
    sequences: float | None = None

    @property
    def unit(self) -> str:
        if self.tokens is not None:
            return "tokens"
        return "sequences" if self.sequences is not None else "batches"

    @property
    def items(self) -> float:
        found = self.tokens if self.tokens is not None else self.sequences
        return 1.0 if found is None else float(found)


class NoiseScale:
    """Gathers what steps say about the noise, and divides.

    Args:
        window: steps remembered, one window a source.
        rate: weight of a new step in the averages.
        least: steps before a number is told.
    """

    def __init__(self, *, window: int = WINDOW, rate: float = RATE, least: int = LEAST) -> None:
        self._window, self._rate, self._least = window, rate, max(least, 3)
        self._seen: dict[str, deque[Observation]] = {name: deque(maxlen=window) for name in SOURCES}
        self._unit: dict[str, str] = {}

    def add_parts(
        self,
        step: int,
        source: str,
        squares: Sequence[float] | Floats,
        whole: float,
        *,
        tokens: Sequence[float] | Floats | None = None,
        sequences: Sequence[float] | Floats | None = None,
        shares: Sequence[float] | Floats | None = None,
    ) -> None:
        """Take in one step whose batch came in parts, on one rank or on many.

        Args:
            step: the optimizer step.
            source: ``"microbatch"`` or ``"rank"``.
            squares: ``‖w_j g_j‖²``, one a part: the squared norm of what the part added to the whole. Under
                DDP a hook sees the world size times that.
            whole: ``‖g‖²``, with ``g`` the sum of what the parts added.
            tokens: loss-bearing tokens of each part.
            sequences: sequences of each part. Parts of no tokens (else of no sequences) are left out. Where
                neither is known, parts are taken to be of one size.
            shares: ``w_j``: tokens' (else sequences') shares by default, as where the loss is divided by the
                whole step's count; ``1/parts`` where means are averaged, those of parts of none included.

        A part whose share is 0 is left out. A step with a number that is not finite is left out, and so is
        one of fewer than two parts.
        """
        known = tokens if tokens is not None else sequences
        counts = np.full(len(squares), 1 / len(squares)) if known is None else np.asarray(known, np.float64)
        share = counts if shares is None else np.asarray(shares, dtype=np.float64)
        used = (counts > 0) & (share > 0)
        counts, share = counts[used], share[used]
        if len(counts) < 2:
            return
        added = np.asarray(squares, dtype=np.float64)[used]
        total = 1.0 if shares is None else share.sum()
        share = share / share.sum()
        with np.errstate(all="ignore"):
            added, whole = added / total**2, whole / total**2
            of_parts, of_whole = (share / counts).sum(), (share**2 / counts).sum()
            noise = ((added / share).sum() - whole) / (of_parts - of_whole)
            signal = whole - noise * of_whole
        batch = Batch(_total(tokens), _total(sequences))
        self._add(source, step, signal, noise, batch)

    def add_consecutive(
        self, step: int, inner: float, before: float, now: float, batch_before: Batch, batch: Batch
    ) -> None:
        """Take in two consecutive steps.

        Args:
            step: the later one.
            inner: ⟨g_t, g_{t-1}⟩.
            before, now: ‖g_{t-1}‖² and ‖g_t‖².
            batch_before, batch: the sizes of their batches. Steps whose sizes are not in the same unit are
                left out.
        """
        if batch.unit != batch_before.unit:
            return
        if batch.items <= 0 or batch_before.items <= 0:
            return
        per_item = (1.0 / batch_before.items + 1.0 / batch.items) / 2.0
        self._add("consecutive", step, inner, ((before + now) / 2.0 - inner) / per_item, batch)

    def _add(self, source: str, step: int, signal: float, noise: float, batch: Batch) -> None:
        if not (math.isfinite(signal) and math.isfinite(noise)):
            return
        if self._unit.get(source, batch.unit) != batch.unit:
            # The covariance of a token and of a sequence cannot be averaged.
            self._seen[source].clear()
        self._unit[source] = batch.unit
        sequences = math.nan if batch.sequences is None else float(batch.sequences)
        self._seen[source].append(Observation(int(step), float(signal), float(noise), batch.items, sequences))

    # -- what it says ------------------------------------------------------------------------------------

    @property
    def source(self) -> str | None:
        """The best source that has seen enough and has not fallen silent."""
        newest = max((seen[-1].step for seen in self._seen.values() if seen), default=0)
        full = {name: seen for name, seen in self._seen.items() if len(seen) >= self._least}
        if not full:
            return None
        latest = max(full.values(), key=lambda seen: seen[-1].step)
        since = latest[-self._least].step if latest[-1].step == newest else 0
        return next(name for name in SOURCES if name in full and full[name][-1].step >= since)

    def values(self) -> tuple[Values, dict[str, str]]:
        """The noise scale, and labels: ``{"health/gns_source": …}``, which are words and no numbers.

        Scalars: ``health/gns`` in sequences, ``health/gns_tokens``, ``health/gns_ratio`` (to the batch), each
        with a standard error ``…_se`` such that ±1.96 of it cover 95%. Where |G|² is not above twice its
        standard error: ``health/gns_lower``, ``health/gns_tokens_lower`` and ``health/gns_ratio_lower``
        instead (one-sided, 97.5%).
        """
        source = self.source
        if source is None:
            most = max(len(seen) for seen in self._seen.values())
            return Values(
                unavailable={METRIC: f"needs {self._least} steps that tell the noise, has seen {most}"}
            ), {}
        seen = list(self._seen[source])
        rows = [(one.signal, one.noise, one.items, one.sequences) for one in seen]
        signal, noise, items, sequences = np.array(rows).T
        weights = (1.0 - self._rate) ** np.arange(len(seen))[::-1]
        estimate = ratio_estimate(signal, noise, weights / weights.sum())
        batch = float(weights @ items / weights.sum())
        units = {"health/gns_ratio": 1.0 / batch}
        if self._unit[source] == "tokens":
            units["health/gns_tokens"] = 1.0
        unavailable = {}
        known = np.isfinite(sequences)
        if known.any():
            units[METRIC] = float(
                (weights @ np.where(known, sequences, 0.0)) / (weights[known] @ items[known])
            )
        else:
            unavailable[METRIC] = "in sequences: how many make a batch is not known"
        scalars: dict[str, float] = {}
        for name, unit in units.items():
            if estimate.resolved:
                scalars[name] = estimate.ratio * unit
                scalars[f"{name}_se"] = estimate.error * unit
            elif estimate.lower is not None:
                scalars[f"{name}_lower"] = estimate.lower * unit
            else:
                unavailable[name] = "the gradient itself cannot be told from noise, not even a lower bound"
        return Values(scalars, {}, unavailable), {SOURCE: source}

    def state_dict(self) -> dict[str, Any]:
        """Everything seen, as plain numbers and lists."""
        return {
            name: {
                "unit": self._unit.get(name, "tokens"),
                "seen": [list(astuple(one)) for one in seen],
            }
            for name, seen in self._seen.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict`. Raises KeyError, TypeError or ValueError if it is none."""
        seen = {}
        units = {}
        for name in SOURCES:
            rows = [Observation(int(step), *map(float, rest)) for step, *rest in state[name]["seen"]]
            seen[name] = deque(rows, maxlen=self._window)
            if rows:
                units[name] = str(state[name]["unit"])
        self._seen, self._unit = seen, units


@dataclass(frozen=True)
class RatioEstimate:
    """``noise/signal`` of weighted means.

    Args:
        ratio: of the means.
        error: its standard error, scaled so that ±1.96 cover 95% however few steps there are.
        lower: lower bound, 97.5%; ``None`` if there is none.
        resolved: the mean signal is above twice its standard error.
    """

    ratio: float
    error: float
    lower: float | None
    resolved: bool


def ratio_estimate(signal: Floats, noise: Floats, weights: Floats) -> RatioEstimate:
    """The ratio of two weighted means, with a jackknife error.

    Args:
        signal, noise: ``[steps]``.
        weights: ``[steps]``, adding up to 1.

    The error is the larger of the jackknife's and that of the upper side of Fieller's interval (1954), which
    solves ``(noise − B·signal)² = z² Var(noise − B·signal)``. They agree where the mean signal is well
    above its error; near it the ratio is skewed, and ±1.96 jackknife errors would cover 80% only.
    """
    g, s = float(weights @ signal), float(weights @ noise)
    without_g = (g - weights * signal) / (1.0 - weights)
    without_s = (s - weights * noise) / (1.0 - weights)
    # Delete-one jackknife of a weighted mean: for equal weights the usual variance of the mean.
    factor = (1.0 - weights) * _t95(1.0 / float(np.square(weights).sum()) - 1.0) ** 2 / _Z95**2
    var_g = float(factor @ (without_g - g) ** 2)
    var_s = float(factor @ (without_s - s) ** 2)
    cov = float(factor @ ((without_g - g) * (without_s - s)))
    if g <= 2.0 * math.sqrt(var_g):
        reach = g + 2.0 * math.sqrt(var_g)
        return RatioEstimate(math.nan, math.nan, s / reach if reach > 0 else None, resolved=False)
    ratio = s / g
    # Leaving one step out may turn the signal negative only where it is not resolved.
    jackknife = math.sqrt(float(factor @ (without_s / without_g - ratio) ** 2))
    a = g * g - _Z95**2 * var_g
    b = g * s - _Z95**2 * cov
    c = s * s - _Z95**2 * var_s
    upper = (b + math.sqrt(max(b * b - a * c, 0.0))) / a
    return RatioEstimate(ratio, max(jackknife, (upper - ratio) / _Z95), None, resolved=True)


def _t95(degrees: float) -> float:
    """97.5% quantile of Student's t, by the Cornish-Fisher series; within 1% from 3 degrees on."""
    z, n = 1.959964, max(degrees, 1.0)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def _total(counts: Sequence[float] | Floats | None) -> float | None:
    return None if counts is None else float(np.sum(counts))
