"""The speed of a status: tokens a second, seconds a step, where time goes, what is left, and silence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from palingenesis.findings.status.limits import StatusLimits
from palingenesis.findings.trends import median, spread
from palingenesis.record.columns import Floats
from palingenesis.runlogs.table import Column, RunLog

TIME = "time"
"""Unix seconds of a row."""
STEP_TIME = "train/step_time_s"
_TOKENS = ("train/tokens_per_sec_global", "train/tokens_per_sec")
_ASIDE = ("train/eval_s", "train/checkpoint_s")


@dataclass(frozen=True)
class Speed:
    """How fast the last rows were."""

    tokens_per_sec: float | None
    tokens_spread: float | None
    """Robust standard deviation over the median, of the same rows: what stability there is."""
    tokens_before: float | None
    """Median of the rows before those."""
    slower: bool
    """The tokens per second surely fell. Seconds a step say nothing of that: rows differ in length."""
    step_time_s: float | None
    """Of training alone where the log tells that, else the usual time from one step to the next."""
    aside_share: float | None
    """Share of all time that was spent on evaluation, checkpoints and other things between steps."""


@dataclass(frozen=True)
class Left:
    """The time that is left, evaluations and checkpoints as often as so far."""

    steps: int
    seconds: float
    low: float | None
    high: float | None
    """An interval from how much the pace varied; ``None`` where too little is known of that."""


@dataclass(frozen=True)
class Silence:
    """How long nothing was written."""

    seconds: float
    usual: float | None
    """Seconds from one row to the next."""
    longest: float | None
    """The longest silence so far."""
    allowed: float
    """Seconds of silence that are no sign of anything."""

    @property
    def stale(self) -> bool:
        return self.seconds > self.allowed


@dataclass(frozen=True)
class Pace:
    """Seconds a step, row by row since the last start, without the first rows."""

    each: Floats
    """Seconds by step, evaluation and the like included where the log has times of its rows."""
    steps: Floats
    """Steps that each row covers."""
    aside: float
    """Seconds by step that are not in ``each``."""

    @property
    def usual(self) -> float:
        return float(np.median(self.each))

    @property
    def mean(self) -> float:
        return float((self.each * self.steps).sum() / self.steps.sum())

    def now(self, limits: StatusLimits) -> float:
        """Seconds a step from here on: as so far, or as of late where that surely differs."""
        recent, before = self.each[-limits.speed_rows :], self.each[: -limits.speed_rows]
        now, then = median(recent, limits.alpha), median(before, limits.alpha)
        changed = now.low > then.high or now.high < then.low
        return max(self.mean + (now.value - self.usual if changed else 0.0), now.low, 0.0) + self.aside

    def error(self, limits: StatusLimits) -> float | None:
        """Standard error of the mean, from the means of parts of the run."""
        if len(self.each) < 2 * limits.pace_blocks:
            return None
        parts = np.array_split(np.arange(len(self.each)), limits.pace_blocks)
        means = [float(np.average(self.each[part], weights=self.steps[part])) for part in parts]
        return float(np.std(means, ddof=1) / math.sqrt(len(means)))


def pace_of(log: RunLog, limits: StatusLimits, watched: Column | None = None) -> Pace | None:
    """Seconds a step; ``None`` where the log has no times.

    Args:
        log: the log.
        limits: what counts as its first rows.
        watched: steps and the unix seconds at which a watcher saw them, for a log without times.
    """
    first_row = log.restarts[-1].row if log.restarts else 0
    times = log.live(TIME).finite
    if times:
        times = _one_a_step(times.where(times.row >= first_row))
    if not times or len(times.value) < 2:
        times = watched or times
    if times and len(times.value) > 1:
        steps, seconds = np.diff(times.step), np.diff(times.value)
        good = (steps > 0) & (seconds >= 0)
        each, covers, aside = seconds[good] / steps[good], steps[good], 0.0
    else:
        own = log.live(STEP_TIME).finite
        own = own.where(own.row >= first_row)
        each, covers = own.value, np.ones(len(own.value))
        aside = _aside(log, first_row)
    if len(each) > 2 * limits.warmup_rows:
        each, covers = each[limits.warmup_rows :], covers[limits.warmup_rows :]
    return Pace(each, covers, aside) if len(each) and each.sum() > 0 else None


def _one_a_step(times: Column) -> Column:
    """The last row of each step: an evaluation has a row of its own, at the step it belongs to."""
    return times.where(np.append(np.diff(times.step) != 0, True)) if times else times


def _aside(log: RunLog, first_row: int) -> float:
    """Seconds of evaluation and checkpoints by step."""
    spent = sum(
        float(column.value[column.row >= first_row].sum())
        for column in (log.live(name).finite for name in _ASIDE)
    )
    steps = log.live(log.loss_name)
    covered = steps.step[steps.row >= first_row] if steps else np.empty(0)
    return spent / float(covered[-1] - covered[0]) if len(covered) > 1 and covered[-1] > covered[0] else 0.0


def speed_of(log: RunLog, pace: Pace | None, limits: StatusLimits) -> Speed | None:
    """The speed of the last rows; ``None`` where the log tells none."""
    first_row = log.restarts[-1].row if log.restarts else 0
    tokens = next((column for name in _TOKENS if (column := log.live(name).finite)), None)
    value = np.empty(0) if tokens is None else tokens.value[tokens.row >= first_row]
    if len(value) > 2 * limits.warmup_rows:
        value = value[limits.warmup_rows :]
    if not len(value) and pace is None:
        return None
    now, before = value[-limits.speed_rows :], value[: -limits.speed_rows]
    level = float(np.median(now)) if len(now) else None
    own = log.live(STEP_TIME).finite.value[-limits.speed_rows :]
    whole = None if pace is None else pace.mean + pace.aside
    step_time = float(np.median(own)) if len(own) else (None if pace is None else pace.usual)
    return Speed(
        tokens_per_sec=level,
        tokens_spread=float(spread(now) / level) if level and len(now) >= limits.speed_least else None,
        tokens_before=float(np.median(before)) if len(before) else None,
        slower=_slower(now, before, limits),
        step_time_s=step_time,
        aside_share=_share(log, pace, whole, first_row),
    )


def _share(log: RunLog, pace: Pace | None, whole: float | None, first_row: int) -> float | None:
    """What is not training, of all time: as logged, or what training's own times leave of the clock's."""
    if pace is None or not whole:
        return None
    if any(log.live(name) for name in _ASIDE):
        return min(_aside(log, first_row) / whole, 1.0)
    own = log.live(STEP_TIME).finite
    own_mean = float(own.value.mean()) if own else pace.usual
    return float(np.clip(1 - own_mean / whole, 0.0, 1.0)) if own or pace.aside else None


def _slower(now: Floats, before: Floats, limits: StatusLimits) -> bool:
    if min(len(now), len(before)) < limits.speed_least:
        return False
    return median(now, limits.alpha).high < (1 - limits.slower) * median(before, limits.alpha).low


def left_of(log: RunLog, pace: Pace | None, silence: Silence | None, limits: StatusLimits) -> Left | None:
    """The time that is left; ``None`` where the log has no times or no end, or the run has come to a halt."""
    stale = silence is not None and silence.stale
    if pace is None or log.total_steps is None or log.last_step is None or stale:
        return None
    steps = max(log.total_steps - int(log.last_step), 0)
    by_step, error = pace.now(limits), pace.error(limits)
    done = 0.0 if silence is None else silence.seconds  # since the last row
    seconds = max(steps * by_step - done, 0.0)
    reach = None if error is None else limits.pace_errors * error * steps
    return Left(
        steps=steps,
        seconds=seconds,
        low=None if reach is None else max(seconds - reach, 0.0),
        high=None if reach is None else seconds + reach,
    )


def silence_of(
    log: RunLog, pace: Pace | None, now: float, limits: StatusLimits, held_back: float = 0.0
) -> Silence | None:
    """How long the log has not grown; ``None`` for a pipe, which ends when its writer does.

    Args:
        log: the log.
        pace: its pace.
        now: unix seconds.
        limits: how much silence is a sign.
        held_back: share of the log that its writer may hold back until a block is full.
    """
    if log.modified is None:
        return None
    last = log.modified
    if log.ended is not None and last - log.ended > limits.copied_s:
        last = log.ended
    gaps = _gaps(log, pace, limits)
    usual = float(np.median(gaps)) if len(gaps) else None
    longest = float(gaps.max()) if len(gaps) else None
    allowed = limits.stale_unknown_s
    if usual is not None and longest is not None:
        block = held_back * float(gaps.sum())  # the time in which one is filled
        allowed = max(
            limits.stale_intervals * usual,
            limits.stale_gaps * max(longest, block),
            limits.stale_least_s,
        )
    return Silence(max(now - last, 0.0), usual, longest, allowed)


def _gaps(log: RunLog, pace: Pace | None, limits: StatusLimits) -> Floats:
    """Seconds from each row to the next."""
    times = _one_a_step(log.live(TIME).finite)
    if len(times.value) > 1:
        gaps = np.diff(times.value)
        again = [restart.row for restart in log.restarts]  # the time between two starts is no silence
        return gaps[(gaps >= 0) & ~np.isin(times.row[1:], again)]
    steps = np.diff(log.live(log.loss_name).step)
    if pace is None or not len(steps):
        return np.empty(0)
    spent = [column.value for column in (log.live(name).finite for name in _ASIDE) if column]
    return np.append(steps * pace.now(limits), max((float(each.max()) for each in spent), default=0.0))
