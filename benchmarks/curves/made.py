"""Loss curves whose truth is known: healthy ones of many kinds, and the same with one fault each.

``healthy(seed)`` and ``faulty(fault, seed)`` give a :class:`Made`: the log as ``pgs loss`` reads it, and what
is true of it. A fault is drawn again until it is one that can be told from the curve's own noise at all; how
large that is, ``DECIDABLE`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from palingenesis.runlogs.table import Column, Restart, RunLog

Floats = NDArray[np.float64]
Random = np.random.Generator

SHAPES = ("power law", "power law", "converged", "fine-tuning", "steady fall", "negative", "nearly zero")
SCHEDULES = ("constant", "cosine", "linear", "WSD", "steps", "unknown")
NOISES = (
    "Gaussian", "proportional", "shrinking", "log-normal", "Student t3", "Student t5", "few samples",
    "hard batches", "correlated", "moving average", "Gaussian and a little Student",
)  # fmt: skip
FAULTS = (
    "spikes", "early spike", "plateau", "stall", "slow rise", "fast rise", "jump", "NaN", "overfitting",
    "period", "restart",
)  # fmt: skip


class Decidable(NamedTuple):
    """How large a fault has to be, against the curve's own noise, to be one."""

    spike_over_noise: float = 4.0
    """Height of a spike, in units of the largest excursion that the curve's noise made."""
    spike_over_student: float = 8.0
    """The same for Student's t3 noise, whose next excursion is r times all others with a chance of r**-3."""
    spike_share: float = 0.15
    """And as a share of the loss (of the curve's range, where losses are not positive)."""
    missed_share: float = 0.1
    """What a plateau keeps the loss from falling, as a share of all of its fall."""
    missed_noise: float = 1.0
    """And in standard deviations of a single loss."""
    missed_errors: float = 20.0
    """And in standard errors of a mean over the plateau's losses (correlated ones count less)."""
    fell_noise: float = 2.0
    """What the loss fell before a stall to the end, in standard deviations of a single loss."""
    rise_share: float = 0.08
    """How far a loss that diverges rises, as a share of the loss or the range."""
    rise_errors: float = 12.0
    """And in standard errors of a mean over the losses of the rise."""
    eval_rise: float = 0.05
    """Rise of the evaluation loss above its lowest, as a share."""
    eval_noise: float = 6.0
    """And in standard deviations of one evaluation."""
    period_power: float = 60.0
    """Power of the strongest line in a pattern's spectrum, in that of a line of noise."""


DECIDABLE = Decidable()


@dataclass
class Made:
    """One curve and its truth."""

    log: RunLog
    name: str
    clean: Floats
    """The curve without noise and faults, row by row."""
    truth: dict[str, Any] = field(default_factory=dict)
    """By fault: where it is."""


class _Base(NamedTuple):
    """What a curve is made of before it is put together."""

    steps: Floats
    clean: Floats
    noise: Floats
    rate: Floats
    with_rate: bool
    shape: str
    noise_name: str
    schedule: str
    law: Callable[[Floats], Floats]
    progress: Floats
    annealed: Floats
    kept: float
    """Share of what was learned by which a high learning rate keeps the loss up."""
    positive: bool
    memory: float


def healthy(seed: int) -> Made:
    """A curve of training that goes well."""
    rng = np.random.default_rng((7, seed))
    base = _base(rng, _length(rng, 30, 20_000))
    done = base.progress[-1]
    # At the mean learning rate of the run.
    here, there = base.law(np.array([done, 1.2 * done]))
    return _made(base, rng, base.clean + base.noise, {"gain": float(here - there)})


def faulty(fault: str, seed: int) -> Made:
    """A curve with one fault."""
    rng = np.random.default_rng((11, FAULTS.index(fault), seed))
    while True:
        base = _base(rng, _length(rng, 200, 20_000))
        made = _FAULTS[fault](base, rng)
        if made is not None:
            return made


def _length(rng: Random, least: int, most: int) -> int:
    return int(np.exp(rng.uniform(np.log(least), np.log(most))))


# -- healthy curves ----------------------------------------------------------------------------------------


