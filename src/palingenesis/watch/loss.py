"""Loss spikes: the loss against its own running mean, on every step, judged at every check.

The running mean and variance remember about ``MEMORY`` losses, few enough to follow a loss that falls. A
spike is more than ``sigma`` standard deviations above the mean and, where that is positive, more than
``loss_spike_factor`` times it; three things keep ordinary noise from passing for one:

- between two checks many losses are looked at where a check looks at one, so ``sigma`` is raised there until
  the chance of a false spike in the whole interval is that of one check, and so it is while few losses are
  known (Student's t);
- a spike must exceed the largest recent excursion by half: heavy tails set their own bar, and spikes that
  come again and again (a term that only some batches have) become one;
- losses that were always positive must be as far out on a logarithmic scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from palingenesis.config import MonitorConfig
from palingenesis.events import Event

# Losses that the running mean, its variance and the largest recent excursion remember.
MEMORY = 100

# A spike exceeds the largest recent excursion above the mean by this factor.
EXCURSION = 1.5
# The same where the mean is not positive: there no ratio to it protects from noise.
EXCURSION_ALONE = 2.5
# The largest of many losses is rare, so excursions fade this much more slowly than the mean.
EXCURSION_FADES = 0.1

# So many spikes within so many losses are the loss's habit.
HABIT, HABIT_WITHIN = 5, 3 * MEMORY

# At the end of the warm-up, losses further than this many (robust) standard deviations from its median are
# left out of the first baseline, so that a spike there does not hide later ones; unless they come back often.
WARMUP_OUTLIER, OFTEN = 5.0, 3
_MAD_TO_STD = 1.4826


def corrected_sigma(sigma: float, tries: int, known: int) -> float:
    """The bar whose tail probability over ``tries`` values is that of ``sigma`` for one.

    Args:
        sigma: standard deviations.
        tries: values looked at.
        known: values that the standard deviation was estimated from; the bar grows as Student's t does
            (first term of its Cornish-Fisher expansion; Abramowitz and Stegun 26.7.5).
    """
    bar = sigma if tries <= 1 else -NormalDist().inv_cdf(NormalDist().cdf(-sigma) / tries)
    return bar * (1 + (bar * bar + 1) / (4 * max(known - 1, 1)))


@dataclass
class _Running:
    """Exponentially weighted mean and variance of one series."""

    mean: float = 0.0
    var: float = 0.0

    def update(self, value: float, rate: float) -> None:
        diff = value - self.mean
        self.mean += rate * diff
        self.var = (1 - rate) * (self.var + rate * diff * diff)

    def restart(self, values: Sequence[float]) -> None:
        self.mean, self.var = float(np.mean(values)), float(np.var(values))

    @property
    def std(self) -> float:
        return math.sqrt(self.var)


@dataclass
class LossWatch:
    """Spikes, recoveries and lasting shifts of the loss."""

    config: MonitorConfig
    count: int = 0
    first_step: int = 0
    ready: bool = False
    spike_since: int = 0
    positive: bool = True
    excursion: float = 0.0
    seen: int = 0
    _spikes: list[tuple[int, float]] = field(default_factory=list)
    _loss: _Running = field(default_factory=_Running)
    _log: _Running = field(default_factory=_Running)
    _early: list[float] = field(default_factory=list)
    _outside: list[float] = field(default_factory=list)

    def check(self, losses: Sequence[tuple[int, float]], step: int) -> list[Event]:
        """Judge the losses since the last check.

        Args:
            losses: ``(step, loss)`` in order; non-finite ones are passed over, they are another watch's.
            step: the check's own step; the other losses lie between two checks.
        """
        events: list[Event] = []
        for at, loss in losses:
            if math.isfinite(loss):
                events += self._one(at, loss, between=at != step)
        return events

    # -- one loss ----------------------------------------------------------------------------------------

    def _one(self, step: int, loss: float, *, between: bool) -> list[Event]:
        if not self.ready:
            self._warm_up(step, loss)
            return []
        self.seen += 1
        # Once the loss has jumped, it is back only when it is below the lower bar of a check.
        tries = self.config.check_every if between and not self.spike_since else 1
        rule = self._spike_rule(loss, corrected_sigma(self.config.sigma, tries, min(self.count, MEMORY)))
        if rule is None:
            self._outside.clear()
            recovered = self._recovered(step, loss) if self.spike_since else []
            self._learn(loss)
            return recovered
        self._outside.append(loss)
        if len(self._outside) >= self.config.level_shift_checks * self.config.check_every:
            return self._accept_level(step, loss)
        if self.spike_since:
            return []
        self.spike_since = step
        self._remember(loss - self._loss.mean)
        return [self._spike(step, loss, rule, between=between)]

    def _remember(self, excursion: float) -> None:
        recent = [(at, size) for at, size in self._spikes if self.seen - at < HABIT_WITHIN]
        self._spikes = [*recent, (self.seen, excursion)]
        if len(self._spikes) >= HABIT:
            self.excursion = max(self.excursion, *(size for _, size in self._spikes))

    def _warm_up(self, step: int, loss: float) -> None:
        """Gather the first baseline, for a stretch of steps: losses may be given only now and then."""
        self.first_step = self.first_step or step
        self._early = [*self._early[-MEMORY + 1 :], loss]
        passed = step - self.first_step + 1
        if passed < self.config.warmup * self.config.check_every or len(self._early) < self.config.warmup:
            return
        values = np.array(self._early)
        middle = float(np.median(values))
        spread = _MAD_TO_STD * float(np.median(np.abs(values - middle)))
        out = values > middle + WARMUP_OUTLIER * spread if spread > 0 else np.zeros(len(values), dtype=bool)
        episodes = int(np.count_nonzero(out[1:] & ~out[:-1])) + int(out[0])
        self._restart(values.tolist() if episodes >= OFTEN else values[~out].tolist())
        self.ready, self._early = True, []

    def _restart(self, values: Sequence[float]) -> None:
        self.count = len(values)
        self._loss.restart(values)
        self.excursion = max(values) - self._loss.mean
        self.positive = min(values) > 0
        if self.positive:
            self._log.restart([math.log(value) for value in values])

    def _learn(self, loss: float) -> None:
        self.count += 1
        fading = 1.0 / MEMORY
        rate = max(1.0 / self.count, fading)
        self.excursion = max(self.excursion * (1 - EXCURSION_FADES * fading), loss - self._loss.mean)
        self._loss.update(loss, rate)
        self.positive &= loss > 0
        if self.positive:
            self._log.update(math.log(loss), rate)

    def _spike_rule(self, loss: float, sigma: float) -> str | None:
        """The rule under which ``loss`` is a spike, or ``None``."""
        mean = self._loss.mean
        excursion = (EXCURSION if mean > 0 else EXCURSION_ALONE) * self.excursion
        if loss <= mean + sigma * self._loss.std or loss <= mean + excursion:
            return None
        if mean <= 0:
            # A ratio to a mean that is not positive says nothing.
            return "sigma_only"
        if loss <= self.config.loss_spike_factor * mean:
            return None
        by_log = self.config.loss_log_domain and self.positive
        if by_log and math.log(loss) <= self._log.mean + sigma * self._log.std:
            return None
        return "sigma_and_ratio"

    # -- events ------------------------------------------------------------------------------------------

    def _spike(self, step: int, loss: float, rule: str, *, between: bool) -> Event:
        mean, std = self._loss.mean, self._loss.std
        ratio = loss / mean if mean > 0 else None
        times = f"{ratio:.3g} times" if ratio else "above"
        by_rule = "" if ratio else "; its mean is not positive, so only the sigma rule was applied"
        where = ", between two checks" if between else ""
        return Event(
            "loss_spike",
            step,
            "warning",
            f"the loss jumped to {loss:.4g}, {times} its running mean {mean:.4g}{by_rule}{where}",
            {
                "value": loss,
                "baseline": mean,
                "std": std,
                "ratio": ratio,
                "rule": rule,
                "between_checks": between,
            },
        )

    def _recovered(self, step: int, loss: float) -> list[Event]:
        since, self.spike_since = self.spike_since, 0
        return [
            Event(
                "loss_recovered",
                step,
                "info",
                f"the loss is back in range at {loss:.4g} (spike of step {since})",
                {"value": loss, "baseline": self._loss.mean, "since": since},
            )
        ]

    def _accept_level(self, step: int, loss: float) -> list[Event]:
        old = self._loss.mean
        self._restart(self._outside[-MEMORY:])
        self._outside.clear()
        shift = Event(
            "loss_level_shift",
            step,
            "info",
            f"the loss has stayed near {self._loss.mean:.4g} (before: {old:.4g}); "
            "that is its normal from now on",
            {"value": self._loss.mean, "baseline": old},
        )
        return [shift, *(self._recovered(step, loss) if self.spike_since else [])]

    # -- state -------------------------------------------------------------------------------------------

    _PLAIN = ("count", "first_step", "ready", "spike_since", "positive", "excursion", "seen")

    def state_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in self._PLAIN},
            "loss": [self._loss.mean, self._loss.var],
            "log": [self._log.mean, self._log.var],
            "early": list(self._early),
            "outside": list(self._outside),
            "spikes": [list(spike) for spike in self._spikes],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._PLAIN:
            setattr(self, name, state[name])
        self._loss, self._log = _Running(*state["loss"]), _Running(*state["log"])
        self._early, self._outside = list(state["early"]), list(state["outside"])
        self._spikes = [(int(at), float(size)) for at, size in state["spikes"]]
