"""The largest batch and the longest rows that fit a card: traced, with the next that does not."""

from __future__ import annotations

from dataclasses import dataclass

from palingenesis.preflight.memory.changes import Budget, Change
from palingenesis.preflight.memory.estimate import Fit, estimate_memory

#: Lengths are told in multiples of this.
LENGTH_STEP = 64
_MOST_ROWS = 4096
_MOST_TOKENS = 2**22
#: Rows longer than this are not looked for where the model does not say how long they may be.
_LONGEST = 2**20


@dataclass(frozen=True)
class Limit:
    """How far an option can go.

    Attributes:
        option: which.
        largest: the largest value traced that fits; ``None`` if none does.
        exact: the next value does not fit. Else time was up, and there may be more.
        ended_by: what ended the search, in words: ``"memory"``, ``"time"``, or what the model can take.
    """

    option: str
    largest: int | None
    exact: bool
    ended_by: str


def largest_batch(fit: Fit, budget: Budget) -> Limit:
    """The most rows of a micro-batch."""
    config = fit.estimate.config
    # A batch of more tokens than this is none that anybody trains with.
    most = max(1, min(_MOST_ROWS, _MOST_TOKENS // (config.data.max_seq_length or 1)))
    rows = config.train.per_device_batch_size
    return _search(fit, "train.per_device_batch_size", rows, 1, most, "more were not looked for", budget)


def longest_rows(fit: Fit, budget: Budget) -> Limit:
    """The most tokens of a row, as far as the model has positions."""
    config = fit.estimate.config
    known = getattr(fit.estimate.described.get_text_config(), "max_position_embeddings", None)
    most = min(known or _LONGEST, _MOST_TOKENS // config.train.per_device_batch_size)
    most = most // LENGTH_STEP * LENGTH_STEP
    length = config.data.max_seq_length or LENGTH_STEP
    if fit.fits and known is not None and length >= most:
        return Limit("data.max_seq_length", length, True, "the model's positions")
    start = max(LENGTH_STEP, length // LENGTH_STEP * LENGTH_STEP)
    return _search(
        fit,
        "data.max_seq_length",
        start,
        LENGTH_STEP,
        max(most, LENGTH_STEP),
        "the model's positions",
        budget,
    )


def _search(fit: Fit, option: str, start: int, step: int, most: int, ceiling: str, budget: Budget) -> Limit:
    gpu_bytes = fit.gpu_bytes
    assert gpu_bytes is not None
    estimate = fit.estimate
    totals: dict[int, int] = {}

    def fits(value: int) -> bool:
        config = Change({option: value}, "").applied(estimate.config)
        made = estimate_memory(
            config, world_size=estimate.world_size, whole=False, described=estimate.described
        )
        budget.took(made.seconds)
        found = made.on(gpu_bytes)
        totals[value] = found.total
        return bool(found.fits)

    start = min(start, most)
    known = start == _value(fit, option)
    if known:
        totals[start] = fit.total
    good, bad = 0, most + step
    if known and fit.fits:
        good = start
    elif known:
        bad = start
    while bad - good > step and not budget.spent:
        value = _next(totals, good, bad, step, most, gpu_bytes) if totals else start
        if fits(value):
            good = value
        else:
            bad = value
    exact = bad - good <= step
    found = ceiling if bad > most else "memory"
    return Limit(option, good or None, exact, found if exact else "time")


def _value(fit: Fit, option: str) -> int:
    section, name = option.split(".")
    value: int = getattr(getattr(fit.estimate.config, section), name)
    return value


def _next(totals: dict[int, int], good: int, bad: int, step: int, most: int, room: int) -> int:
    """Where to look next: where a line through what is known meets the card's memory, inside what is open."""
    known = sorted(totals)
    guess: float
    if len(known) == 1:
        only = known[0]
        guess = only * 2 if totals[only] <= room else only / 2
    else:
        nearest = sorted(known, key=lambda value: abs(totals[value] - room))[:2]
        first, second = sorted(nearest) if len(nearest) == 2 else (good, bad)
        rise = (totals[second] - totals[first]) / max(second - first, 1)
        guess = first + (room - totals[first]) / rise if rise > 0 else most
        # Just inside the limit, then just outside: two traces close the search.
        guess -= step * 0.25
    value = int(guess // step) * step
    lowest, highest = good + step, min(bad - step, most)
    value = min(max(value, lowest), highest)
    if len(known) > 4:  # the line does not describe it: halve what is open
        value = min(max((good + bad) // 2 // step * step, lowest), highest)
    return value