def _base(rng: Random, rows: int) -> _Base:
    every = int(rng.choice([1, 1, 1, 5, 10, 50]))
    steps = every * np.arange(1.0, rows + 1)
    shape, noise_name = str(rng.choice(SHAPES)), str(rng.choice(NOISES))
    schedule = str(rng.choice(SCHEDULES))
    rate = _rate(schedule, rng, rows)
    law, positive = _law(shape, rng, rows)
    progress = np.cumsum(rate)
    start = law(np.zeros(1))[0]
    # What a high learning rate keeps the loss up by: it falls as the rate does, and shows as the rest falls.
    kept = float(rng.uniform(0, 0.1))
    annealed = kept * (start - law(progress)) * rate
    clean = law(progress) + annealed
    noise, memory = _noise(noise_name, rng, clean, positive)
    return _Base(
        steps, clean, noise, rate, schedule != "unknown", shape, noise_name, schedule, law, progress,
        annealed, kept, positive, memory,
    )  # fmt: skip


def _rate(schedule: str, rng: Random, rows: int) -> Floats:
    """The learning rate of every row, of its highest."""
    at = np.arange(1, rows + 1) / rows
    warm = float(rng.choice([0.0, 0.01, 0.03, 0.1]))
    rising = np.minimum(at / warm, 1) if warm else np.ones(rows)
    then = np.clip((at - warm) / (1 - warm), 0, 1)
    if schedule == "unknown":
        schedule = str(rng.choice(["constant", "cosine", "linear"]))
    if schedule == "cosine":
        low = float(rng.choice([0.0, 0.1]))
        return np.maximum(rising * (low + (1 - low) * 0.5 * (1 + np.cos(np.pi * then))), 1e-6)
    if schedule == "linear":
        return np.maximum(rising * (1 - then), 1e-6)
    if schedule == "WSD":
        tail = float(rng.uniform(0.1, 0.25))
        return np.maximum(rising * np.minimum(1, (1 - at) / tail), 1e-6)
    if schedule == "steps":
        return rising * 0.1 ** np.floor(then * 3 * 0.999)
    return rising


def _law(shape: str, rng: Random, rows: int) -> tuple[Callable[[Floats], Floats], bool]:
    """The loss by how much learning was done, and whether it is always positive."""
    early = float(rng.uniform(0.002, 0.1)) * rows
    power = float(rng.uniform(0.15, 0.9))
    if shape == "power law":
        start, floor = float(rng.uniform(6, 12)), float(rng.uniform(0.5, 2.5))
        return (lambda s: floor + (start - floor) * (1 + s / early) ** -power), True
    if shape == "converged":
        start, floor, tau = (
            float(rng.uniform(2, 11)),
            float(rng.uniform(0.3, 2)),
            rows * rng.uniform(0.02, 0.15),
        )
        return (lambda s: floor + (start - floor) * np.exp(-s / tau)), True
    if shape == "fine-tuning":
        start = float(rng.uniform(1.2, 3))
        floor, tau = start * float(rng.uniform(0.4, 0.8)), rows * float(rng.uniform(0.03, 0.3))
        return (lambda s: floor + (start - floor) * (1 + s / tau) ** -0.5), True
    if shape == "steady fall":
        start = float(rng.uniform(1, 5))
        fall = start * float(rng.uniform(0.2, 0.7))
        return (lambda s: start - fall * s / rows), True
    if shape == "negative":
        start, floor = float(rng.uniform(0.5, 3)), -float(rng.uniform(0.5, 4))
        return (lambda s: floor + (start - floor) * (1 + s / early) ** -power), False
    start = float(rng.uniform(0.5, 3))  # ends as good as learned
    return (lambda s: start * (1 + s / early) ** -(1 + power)), True


