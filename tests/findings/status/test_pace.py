"""Speed, time left and silence, against runs whose every second is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from tests.runlogs.made import made

from palingenesis.findings.status import Status, status_of
from palingenesis.runlogs.table import Column, Restart, RunLog

START = 1.8e9


class Simulated:
    """A run whose steps take their time by chance, with evaluations and checkpoints in between."""

    def __init__(self, seed: int, total: int = 1000, *, every: int = 1, slow_first: float = 0.0) -> None:
        rng = np.random.default_rng(seed)
        steps = np.arange(1, total + 1)
        self.training = rng.gamma(4, 0.5 / 4, total)  # rows of different lengths
        self.training[:3] += slow_first
        self.evaluation = np.where(steps % 100 == 0, 20.0, 0.0)
        self.checkpoint = np.where(steps % 250 == 0, 12.0, 0.0)
        self.clock = START + np.cumsum(self.training + self.evaluation + self.checkpoint)
        self.total, self.every = total, every
        self.loss = np.linspace(5, 2, total) + 0.1 * rng.standard_normal(total)

    def until(self, step: int, *columns: str, **fields: Any) -> RunLog:
        """What its log holds at a step, with some of its columns."""
        rows = np.arange(self.every - 1, step, self.every)
        have = {
            "time": self.clock[rows],
            "train/step_time_s": self.training[rows],
            "train/eval_s": np.where(self.evaluation[rows] > 0, self.evaluation[rows], np.nan),
            "train/checkpoint_s": np.where(self.checkpoint[rows] > 0, self.checkpoint[rows], np.nan),
        }
        chosen = {name: have[name] for name in columns}
        known: dict[str, Any] = {"total_steps": self.total, "modified": self.clock[step - 1], **fields}
        log = made(self.loss[rows], step=rows + 1.0, **chosen, **known)
        # A row's time is no metric of training.
        return dataclasses.replace(
            log,
            columns={name.removeprefix("train/time") or "time": log.columns[name] for name in log.columns},
        )

    def status(self, step: int, *columns: str, after: float = 0.0, **fields: Any) -> Status:
        return status_of(self.until(step, *columns, **fields), self.clock[step - 1] + after)

    def left(self, step: int) -> float:
        return float(self.clock[-1] - self.clock[step - 1])


FORMS = {
    "times": ("time",),
    "times and steps": ("time", "train/step_time_s"),
    "seconds of everything": ("train/step_time_s", "train/eval_s", "train/checkpoint_s"),
    "all": ("time", "train/step_time_s", "train/eval_s", "train/checkpoint_s"),
}


#: Rows a step apart, and ten: then only clocks say what the steps between took.
GIVEN = [(form, 1) for form in FORMS] + [("times", 10), ("times and steps", 10), ("all", 10)]


@pytest.mark.parametrize(("form", "every"), GIVEN)
def test_the_time_left_counts_evaluations_and_checkpoints(form: str, every: int) -> None:
    for seed in range(5):
        run = Simulated(seed, every=every, slow_first=30.0)
        status = run.status(500, *FORMS[form])
        assert status.left is not None and status.left.steps == 500
        assert status.left.seconds == pytest.approx(run.left(500), rel=0.1)
        if status.left.low is not None and status.left.high is not None:
            assert status.left.low <= status.left.seconds <= status.left.high


def test_the_interval_of_the_time_left_holds_the_truth() -> None:
    held = 0
    for seed in range(40):
        run = Simulated(seed)
        left = run.status(600, "time").left
        assert left is not None and left.low is not None and left.high is not None
        held += left.low <= run.left(600) <= left.high
    assert held >= 36


def test_the_step_under_way_is_taken_off() -> None:
    run = Simulated(0)
    early, late = (run.status(500, "time", after=after).left for after in (0.0, 15.0))
    assert early is not None and late is not None
    assert early.seconds - late.seconds == pytest.approx(15.0)


def test_shares_of_the_time_are_told() -> None:
    run = Simulated(0)
    spent = (run.evaluation + run.checkpoint)[:500].sum() / (run.clock[499] - START)
    for form in ("times and steps", "all"):
        speed = run.status(500, *FORMS[form]).speed
        assert speed is not None and speed.aside_share == pytest.approx(spent, abs=0.05)
        assert speed.step_time_s == pytest.approx(np.median(run.training[480:500]))


def test_nothing_is_left_where_nothing_is_known() -> None:
    run = Simulated(0)
    assert run.status(500).left is None  # no times
    assert run.status(500, "time", total_steps=None).left is None
    assert run.status(1000, "time").left is None  # it has ended
    assert run.status(1000, "time").state == "ended"


def test_a_watcher_knows_the_speed_of_a_log_without_times() -> None:
    run = Simulated(0)
    steps = np.arange(400, 501, 5)
    watched = Column(np.arange(len(steps)), steps.astype(float), run.clock[steps - 1])
    status = status_of(run.until(500), run.clock[499], watched=watched)
    assert status.left is not None
    # One of the four evaluations in sight is far from one in a hundred steps: only roughly.
    assert status.left.seconds == pytest.approx(run.left(500), rel=0.3)


def test_silence_is_judged_by_what_was_usual() -> None:
    run = Simulated(0)
    for after, state in ((2.0, "running"), (50.0, "running"), (300.0, "stalled")):
        status = run.status(500, "time", after=after)
        assert status.state == state, after
    assert status.verdict == "WARNING"
    (finding,) = status.findings
    assert finding.check == "status.stalled" and "5 min" in finding.message
    assert status.left is None
    # Evaluations of two minutes have been seen: as long a silence is one of them.
    slow = Simulated(0)
    slow.clock = slow.clock + np.cumsum(np.where(np.arange(1, 1001) % 100 == 0, 120.0, 0.0))
    assert slow.status(500, "time", after=250.0).state == "running"


def test_silence_without_a_speed_needs_half_an_hour() -> None:
    run = Simulated(0)
    assert run.status(500, after=1700).state == "running"
    assert run.status(500, after=1900).state == "stalled"


def test_an_old_log_that_was_copied_is_old() -> None:
    run = Simulated(0)
    day = 86_400
    log = run.until(500, "time", ended=float(run.clock[499]), modified=run.clock[499] + 3 * day)
    assert status_of(log, run.clock[499] + 3 * day + 1).state == "stalled"


def test_a_run_that_ended_is_not_stalled() -> None:
    run = Simulated(0)
    log = run.until(500, "time", finished=True)
    status = status_of(log, run.clock[499] + 1e6)
    assert status.state == "ended"
    assert {finding.check: finding.severity for finding in status.findings} == {"status.ended_early": "info"}


def test_a_pipe_is_never_stalled() -> None:
    run = Simulated(0)
    status = status_of(run.until(500, "time", modified=None), run.clock[499] + 1e6)
    assert status.state == "unknown" and status.silence is None and status.verdict == "HEALTHY"


def test_a_night_between_two_starts_is_no_time_of_training() -> None:
    run = Simulated(0)
    night = 30_000.0
    run.clock[400:] += night
    log = run.until(500, "time", restarts=(Restart(400, 400.0, 401.0),))
    status = status_of(log, run.clock[499] + 300)
    assert status.state == "stalled"
    left = status_of(log, run.clock[499]).left
    assert left is not None and left.seconds == pytest.approx(run.left(500), rel=0.35)


def speeds(before: float, now: float, noise: float, seed: int) -> RunLog:
    rng = np.random.default_rng(seed)
    value = np.concatenate([np.full(200, before), np.full(30, now)]) * np.exp(
        noise * rng.standard_normal(230)
    )
    return made(np.linspace(3, 2, 230), tokens_per_sec=value)


def test_a_run_that_becomes_slower_is_found_and_rows_of_many_lengths_are_not() -> None:
    for seed in range(20):
        (finding,) = status_of(speeds(5000, 2500, 0.1, seed), START).findings
        assert finding.check == "status.slower" and finding.evidence["before"] == pytest.approx(5000, rel=0.1)
        assert not status_of(speeds(5000, 5000, 0.5, seed), START).findings
    rng = np.random.default_rng(0)
    longer = np.concatenate([rng.gamma(2, 0.3, 200), rng.gamma(2, 0.6, 30)])
    assert not status_of(made(np.linspace(3, 2, 230), step_time_s=longer), START).findings


def test_stability_is_that_of_the_last_rows() -> None:
    speed = status_of(speeds(5000, 5000, 0.1, 0), START).speed
    assert speed is not None and speed.tokens_spread == pytest.approx(0.1, rel=0.6)


def test_two_rows_of_one_step_are_one_time() -> None:
    run = Simulated(0)
    log = run.until(100, "time")
    column = log.columns["time"]
    again = Column(
        np.arange(200), np.repeat(column.step, 2), np.repeat(column.value, 2) + np.tile([0.0, 0.01], 100)
    )
    twice = dataclasses.replace(log, columns={**log.columns, "time": again}, rows=200)
    speed = status_of(twice, run.clock[99]).speed
    assert speed is not None and speed.step_time_s is not None
    assert 0.2 < speed.step_time_s < 1.0