def _noise(name: str, rng: Random, clean: Floats, positive: bool) -> tuple[Floats, float]:
    """Noise, and how many rows it remembers."""
    rows = len(clean)
    level = np.abs(clean) if positive else np.full(rows, np.ptp(clean) / 4)
    size = float(np.exp(rng.uniform(np.log(0.003), np.log(0.08))))
    normal = rng.normal(size=rows)
    if name == "Gaussian":
        # The same all along, and no loss below zero.
        return normal * size * (np.min(level) if positive else level), 1
    if name == "proportional":
        return normal * size * level, 1
    if name == "shrinking":
        return normal * size * level * np.linspace(2, 0.5, rows), 1
    if name == "log-normal":
        spread = float(rng.uniform(0.05, 0.4))
        return level * (np.exp(spread * normal - spread**2 / 2) - 1), 1
    if name in ("Student t3", "Student t5"):
        raw = rng.standard_t(3 if name.endswith("3") else 5, size=rows) * size / 2
        # No loss is negative: a factor, as sums of token losses have it.
        return level * (np.exp(np.clip(raw, -2, 2)) - 1 if positive else raw), 1
    if name == "few samples":
        shape = float(rng.choice([4, 16, 64]))
        return level * (rng.gamma(shape, 1 / shape, rows) - 1), 1
    if name == "hard batches":
        # So often that they are the curve's own: at least ten of them.
        often, height = max(float(rng.uniform(0.05, 0.3)), 10 / rows), float(rng.uniform(0.05, 0.5))
        return level * (normal * size + height * ((rng.random(rows) < often) - often)), 1
    if name == "correlated":
        memory = float(rng.uniform(0.3, 0.9))
        return level * size * _filtered(normal * np.sqrt(1 - memory**2), memory), (1 + memory) / (1 - memory)
    if name == "moving average":
        width = int(rng.integers(2, max(3, min(30, rows // 20 + 3))))
        summed = np.convolve(rng.normal(size=rows + width - 1), np.ones(width), "valid") / np.sqrt(width)
        return level * size * summed, width
    tail = np.where(rng.random(rows) < 0.1, rng.standard_t(4, size=rows), normal)
    return level * size * tail, 1


def _filtered(values: Floats, memory: float) -> Floats:
    out = np.empty(len(values))
    state = values[0] / np.sqrt(1 - memory**2)
    for index, value in enumerate(values):
        state = memory * state + value if index else state
        out[index] = state
    return out


# -- putting together --------------------------------------------------------------------------------------


def _made(
    base: _Base,
    rng: Random,
    loss: Floats,
    truth: dict[str, Any],
    evaluated: tuple[Floats, Floats] | None = None,
) -> Made:
    rows = len(loss)
    digits = int(rng.choice([0, 4, 6]))
    if digits:
        loss = np.round(loss, digits)
    index = np.arange(rows)
    columns = {"train/loss": Column(index, base.steps, loss)}
    if base.with_rate:
        columns["train/lr"] = Column(index, base.steps, 3e-4 * base.rate)
    if evaluated is None and rng.random() < 0.5 and rows >= 60:
        evaluated = _evaluated(base, rng)
    if evaluated is not None:
        rows_at, values = evaluated
        columns["eval/loss"] = Column(rows_at.astype(np.int64), base.steps[rows_at.astype(np.int64)], values)
    log = RunLog(
        source="made",
        format="made",
        columns=columns,
        rows=rows,
        resolution=10.0**-digits if digits else None,
    )
    return Made(log, f"{base.shape}, {base.schedule}, {base.noise_name}, {rows} rows", base.clean, truth)


def _evaluated(base: _Base, rng: Random, extra: Floats | None = None) -> tuple[Floats, Floats]:
    """Evaluations of a healthy curve: a little above, less noisy; ``extra`` comes on top."""
    rows = len(base.steps)
    count = int(rng.integers(5, 40))
    at = np.unique(np.linspace(rows / count, rows, count).astype(int) - 1)
    scale = np.abs(base.clean) if base.positive else np.full(rows, np.ptp(base.clean) / 4)
    noise = rng.normal(size=len(at)) * float(rng.uniform(0.001, 0.015)) * scale[at]
    gap = float(rng.uniform(0, 0.1)) * scale[at] * np.linspace(0.3, 1, len(at))
    more = np.zeros(rows) if extra is None else extra
    return at.astype(float), base.clean[at] + gap + noise + more[at]


def _level(base: _Base) -> Floats:
    """What sizes are shares of."""
    return np.abs(base.clean) if base.positive else np.full(len(base.clean), np.ptp(base.clean))


# -- faults ------------------------------------------------------------------------------------------------


def _spikes_at(base: _Base, rng: Random, places: list[int]) -> Made | None:
    rows, level = len(base.clean), _level(base)
    share = base.noise / level
    noisiest = float(np.max(share))
    over = DECIDABLE.spike_over_student if base.noise_name == "Student t3" else DECIDABLE.spike_over_noise
    least = max(over * noisiest, DECIDABLE.spike_share)
    loss = base.clean + base.noise
    planted = []
    for place in places:
        height = least * float(np.exp(rng.uniform(0, np.log(6))))
        fade = float(rng.choice([0.0, 0.0, 2.0, 5.0, 15.0]))
        after = np.arange(rows - place, dtype=float)
        form = np.exp(-after / fade) if fade else (after == 0).astype(float)
        # Where the curve still falls steeply a spike has to rise above what was there a few rows before.
        before = base.clean[max(0, place - 5) : place].max(initial=base.clean[place])
        lift = height * level[place] + (before - base.clean[place])
        loss[place:] += lift * form
        planted.append(float(base.steps[place]))
    return _made(base, rng, loss, {"spikes": planted})


def _spikes(base: _Base, rng: Random) -> Made | None:
    rows = len(base.clean)
    count = int(rng.integers(1, 7))
    places = np.sort(rng.integers(20, rows - 5, count))
    if count > 1 and np.diff(places).min() < 100:
        places = places[:1]
    return _spikes_at(base, rng, places.tolist())


def _early_spike(base: _Base, rng: Random) -> Made | None:
    return _spikes_at(base, rng, [int(rng.integers(2, 20))])


def _stopped(base: _Base, rng: Random, first: int, last: int) -> Made | None:
    """Learning stops from one row to another and then goes on."""
    rate = base.rate.copy()
    rate[first:last] = 0
    progress = np.cumsum(rate)
    annealed = base.kept * (base.law(np.zeros(1))[0] - base.law(progress)) * base.rate
    stopped = base.law(progress) + annealed
    missed = float(stopped[last] - stopped[-1]) if last < len(rate) else float(stopped[-1] - base.clean[-1])
    # A fall because the learning rate falls is none that stopped.
    missed -= float(annealed[first] - annealed[-1])
    fall = float(stopped[0] - stopped[-1])
    deviation = float(np.std(base.noise[first:last]))
    counted = min(last - first, len(rate) - last if last < len(rate) else last - first)
    error = deviation * np.sqrt(base.memory / max(counted, 1))
    fell = float(stopped[0] - stopped[first])
    if last == len(rate) and fell < DECIDABLE.fell_noise * deviation:
        return None  # a loss that never fell
    if missed < max(
        DECIDABLE.missed_share * fall, DECIDABLE.missed_noise * deviation, DECIDABLE.missed_errors * error
    ):
        return None
    if float(np.ptp(annealed[first:last])) > 0.1 * missed:
        return None
    loss = stopped + base.noise
    return _made(
        base, rng, loss, {"plateau": (float(base.steps[first]), float(base.steps[min(last, len(rate) - 1)]))}
    )


def _plateau(base: _Base, rng: Random) -> Made | None:
    rows = len(base.clean)
    first = int(rng.uniform(0.05, 0.5) * rows)
    last = first + int(rng.uniform(0.15, 0.4) * rows)
    return _stopped(base, rng, first, last)


def _stall(base: _Base, rng: Random) -> Made | None:
    rows = len(base.clean)
    return _stopped(base, rng, int(rng.uniform(0.1, 0.7) * rows), rows)


def _risen(base: _Base, rng: Random, first: int, form: Floats, least: float = 1.0) -> Made | None:
    """The loss rises from a row on, by what ``form`` (0 to 1) says."""
    level = _level(base)
    size = DECIDABLE.rise_share * least * float(np.exp(rng.uniform(0, np.log(8))))
    rise = size * level[first] * form
    deviation = float(np.std(base.noise[first:]))
    error = deviation * np.sqrt(base.memory / max(len(form[first:]) / 3, 1))
    held = base.clean.copy()
    held[first:] = base.clean[first]  # learning has stopped as well
    if rise[-1] < DECIDABLE.rise_errors * error or rise[-1] < deviation:
        return None
    if len(form) - first < 20:
        return None
    return _made(base, rng, held + rise + base.noise, {"diverged": float(base.steps[first])})


def _slow_rise(base: _Base, rng: Random) -> Made | None:
    rows = len(base.clean)
    first = int(rng.uniform(0.3, 0.8) * rows)
    form = np.clip((np.arange(rows) - first) / (rows - first), 0, None)
    return _risen(base, rng, first, form)


def _fast_rise(base: _Base, rng: Random) -> Made | None:
    rows = len(base.clean)
    first = int(rng.uniform(0.3, 0.9) * rows)
    form = np.clip((np.arange(rows) - first) / (rows - first), 0, None)
    return _risen(base, rng, first, np.expm1(3 * form) / np.expm1(3), least=2)


def _jump(base: _Base, rng: Random) -> Made | None:
    rows = len(base.clean)
    first = int(rng.uniform(0.3, 0.9) * rows)
    return _risen(base, rng, first, (np.arange(rows) >= first).astype(float), least=2)


def _nan(base: _Base, rng: Random) -> Made | None:
    rows = len(base.clean)
    first = int(rng.integers(5, rows))
    last = rows if rng.random() < 0.5 else first + 1
    loss = base.clean + base.noise
    loss[first:last] = rng.choice([np.nan, np.inf])
    return _made(base, rng, loss, {"nonfinite": float(base.steps[first])})


def _overfitting(base: _Base, rng: Random) -> Made | None:
    rows, level = len(base.clean), _level(base)
    first = int(rng.uniform(0.2, 0.6) * rows)
    size = DECIDABLE.eval_rise * float(np.exp(rng.uniform(0, np.log(8))))
    extra = np.clip((np.arange(rows) - first) / (rows - first), 0, None) * (size * level[-1])
    extra[first:] += base.clean[first] - base.clean[first:]
    at, values = _evaluated(base, rng, extra)
    best = int(np.argmin(values))
    after = values[best + 1 :]
    noise = float(np.std(np.diff(values[-max(6, len(after)) :]))) / np.sqrt(2)
    if len(after) < 6 or after[-3:].mean() - values[best] < DECIDABLE.eval_noise * noise:
        return None
    if base.clean[first] - base.clean[-1] < DECIDABLE.missed_errors * np.std(base.noise) * np.sqrt(
        4 * base.memory / (rows - first)
    ):
        return None  # the training loss has to fall meanwhile
    return _made(base, rng, base.clean + base.noise, {"overfitting": float(base.steps[first])}, (at, values))


def _period(base: _Base, rng: Random) -> Made | None:
    rows = len(base.clean)
    period = int(np.exp(rng.uniform(np.log(2), np.log(min(200, rows // 10)))))
    if base.noise_name in ("correlated", "moving average"):
        return None
    level = np.abs(base.clean) if base.positive else np.full(rows, np.ptp(base.clean) / 4)
    deviation = float(np.std(base.noise / level))
    height = deviation * float(np.exp(rng.uniform(np.log(0.5), np.log(3))))
    place = np.arange(rows) % period
    form = (place == 0).astype(float) if rng.random() < 0.5 else (place / period)
    # The strongest line of its spectrum, in the power of a line of noise.
    line = np.abs(np.fft.rfft(form * height / deviation))[1:].max() ** 2 / rows
    if line < DECIDABLE.period_power:
        return None
    return _made(base, rng, base.clean + base.noise + height * level * form, {"period": period})


def _restart(base: _Base, rng: Random) -> Made | None:
    """The run goes back some steps and runs them again."""
    rows = len(base.clean)
    at = int(rng.uniform(0.3, 0.9) * rows)
    back = int(rng.uniform(0.02, 0.2) * rows) + 1
    first = max(at - back, 1)
    order = np.concatenate([np.arange(at), np.arange(first, rows)])
    again = np.concatenate([base.noise[:at], rng.permutation(base.noise[first:])])
    loss = base.clean[order] + again
    index = np.arange(len(order))
    steps = base.steps[order]
    columns = {"train/loss": Column(index, steps, loss)}
    if base.with_rate:
        columns["train/lr"] = Column(index, steps, 3e-4 * base.rate[order])
    restart = Restart(at, float(base.steps[at - 1]), float(base.steps[first]))
    log = RunLog(source="made", format="made", columns=columns, rows=len(order), restarts=(restart,))
    name = f"{base.shape}, {base.schedule}, {base.noise_name}, {rows} rows"
    return Made(log, name, base.clean, {"restart": restart.to_step})


_FAULTS: dict[str, Callable[[_Base, Random], Made | None]] = {
    "spikes": _spikes,
    "early spike": _early_spike,
    "plateau": _plateau,
    "stall": _stall,
    "slow rise": _slow_rise,
    "fast rise": _fast_rise,
    "jump": _jump,
    "NaN": _nan,
    "overfitting": _overfitting,
    "period": _period,
    "restart": _restart,
}
